"""Long prompts whose rows ranks share out: the logits of ranks that do not, and of the whole model.

Ranks are threads, and what goes from GPU to GPU lies in a table that all have.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.runtime.conftest import BASE, PagedModel, _randomize
from torch import Tensor

from stoker_kernels.all_reduce import LEAST_SHARE, RowShares, Share
from stoker_kernels.norm import add_rms_norm, add_rms_norm_quant
from stoker_kernels.quant import Quantized
from stoker_runtime.config import EngineConfig
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.spec import Norm
from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.decoder import RankDecoder
from stoker_runtime.parallel.place import Place, even_part, places
from stoker_runtime.parallel.shared_rows import shared_tokens, shares_rows
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
LEAST = 9  # tokens of a step whose rows are shared out


class Table:
    """Where ranks that are threads leave what the others read."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._said: list[Any] = [None] * ranks

    def all(self, rank: int, mine: Any) -> list[Any]:
        """What each rank has, in their order."""
        self._said[rank] = mine
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()
        return said


class Shares:
    """`RowShares` over a table. Counts exchanges, and refuses rows that are asked for before they are normed."""

    outgoing, incoming = RowShares.outgoing, RowShares.incoming

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank, self._ranks = table, rank, table.ranks
        self._others = tuple(other % table.ranks for other in range(rank + 1, rank + table.ranks))
        self.exchanges = 0
        self._parts: dict[int, Tensor] = {}
        self._normed: list[Tensor | Quantized] = []

    def shares(self, tokens: int, dtype: torch.dtype) -> tuple[Share, ...]:
        if tokens < LEAST:
            return ()
        cut = [even_part(tokens, self._ranks, rank) for rank in range(self._ranks)]
        return tuple(Share(rank, part.start, part.stop) for rank, part in enumerate(cut))

    def give(self, share: Share, part: Tensor, at: int = 0) -> None:
        others = self._parts.keys() - {share.owner}
        assert share.owner != self._rank or len(others) == self._ranks - 1, "the own part comes last"
        before = self._parts.get(share.owner, part[:0])
        assert len(before) == at
        self._parts[share.owner] = torch.cat((before, part))

    def sum_add_rms_norm(
        self, share: Share, residual: Tensor, weight: Tensor, eps: float, *, quantized: bool
    ) -> None:
        parts = self._table.all(self._rank, self._parts)
        total = torch.stack([each[self._rank] for each in parts]).sum(0)
        norm = add_rms_norm_quant if quantized else add_rms_norm
        self._normed = self._table.all(self._rank, norm(total, residual, weight, eps))
        self._parts = {}
        self.exchanges += 1

    def rows(self, share: Share) -> Tensor | Quantized:
        return self._normed[share.owner]

    def all_rows(self, tokens: int) -> Tensor:
        rows = torch.cat([each for each in self._normed if isinstance(each, Tensor)])
        assert len(rows) == tokens
        return rows


class Ends:
    """`Collectives` over a table."""

    def __init__(self, place: Place, table: Table, *, shared: bool) -> None:
        self.place, self._table = place, table
        self.row_shares = Shares(table, place.tensor) if shared else None

    def peers_for(self, _: Tensor) -> None:
        return None

    def sum(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._table.all(self.place.tensor, x.clone())).sum(0))

    def gather(self, shard: Tensor, out: Tensor) -> Tensor:
        return out.copy_(torch.cat(self._table.all(self.place.tensor, shard), dim=1))


class RankModel(PagedModel):
    """One rank's part of a model, with pages of its own."""

    def __init__(self, model: str, ends: Ends, quantization: str) -> None:
        super().__init__(model, quantization=quantization)
        source = read_source(model)
        cut = Cut(build_spec(source), ends.place)
        weights = load_weights(source, cut.spec, CPU, torch.float32, quantization, cut=cut)
        self.spec = cut.spec
        self.decoder = RankDecoder(
            cut.spec, weights, CPU, torch.float32, max_model_len=256, collectives=cast(Collectives, ends)
        )
        whole, kept = self._kv[0][0].shape, self.spec.kv_heads
        shape = (whole[0], kept, *whole[2:])
        self._kv = [tuple(torch.full(shape, torch.nan) for _ in each) for each in self._kv]


