"""Adapters' kernels against the reference: mixed ranks, tokens without one, odd shapes, NaN in unused ranks."""

from __future__ import annotations

import random

import pytest
import torch

from stoker_kernels import lora
from stoker_kernels.launch.dispatch import interpreting
from stoker_kernels.lora import reference
from stoker_kernels.quant import Quantized


def _aligned(size: int) -> int:
    return -(-size // 16) * 16


def target(
    generator: torch.Generator, slots: int, max_rank: int, columns: int, rows: tuple[int, ...], dtype: torch.dtype,
    device: torch.device,
) -> lora.LoraTarget:  # fmt: skip
    """Matrices in a slab like the executor's, with NaN wherever no adapter has a rank."""
    pieces, width = len(rows), _aligned(columns)
    line = pieces * width + _aligned(sum(rows))
    slab = torch.randn((slots, max_rank, line), generator=generator) * 0.3
    ranks = torch.randint(0, max_rank + 1, (slots,), generator=generator, dtype=torch.int32)
    ranks[0] = max_rank
    for slot, rank in enumerate(ranks.tolist()):
        slab[slot, rank:] = torch.nan
    slab = slab.to(dtype).to(device)
    a = slab[:, :, : pieces * width].view(slots, max_rank, pieces, width)[..., :columns]
    return lora.LoraTarget(a, slab[:, :, pieces * width :][..., : sum(rows)], ranks.to(device), rows)


def plan(adapters: torch.Tensor, slots: int) -> lora.LoraPlan:
    made = lora.LoraPlan.allocate(len(adapters), slots, adapters.device).of(adapters, slots)
    lora.group_tokens(adapters, slots, made)
    return made


def draw(generator: torch.Generator, tokens: int, slots: int, device: torch.device) -> torch.Tensor:
    return torch.randint(-1, slots, (tokens,), generator=generator, dtype=torch.int32).to(device)


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_grouped_by_slot(seed: int, device: torch.device) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    slots, tokens = rng.choice([1, 3, 8, 11]), rng.choice([1, 2, 37, 513, 700])
    adapters = draw(generator, tokens, slots, device)
    if seed == 5:
        adapters.fill_(slots - 1)
    got, expected = (lora.LoraPlan.allocate(1024, slots, device).of(adapters, slots) for _ in range(2))
    got.order.fill_(99)
    got.adapters.fill_(99)
    for each in (got, expected):
        each.turn.fill_(rng.randrange(2**30))
    turns = [int(each.turn) + 1 for each in (got, expected)]
    lora.group_tokens(adapters, slots, got)
    reference.group_tokens(adapters, slots, expected)
    assert [int(each.turn) for each in (got, expected)] == turns
    assert torch.equal(got.adapters, expected.adapters)
    assert torch.equal(got.order, expected.order)
    present = got.order[got.order >= 0].sort().values
    assert torch.equal(present, (adapters >= 0).nonzero().view(-1).to(torch.int32))


def test_rows_and_tokens_have_the_adapters_of_their_slots(device: torch.device) -> None:
    row_slots = torch.tensor([4, -1, 0, 2, -1], dtype=torch.int32, device=device)
    query_start = torch.tensor([0, 1, 2, 302, 305, 305], dtype=torch.int32, device=device)
    slot_adapters = torch.tensor([3, 7, -1, 9, 1], dtype=torch.int32, device=device)
    results = []
    for function in (lora.gather_adapters, reference.gather_adapters):
        rows = torch.full((5,), 99, dtype=torch.int32, device=device)
        tokens = torch.full((320,), 99, dtype=torch.int32, device=device)
        function(row_slots, query_start, slot_adapters, rows, tokens)
        results.append((rows.tolist(), tokens.tolist()))
    assert results[0] == results[1]
    assert results[0] == ([1, -1, 3, -1, -1], [1, -1] + [3] * 300 + [-1] * 18)


@pytest.mark.matrix("dtype", take=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(4))
def test_products_match(seed: int, dtype: torch.dtype, device: torch.device) -> None:
    rng, generator = random.Random(100 + seed), torch.Generator().manual_seed(seed)
    slots, max_rank = rng.choice([1, 4]), rng.choice([5, 16, 40]) if seed else 256
    columns, tokens = rng.choice([48, 1100]), rng.choice([1, 21])
    rows = rng.choice([(200, 24, 24), (130, 130), (72,)])
    place = target(generator, slots, max_rank, columns, rows, dtype, device)
    x = torch.randn((tokens, columns), generator=generator).to(dtype).to(device)
    adapters = draw(generator, tokens, slots, device)
    adapters[0] = 0
    check(x, place, adapters, slots, dtype)


def test_many_tokens_match(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(7)
    place = target(generator, 3, 24, 80, (96,), torch.float32, device)
    check(
        torch.randn((600, 80), generator=generator).to(device), place, draw(generator, 600, 3, device), 3, torch.float32
    )


# The interpreter takes minutes for eight blocks of ranks of so many tokens; three of them, the last in part, show it.
@pytest.mark.matrix
@pytest.mark.parametrize("max_rank", [9, 37, 80 if interpreting() else 256])
def test_many_tokens_shrink_in_parts(max_rank: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(max_rank)
    tokens, columns = random.randrange(520, 900), 16 * random.randrange(*((17, 40) if interpreting() else (40, 90)))
    print(tokens, columns)
    place = target(generator, 3, max_rank, columns, (96, 41), torch.float32, device)
    x = torch.randn((tokens, columns), generator=generator).to(device)
    adapters = draw(generator, tokens, 3, device)
    assert check(x, place, adapters, 3, torch.float32) > 1


@pytest.mark.matrix("dtype", take=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("max_rank", [16, 35])
@pytest.mark.parametrize("many", [False, True])
def test_the_activation_within_expand_matches(
    many: bool, max_rank: int, dtype: torch.dtype, device: torch.device
) -> None:
    seed = random.randrange(2**30)
    print("seed", seed)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    tokens, rows = rng.randrange(513, 700) if many else rng.randrange(1, 60), rng.randrange(3, 300)
    place = target(generator, 4, max_rank, 80, (rows, rows), dtype, device)
    x = torch.randn((tokens, 80), generator=generator).to(dtype).to(device)
    adapters = draw(generator, tokens, 4, device)
    adapters[0], planned = 0, rng.random() < 0.5
    base = torch.randn((tokens, 2 * rows), generator=generator).to(dtype).to(device)
    scratch = torch.full((lora.scratch_elements(tokens, 4, max_rank, 2, 80),), torch.nan, device=device)
    step, want = plan(adapters, 4), torch.empty((tokens, rows), dtype=dtype, device=device)
    reference.shrink_lora(x, place, step, scratch, planned=False)
    reference.expand_silu_mul(base.clone(), place, step, scratch, want, 1, False)
    scratch.fill_(torch.nan)
    parts = lora.shrink_lora(x, place, step, scratch, planned=planned)
    got = lora.expand_silu_mul(base.clone(), place, step, scratch, parts=parts, planned=planned)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert (got.float() - want.float()).abs().max() <= tolerance * want.float().abs().max()


@pytest.mark.parametrize("max_rank", [7, 24])
def test_four_pieces_match(max_rank: int, device: torch.device) -> None:
    """Of which the last is another part of the first one's matrix."""
    rng, generator = random.Random(max_rank), torch.Generator().manual_seed(9)
    tokens = rng.choice([3, 530])
    place = target(generator, 3, max_rank, 112, (144, 24, 24, 136), torch.float32, device)
    x = torch.randn((tokens, 112), generator=generator).to(device)
    check(x, place, draw(generator, tokens, 3, device), 3, torch.float32)


def test_quantized_inputs_match(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(8)
    place = target(generator, 4, 16, 208, (64, 32, 32), torch.float16, device)
    x = Quantized.of(torch.randn((19, 208), generator=generator))
    x = Quantized(x.data.to(device), x.scale.to(device))
    check(x, place, draw(generator, 19, 4, device), 4, torch.float16)


DEFINITIONS = (reference.shrink_lora, reference.expand_lora)


def check(
    x: torch.Tensor | Quantized, place: lora.LoraTarget, adapters: torch.Tensor, slots: int, dtype: torch.dtype
) -> int:
    """→ the parts that A·x was the sum of."""
    tokens, device = len(adapters), adapters.device
    base = torch.randn((tokens, sum(place.rows)), generator=torch.Generator().manual_seed(1)).to(dtype).to(device)
    _, max_rank, pieces, columns = place.a.shape
    scratch = torch.full((lora.scratch_elements(tokens, slots, max_rank, pieces, columns),), torch.nan, device=device)
    got, expected = base.clone(), base.clone()
    step, planned, parts = plan(adapters, slots), random.random() < 0.5, []
    for y, shrink, expand in ((got, lora.shrink_lora, lora.expand_lora), (expected, *DEFINITIONS)):
        parts.append(shrink(x, place, step, scratch, planned=planned))
        expand(y, place, step, scratch, parts=parts[-1], planned=planned)
    # Of the largest value: the interpreter rounds bf16 towards zero.
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    assert (got.float() - expected.float()).abs().max() <= tolerance * expected.float().abs().max()
    untouched = (adapters < 0) | (place.ranks[adapters.clamp(min=0).long()] == 0)
    assert torch.equal(got[untouched], base[untouched])
    assert not torch.equal(got, base)
    return parts[0]


@pytest.mark.parametrize("max_rank", [3, 33])
def test_embeddings_match(max_rank: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(max_rank)
    place = target(generator, 3, max_rank, 500, (40,), torch.float32, device)
    ids = torch.randint(0, 500, (50,), generator=generator, dtype=torch.int32).to(device)
    adapters = draw(generator, 50, 3, device)
    scratch = torch.full((lora.scratch_elements(50, 3, max_rank, 1, 500),), torch.nan, device=device)
    got, expected = torch.zeros((50, 40), device=device), torch.zeros((50, 40), device=device)
    lora.add_lora_embedding(got, ids, place, plan(adapters, 3), scratch)
    reference.add_lora_embedding(expected, ids, place, plan(adapters, 3), scratch)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert got.abs().sum() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 128, 4096])
def test_wide_matrices_match_in_a_graph(tokens: int, device: torch.device) -> None:
    assert not interpreting()
    generator = torch.Generator().manual_seed(tokens)
    place = target(generator, 8, 64, 3584, (3584, 512, 512), torch.bfloat16, device)
    x = torch.randn((tokens, 3584), generator=generator).to(torch.bfloat16).to(device)
    adapters = draw(generator, tokens, 8, device)
    adapters[0] = 0
    scratch = torch.empty(lora.scratch_elements(tokens, 8, 64, 3, 3584), device=device)
    step = lora.LoraPlan.allocate(tokens, 8, device).of(adapters, 8)
    got = torch.zeros((tokens, 4608), dtype=torch.bfloat16, device=device)

    def body() -> None:
        got.zero_()
        lora.group_tokens(adapters, 8, step)
        parts = lora.shrink_lora(x, place, step, scratch)
        lora.expand_lora(got, place, step, scratch, parts=parts)

    body()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    adapters.copy_(adapters.roll(1))  # the graph reads who has which adapter from the device
    graph.replay()
    expected = torch.zeros_like(got)
    reference.shrink_lora(x, place, step, scratch, planned=False)
    reference.expand_lora(expected, place, step, scratch, parts=1, planned=False)
    torch.testing.assert_close(got.float(), expected.float(), rtol=3e-2, atol=0.5)
