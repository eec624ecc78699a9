"""Gate and up in fragments of many tokens: a weight that was dequantized just now is never asked for too early."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.kernels.integer_gemm.test_integer_gemm import random_weight

from stoker_kernels.gemm import gated, gated_fragments, table, tiles
from stoker_kernels.gemm.small import Operands
from stoker_kernels.gemm.wide import WideTile
from stoker_kernels.launch import pdl
from stoker_kernels.quant import LinearWeight


@pytest.mark.parametrize("tile", [None, WideTile(160, True)], ids=["two kernels", "one"])
def test_what_was_dequantized_just_now_meets_a_plain_launch(
    tile: WideTile | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns, rows, went = 128 * random.randint(1, 3), 32 * random.randint(2, 6), []
    dense, x = torch.randn(rows, columns).bfloat16(), torch.randn(random.randint(3, 40), columns).bfloat16()
    weight, _ = random_weight(rows, columns, 4, 32)
    monkeypatch.setattr(gated_fragments.fragment_gemm, "silu_mul_pairs", lambda *_: None)
    monkeypatch.setattr(gated_fragments.fragment_gemm, "dense", lambda *_: dense)
    monkeypatch.setattr(table, "gated_tile", lambda *_: tile)

    def launch(tile: Any, o: Operands, *, pdl: bool) -> None:
        gate, up = (o.x.float() @ o.weight.float().t()).chunk(2, dim=1)
        o.out.copy_(torch.nn.functional.silu(gate) * up)
        went.append(pdl)

    def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
        went.append(pdl._enabled)
        return x @ weight.data.t()

    monkeypatch.setattr(tiles, "launch", launch)
    monkeypatch.setattr(tiles, "pdl_on", lambda _: pdl._enabled)
    monkeypatch.setattr(gated, "linear", linear)
    monkeypatch.setattr(gated, "select", lambda *_: gated.fused)
    object.__setattr__(weight, "layout", "pairs")
    pdl.enable_pdl(True)
    try:
        got = gated_fragments.own(x, weight)
    finally:
        pdl.enable_pdl(False)
    gate, up = (x.double() @ dense.double().t()).chunk(2, dim=1)
    torch.testing.assert_close(got.double(), torch.nn.functional.silu(gate) * up, rtol=0.03, atol=0.5)
    assert went == [False]
