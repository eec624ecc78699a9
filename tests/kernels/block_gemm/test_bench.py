"""What the benchmark times: the op and BF16 beside each other, and every choice put back."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import pytest
import torch

from stoker_kernels.block_gemm import bench, decoded, plane_choose, sm90_few, sm90_rows, sm90_wide, wide_bench
from stoker_kernels.launch import dispatch, pdl


@pytest.mark.parametrize("sweep", [False, True])
def test_a_layer_is_timed_by_every_choice_and_by_bf16(sweep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, nothing is timed: each way is run once."""
    dispatch.ops()
    seen: list[tuple[int, ...]] = []

    def choices() -> tuple[int, ...]:
        wide = plane_choose.WIDE_FROM, plane_choose.WIDE_TO
        return sm90_few.FILLED, decoded.DECODED_FROM, decoded.SCRATCH_BYTES, sm90_rows.PART_STEPS, *wide

    def run_once(run: Callable[[int], None], rounds: int = 1) -> float:
        run(random.randint(0, 5))
        seen.append(choices())
        return float(len(seen))

    monkeypatch.setattr(bench, "timed", run_once)
    monkeypatch.setattr(bench, "CHAIN", ((512, 256), (256, 256), (1024, 256), (256, 512)))
    monkeypatch.setattr(sm90_rows, "device_refusal", lambda *_: None)
    monkeypatch.setattr(decoded, "decode_rows", lambda weight, out, first: out.zero_())
    before = choices()
    tokens = random.randint(33, 60), random.randint(1025, 1040)
    found = list(bench.chain_rows(torch.device("cpu"), tokens, sweep))
    plain = [row for row in found if row.how == "a layer"]
    assert [(row.format, row.tokens) for row in plain] == [(name, m) for name in bench.CHAINED for m in tokens]
    assert all(row.bf16_us is not None and row.limit_us > 0 for row in plain)
    assert {row.how for row in found if not row.tokens} >= {"rows decoded alone"}
    hows = {row.how for row in found}
    wanted = {f"{name} {value}" for _, name, values, _ in bench.CHOICES for value in values} | {"with SwiGLU"}
    assert wanted <= hows if sweep else not wanted & hows
    assert len(set(seen)) == (1 + 1 + 1 + 2 + 2 + 3 + 4 if sweep else 1)
    assert before == choices()
    assert not pdl._enabled


@pytest.mark.parametrize("tiles", [False, True])
def test_wide_products_are_timed_beside_what_they_replace(tiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each weight by the op without them and in BF16, gate and up with their activation too; every tile and split."""
    dispatch.ops()
    asked: list[tuple[bool, object, int]] = []

    def multiply(gated: bool, *_: object, tile: object, split: int) -> None:
        asked.append((gated, tile, split))

    def run_once(run: Callable[[int], None], rounds: int = 1) -> float:
        assert plane_choose.WIDE_TO > 0
        run(random.randint(0, 5))
        return 1.0 + len(asked)

    monkeypatch.setattr(wide_bench, "timed", run_once)
    monkeypatch.setattr(wide_bench, "CHAIN", ((512, 256), (256, 256), (1024, 256), (256, 512)))
    monkeypatch.setattr(wide_bench, "COLD_BYTES", 1e5)
    monkeypatch.setattr(sm90_wide, "linear", functools.partial(multiply, False))
    monkeypatch.setattr(sm90_wide, "silu_mul", functools.partial(multiply, True))
    tokens = [random.randint(33, 64), random.randint(65, 90)]
    found = list(wide_bench.rows_of(torch.device("cpu"), ["Q4_K", "Q6_K"], tokens, tiles))
    ways = 3 + (len(sm90_wide.TILES) * (1 + sm90_wide.MAX_SPLIT) + 2 if tiles else 0)
    assert len(found) == ways * len(tokens) * 2 * 5
    assert {row.how for row in found} >= {"BF16", "otherwise", "wide", "SwiGLU, BF16", "SwiGLU, otherwise"}
    assert all(row.bf16_us is not None and row.limit_us > 0 for row in found)
    assert len(asked) == (ways - 2) * len(tokens) * 2 * 5
    assert (True, None, 0) in asked
    assert not pdl._enabled