def by_ranks(model: str, ranks: int, work: Sequence[Sequence[list[int]]], *, shared: bool, quantization: str) -> Any:
    """Logits of every step's rows on each rank, and how many exchanges there were."""
    table = Table(ranks)

    def life(place: Place) -> tuple[list[Tensor], int]:
        ends = Ends(place, table, shared=shared)
        part = RankModel(model, ends, quantization)
        with torch.inference_mode():
            logits = [row for step in work for row in part.step(list(enumerate(step)))]
        return logits, ends.row_shares.exchanges if ends.row_shares else 0

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(life, places(ranks, 1)))


def mixture(folder: Path) -> Path:
    """A tiny mixture of experts whose first layer is dense."""
    import transformers

    sizes = {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    config = transformers.Qwen3MoeConfig(**{**BASE, **sizes, "mlp_only_layers": [0]})
    model = transformers.AutoModelForCausalLM.from_config(config)
    _randomize(model, seed=5)
    model.save_pretrained(folder)
    return folder


MODELS = ["llama-bias", "qwen3", "gemma", "mistral-window", "llama-eight-heads", "mixture"]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shared_rows_give_the_model_s_logits(
    name: str, ranks: int, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """A step of several prompts, a longer one beside a decode, and one of too few tokens to be shared out."""
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    rng = random.Random(seed)
    model = str(mixture(tmp_path) if name == "mixture" else tiny_checkpoint(name))
    lengths = [[rng.randint(5, 40), rng.randint(4, 30)], [1, rng.randint(LEAST, 60)], [1, 1]]
    work = [[[rng.randrange(3, 128) for _ in range(length)] for length in step] for step in lengths]
    (shared, exchanges), *others = by_ranks(model, ranks, work, shared=True, quantization="none")
    # Twice a layer but for the last one, in the two steps that are long enough.
    layers = 2
    assert exchanges == 2 * 2 * layers
    assert all(count == exchanges for _, count in others)
    plain = by_ranks(model, ranks, work, shared=False, quantization="none")[0][0]
    whole = PagedModel(model)
    with torch.inference_mode():
        expected = [row for step in work for row in whole.step(list(enumerate(step)))]
    for mine, theirs, right in zip(shared, plain, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mine, right, rtol=1e-3, atol=1e-3)


def test_rows_are_shared_out_in_fp8(tiny_checkpoint: Callable[[str], Path]) -> None:
    """What is normed goes from rank to rank quantized, with its scales."""
    model = str(tiny_checkpoint("qwen3"))
    rng = random.Random(7)
    work = [[[rng.randrange(3, 128) for _ in range(length)] for length in (33, 18)]]
    shared = by_ranks(model, 2, work, shared=True, quantization="fp8_channel")
    plain = by_ranks(model, 2, work, shared=False, quantization="fp8_channel")
    assert shared[0][1] == 4
    for mine, theirs in zip(shared[0][0], plain[0][0], strict=True):
        assert torch.nn.functional.cosine_similarity(mine, theirs, dim=0) > 0.999


@pytest.mark.parametrize(
    ("name", "shared"), [("qwen3", True), ("gemma", True), ("gemma2", False), ("granite", False)]
)
def test_which_models_share_rows(name: str, shared: bool, tiny_checkpoint: Callable[[str], Path]) -> None:
    """Layers that norm what they give, or weigh it, add by the ordinary way."""
    spec = build_spec(read_source(str(tiny_checkpoint(name))))
    assert shares_rows(spec) == shared
    assert spec.norm is Norm.RMS


def test_steps_that_the_gpu_ends_before_the_host_are_not_shared_out() -> None:
    """The longer a layer takes, the shorter a step may be; 8 bits are faster."""

    def least(shape: str, **options: Any) -> range:
        config = EngineConfig(model=shape, max_num_batched_tokens=16_384, tensor_parallel_size=2, **options)
        return shared_tokens(build_spec(read_source(f"shape:{shape}")), config)

    small, seven = least("qwen3-0.6b"), least("qwen2.5-7b")
    assert len(small) == 0
    assert 2 * LEAST_SHARE < seven.start < 8192
    assert seven.stop == 16_385
    assert least("qwen2.5-7b", quantization="fp8").start > seven.start
    assert least("llama-3.3-70b").start == 2 * LEAST_SHARE
