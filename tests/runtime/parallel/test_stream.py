"""What ranks add to their streams: the sum of their parts, once, in whatever way it is made."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch
from tests.runtime.parallel.test_quantized_cut import dense  # noqa: F401  (a fixture)
from torch import Tensor

from stoker_kernels.norm import add_rms_norm, add_rms_norm_quant
from stoker_kernels.quant import Quantized, quantize_weight
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import LayerWeights
from stoker_runtime.models.layers.stream import Stream
from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.parallel.stream import RankStream

RANKS, WIDTH = 3, 56


class Meeting:
    """Ranks that are threads, which sum by the definition; `by_peers` as GPUs do that reach each other's memory."""

    def __init__(self, *, by_peers: bool) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=30)
        self._parts: dict[int, Tensor] = {}
        self._here = threading.local()
        self.by_peers = by_peers
        self.used: set[str] = set()

    def join(self, rank: int) -> None:
        self._here.rank = rank

    def sum(self, x: Tensor) -> Tensor:
        self.used.add("sum")
        return x.copy_(self._total(x))

    def peers_for(self, _: Tensor) -> Meeting | None:
        return self if self.by_peers else None

    def sum_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        self.used.add("norm")
        return add_rms_norm(self._total(x), residual, weight, eps)

    def sum_add_rms_norm_quant(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Quantized:
        self.used.add("quant")
        return add_rms_norm_quant(self._total(x), residual, weight, eps)

    def _total(self, x: Tensor) -> Tensor:
        self._parts[self._here.rank] = x.clone()
        self._barrier.wait()
        total = torch.stack([self._parts[rank] for rank in range(RANKS)]).sum(0)
        self._barrier.wait()
        return total


def values(hidden: Tensor | Quantized) -> Tensor:
    return hidden.data.float() if isinstance(hidden, Quantized) else hidden


@pytest.mark.parametrize("by_peers", [False, True])
@pytest.mark.parametrize("form", ["norm", "quant", "post"])
def test_a_part_is_summed_once(request: pytest.FixtureRequest, form: str, by_peers: bool) -> None:
    spec = build_spec(read_source(str(request.getfixturevalue("dense"))))
    reader = quantize_weight(torch.randn(24, WIDTH), "fp8_channel" if form == "quant" else "dense")
    layer = LayerWeights(
        qkv=reader,
        output=reader,
        gate_up=reader,
        down=None,
        ffn_norm=torch.rand(WIDTH),
        attention_post_norm=torch.rand(WIDTH) if form == "post" else None,
    )
    parts = [torch.randn(5, WIDTH) for _ in range(RANKS)]
    stream, meeting = torch.randn(5, WIDTH), Meeting(by_peers=by_peers)

    def run(rank: int) -> tuple[Tensor | Quantized, Tensor]:
        meeting.join(rank)
        own = stream.clone()
        mine = RankStream(spec, cast(Collectives, meeting))
        return mine.to_ffn(parts[rank].clone(), own, layer), own

    with ThreadPoolExecutor(RANKS) as pool:
        results = list(pool.map(run, range(RANKS)))
    whole = stream.clone()
    expected = values(Stream(spec).to_ffn(torch.stack(parts).sum(0), whole, layer))
    for hidden, own in results:
        assert torch.equal(own, whole)
        assert torch.equal(values(hidden), expected)
    assert meeting.used == ({form} if by_peers and form != "post" else {"sum"})
