"""The attention kernels against their reference: odd lengths, every option, poisoned caches and output."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.kernels.attention.batches import AttentionBatch, Shape, random_batch

from stoker_kernels.attention import BlockPattern, choose, paged_attention, sm90_mixed
from stoker_kernels.attention.choose import launch_plan, plan_attention
from stoker_kernels.attention.config import DecodeConfig, StreamConfig, decode_config
from stoker_kernels.attention.reference import reference_attention
from stoker_kernels.attention.sm90_decode import ARCH, STEM, available, num_ctas, plan_shares
from stoker_kernels.attention.sm90_mixed import TILE_ROWS, plan_tiles, tile_bound
from stoker_kernels.launch.cuda import missing_cubin
from stoker_kernels.launch.dispatch import sm_of
from stoker_kernels.launch.pdl import enable_pdl

# Triton's interpreter turns loop bounds that it loaded, arrays of one element, into integers.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

FP8 = torch.float8_e4m3fn
HALF, FULL = torch.float16, torch.float32
DECODES = [(1, 300), (1, 0), (1, 40), (1, 1), (1, 128)]
MIXED = [*DECODES, (7, 7), (0, 0), (20, 70), (1, 9)]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def check(batch: AttentionBatch, planned: bool = False, **options: Any) -> torch.Tensor:
    """The kernels' result, after its comparison with the reference in fp32."""
    meta = batch.meta
    if planned:
        _, heads, _, dim = batch.k.shape
        meta = plan_attention(meta, num_tokens=len(batch.q), num_kv_heads=heads, head_dim=dim, kv_dtype=batch.k.dtype)
    out = torch.full_like(batch.q, float("nan"))
    paged_attention(batch.q, batch.k, batch.v, meta, out=out, **batch.options, **options)
    want = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options, **options)
    tolerance = TOLERANCE[batch.q.dtype]
    torch.testing.assert_close(out.float(), want, atol=tolerance, rtol=tolerance)
    assert not meta.workspace.arrivals.any()
    return out


@pytest.mark.matrix(take=8)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        (Shape(16, 2, 6, 64, FULL, FULL), {}),
        (Shape(64, 1, 7, 128, FULL, FULL), {}),
        (Shape(128, 1, 6, 64, HALF, HALF), {}),
        (Shape(32, 2, 2, 96, HALF, HALF), {}),
        (Shape(64, 1, 4, 80, HALF, HALF), {}),
        (Shape(16, 1, 2, 256, HALF, HALF), {}),
        (Shape(16, 2, 6, 64, FULL, FULL), {"window": 33}),
        (Shape(64, 2, 2, 64, FULL, FULL), {"window": 1}),
        (Shape(32, 2, 4, 32, FULL, FULL), {"softcap": 5.0}),
        (Shape(16, 2, 6, 32, FULL, FULL), {"sinks": True}),
        (Shape(64, 2, 6, 32, FULL, FULL), {"sinks": True, "window": 70, "softcap": 3.0}),
        (Shape(16, 2, 6, 64, FP8, HALF), {}),
        (Shape(64, 1, 7, 128, FP8, HALF), {"sinks": True, "softcap": 20.0}),
        (Shape(64, 1, 3, 80, FP8, HALF), {"window": 100}),
        (Shape(32, 2, 6, 64, FULL, FULL), {"slopes": True}),
        (Shape(64, 1, 3, 80, FP8, HALF), {"slopes": True, "softcap": 9.0}),
        (Shape(16, 2, 6, 32, FULL, FULL), {"pattern": BlockPattern(16, 2, 5, 1)}),
        (Shape(64, 1, 4, 128, HALF, HALF), {"pattern": BlockPattern(64, 1, 3, 0)}),
        (Shape(16, 2, 4, 64, FP8, HALF), {"pattern": BlockPattern(32, 1, 8, 2), "slopes": True, "sinks": True}),
        (Shape(32, 2, 6, 48, HALF, HALF), {"pattern": BlockPattern(16, 1, 2, 1, 3), "window": 90}),
    ],
    ids=str,
)
def test_a_mixed_step_matches(shape: Shape, options: dict[str, Any], device: torch.device) -> None:
    batch = random_batch(shape, MIXED, decodes=len(DECODES), padding=5, device=device)
    check(batch, **of_heads(shape, options, device))


def of_heads(shape: Shape, options: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """`options` with a value a head for those that have one."""
    ends = {"sinks": (-2.0, 4.0), "slopes": (0.003, 0.4)}
    given = {name: torch.linspace(*ends[name], shape.q_heads, device=device) for name in ends if options.get(name)}
    return options | given


def test_random_patterns_of_blocks_match(device: torch.device) -> None:
    """Of sizes that no model has, with splits of rows and without."""
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(4):
        kv_heads, group = rng.choice([1, 2, 3]), rng.choice([1, 2, 5])
        heads, stride = kv_heads * group, rng.randrange(1, 12)
        step = rng.choice([0, 1, max(1, stride // heads)])
        pattern = BlockPattern(rng.choice([16, 32, 64]), rng.randrange(1, 5), stride, step, rng.randrange(9))
        print(pattern, kv_heads, group)
        shape = Shape(rng.choice([16, 32, 64]), kv_heads, heads, rng.choice([24, 64]), HALF, HALF)
        rows = [(1, rng.randrange(1, 700)), (1, 0), (1, rng.randrange(1, 90)), (rng.randrange(1, 40), 333), (50, 50)]
        check(random_batch(shape, rows, decodes=3, padding=2, device=device, seed=seed), pattern=pattern)


def test_what_cannot_be_a_pattern_is_refused(device: torch.device) -> None:
    batch = random_batch(Shape(dim=64), DECODES, decodes=len(DECODES), device=device)
    for pattern, text in [
        (BlockPattern(48, 1, 2, 1), "48 keys are not a power of two"),
        (BlockPattern(16, 0, 2, 1), "not positive"),
        (BlockPattern(16, 1, 7, 2), "6 heads beyond a stride of 7"),
    ]:
        with pytest.raises(ValueError, match=text):
            paged_attention(batch.q, batch.k, batch.v, batch.meta, pattern=pattern, scale=1.0)


@pytest.mark.parametrize("rows", [DECODES, [(1, 0)], [(30, 30)], [(3, 200), (0, 0)], [(0, 0), (0, 0)]], ids=str)
def test_steps_of_one_kind_match(rows: list[tuple[int, int]], device: torch.device) -> None:
    decodes = len(rows) if all(count == 1 for count, _ in rows) else 0
    check(random_batch(Shape(dim=64), rows, decodes=decodes, padding=3, device=device))


def test_a_plan_made_beforehand_changes_no_bit(device: torch.device) -> None:
    batch = random_batch(Shape(dim=64), MIXED, decodes=len(DECODES), device=device)
    assert torch.equal(check(batch), check(batch, planned=True))


def test_a_narrower_plan_is_refused(device: torch.device) -> None:
    batch = random_batch(Shape(dim=64), DECODES, decodes=len(DECODES), device=device)
    meta = plan_attention(batch.meta, num_tokens=len(batch.q), num_kv_heads=2, head_dim=64, kv_dtype=FULL, window=32)
    check(replace(batch, meta=meta), window=32)
    with pytest.raises(ValueError, match="planned for window 32, narrower than 33"):
        paged_attention(batch.q, batch.k, batch.v, meta, window=33, scale=1.0)
    with pytest.raises(ValueError, match="planned for window 32"):
        paged_attention(batch.q, batch.k, batch.v, meta, scale=1.0)


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (Shape(q_heads=5, dim=64), "5 query heads do not divide"),
        (Shape(page=48, dim=64), "page size 48"),
        (Shape(dim=64, query=HALF), "q is torch.float16 but the cache torch.float32"),
    ],
    ids=["heads", "page", "dtype"],
)
def test_what_the_kernels_cannot_read_is_refused(shape: Shape, text: str, device: torch.device) -> None:
    batch = random_batch(shape, DECODES, decodes=len(DECODES), device=device)
    with pytest.raises(ValueError, match=text):
        paged_attention(batch.q, batch.k, batch.v, batch.meta, **batch.options)


def test_an_e4m3_cache_without_scales_is_refused(device: torch.device) -> None:
    batch = random_batch(Shape(dim=64, cache=FP8), DECODES, decodes=len(DECODES), device=device)
    with pytest.raises(ValueError, match="needs k_scale"):
        paged_attention(batch.q, batch.k, batch.v, batch.meta, scale=1.0)


PLANS = [
    DecodeConfig(min_split=64, max_split=128, programs_per_sm=1),
    DecodeConfig(min_split=128, max_split=1024, programs_per_sm=8),
    DecodeConfig(min_split=64, max_split=64, programs_per_sm=64, slack=4),
]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("config", "seed"), list(itertools.product(PLANS, range(4))))
def test_a_plan_covers_each_key_once(config: DecodeConfig, seed: int, window: int, device: torch.device) -> None:
    pick = random.Random(seed)
    rows = [(1, pick.choice([0, 1, 64, 65, 3000, pick.randint(0, 9000)])) for _ in range(pick.randint(1, 40))]
    batch = random_batch(Shape(kv_heads=1, q_heads=1, dim=1), rows, decodes=len(rows), device=device)
    launch_plan(batch.meta, 1, window, config)
    items = batch.meta.workspace.items[: int(batch.meta.workspace.num_items)].tolist()
    expected_slots = batch.meta.seq_slots.tolist()
    covered: dict[int, list[tuple[int, int]]] = {}
    for index, (row, slot, start, end, first_item, splits, seq_len, _) in enumerate(items):
        assert (slot, seq_len) == (expected_slots[row], rows[row][1])
        assert first_item <= index < first_item + splits
        assert index - first_item == len(covered.setdefault(row, []))
        covered[row].append((start, end))
    assert sorted(covered) == list(range(len(rows)))
    for row, ranges in covered.items():
        keys = rows[row][1]
        first = max(0, keys - window) // config.min_split * config.min_split if window else 0
        assert [start for start, _ in ranges] == [first, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == keys
        assert all(start % config.min_split == 0 for start, _ in ranges)
        assert keys == 0 or all(start < end for start, end in ranges)


SHARES = [StreamConfig(3, *rest) for rest in ((2, 4), (2, 1), (40, 4), (9, 2), (2, 4, 10**6))]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("config", "seed"), list(itertools.product(SHARES, range(4))))
def test_shares_cover_each_unit_once(config: StreamConfig, seed: int, window: int, device: torch.device) -> None:
    pick = random.Random(seed)
    heads = pick.choice([1, 3, 4])
    longest = pick.choice([500, 9000])
    lengths = [pick.choice([0, 1, 64, 65, longest // 3, pick.randint(0, longest)]) for _ in range(pick.randint(1, 40))]
    rows = [(1, n) for n in lengths]
    meta = random_batch(Shape(kv_heads=1, q_heads=1, dim=1), rows, decodes=len(rows), device=device).meta
    meta.workspace.shares.fill_(-7)
    plan_shares(meta, heads, window, config)
    ctas, shares = num_ctas(meta, heads, config), meta.workspace.shares.tolist()
    expected = [
        (row, head, block)
        for row, (_, keys) in enumerate(rows)
        for head in range(heads)
        for block in range(*stream_blocks(keys, window))
    ]
    slots = meta.seq_slots.tolist()
    walked: list[tuple[int, int, int]] = []
    for index, (row, slot, head, block, units, keys, per_cta, tail) in enumerate(shares):
        if units == 0:
            continue
        assert (slot, keys) == (slots[row], rows[row][1])
        assert index < ctas or tail
        if per_cta:
            assert units <= per_cta
            assert not tail
            at = index * per_cta - (block - stream_blocks(keys, window)[0])
            assert at % per_cta == 0 or len(walked) == index * per_cta, "pieces are whole, or the line has no gap"
        first = expected.index((row, head, block))
        walked += expected[first : first + units]
    assert walked == expected
    least = min(config.min_units, max(end - first for first, end in (stream_blocks(k, window) for _, k in rows)))
    assert max(share[4] for share in shares) >= least
    assert all(share[4] > 0 for share in shares[:ctas]) or all(share[7] == 0 for share in shares if share[4])


def test_an_eighth_of_short_streams_is_a_tail(device: torch.device) -> None:
    rows = [(1, 140)] * 1000
    meta = random_batch(Shape(kv_heads=1, q_heads=1, dim=1), rows, decodes=len(rows), device=device).meta
    config = StreamConfig(3, 2, 4)
    plan_shares(meta, 4, 0, config)
    ctas = num_ctas(meta, 4, config)
    units = meta.workspace.shares[:, 4]
    total = 1000 * 4 * 3
    assert int(units.sum()) == total
    assert 0.8 * total <= int(units[:ctas].sum()) <= 0.9 * total
    assert bool((meta.workspace.shares[:ctas, 6:] == torch.tensor([0, 1], device=device)).all())
    assert int(units[ctas:].max()) * 6 <= int(units[0])


@pytest.mark.parametrize("group", [1, 7, 8])
@pytest.mark.parametrize(
    ("rows", "decodes", "padding"),
    [
        (MIXED, len(DECODES), 25),
        ([(0, 0)] * 3, 0, 40),
        ([(1, 300)] * 4, 4, 9),
        ([(200, 700)], 0, 0),
        ([(index % 23, 100 + index) for index in range(300)], 0, 3),
    ],
    ids=["mixed", "empty", "padding", "one", "many"],
)
def test_tiles_cover_each_token_once(
    rows: list[tuple[int, int]], decodes: int, padding: int, group: int, device: torch.device
) -> None:
    batch = random_batch(Shape(16, 1, group, 1), rows, decodes=decodes, padding=padding, device=device)
    plan_tiles(batch.meta, len(batch.q), group)
    slots, starts = batch.meta.seq_slots.tolist(), batch.meta.query_start.tolist()
    expected = []  # (token, its position, keys, slot)
    for (count, keys), slot, start in list(zip(rows, slots, starts, strict=False))[decodes:]:
        expected += [(start + i, keys - count + i, keys, slot) for i in range(count)]
    found = []
    count = int(batch.meta.workspace.num_tiles)
    assert count <= tile_bound(batch.meta, len(batch.q), group)
    for token, tokens, position, keys, slot, *_ in reversed(batch.meta.workspace.tiles[:count].tolist()):
        assert 0 < tokens <= TILE_ROWS // group
        found += [(token + i, position + i, keys, slot) for i in range(tokens)]
    assert found[: len(expected)] == expected
    assert [(token, keys) for token, _, keys, _ in found[len(expected) :]] == [
        (starts[-1] + i, 0) for i in range(padding)
    ]


def stream_blocks(keys: int, window: int) -> tuple[int, int]:
    first = max(0, keys - window) // 64 if window else 0
    return first, max(-(-keys // 64), first + 1)


REAL_SHAPES = [
    Shape(page, kv_heads, q_heads, dim, cache, torch.bfloat16)
    for cache in (torch.bfloat16, FP8)
    for page, kv_heads, q_heads, dim in [
        (16, 4, 28, 128),
        (64, 4, 28, 128),
        (128, 4, 28, 128),
        (64, 2, 12, 128),
        (64, 8, 16, 128),
        (64, 8, 32, 128),
        (64, 3, 9, 64),
        (64, 1, 8, 256),
    ]
]


@pytest.mark.gpu
@pytest.mark.parametrize("shape", REAL_SHAPES, ids=str)
def test_real_shapes_match(shape: Shape, device: torch.device) -> None:
    rows = [(1, n) for n in (1, 0, 63, 64, 65, 1000, 4097, 129)] + [(1, 1), (130, 130), (200, 777), (0, 0), (17, 2049)]
    batch = random_batch(shape, rows, decodes=8, padding=9, device=device)
    plain = check(batch)
    enable_pdl(True)
    try:
        assert torch.equal(check(batch, planned=True), plain)
    finally:
        enable_pdl(False)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=["bf16", "e4m3"])
def test_sm90_decode_is_what_runs_and_takes_every_option(cache: torch.dtype, device: torch.device) -> None:
    if sm_of(device) != 90:
        pytest.skip("made for SM 9.0")
    assert available(device, cache, 128, 7), missing_cubin(STEM, ARCH)
    shape = Shape(64, 4, 28, 128, cache, torch.bfloat16)
    sinks = torch.linspace(-2.0, 4.0, 28, device=device)
    for seed, lengths in enumerate(([1], [0], [256] * 16, [300] * 128, [65, 0, 9000, 64, 1], range(1, 700, 3))):
        batch = random_batch(shape, [(1, n) for n in lengths], decodes=len(lengths), seed=seed, device=device)
        for options in ({}, {"window": 100}, {"softcap": 5.0, "sinks": sinks}):
            show_errors(batch, options)
            check(batch, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=["bf16", "e4m3"])
def test_a_mixed_step_is_one_launch_and_takes_every_option(
    cache: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if sm_of(device) != 90:
        pytest.skip("made for SM 9.0")
    assert missing_cubin(sm90_mixed.STEM, ARCH) is None
    for name in ("_decode", "_prefill"):
        monkeypatch.delattr(choose, name)
    sinks = torch.linspace(-2.0, 4.0, 28, device=device)
    shape = Shape(64, 4, 28, 128, cache, torch.bfloat16)
    steps: list[tuple[list[int], list[tuple[int, int]]]] = [
        ([5], [(1, 1)]),
        ([256] * 64, [(128, 128)]),
        ([0, 9000, 1, 64, 0], [(30, 30), (0, 0), (500, 3000), (0, 0), (1, 65)]),
        (list(range(1, 700, 3)), [(200, 700), (600, 600)]),
        ([300] * 40, [(index % 23, 100 + index) for index in range(120)]),
    ]
    for seed, (decodes, chunks) in enumerate(steps):
        rows = [*((1, n) for n in decodes), *chunks]
        batch = random_batch(shape, rows, decodes=len(decodes), padding=100 * seed, seed=seed, device=device)
        for options in ({}, {"window": 100}, {"sinks": sinks}):
            show_errors(batch, options)
            first = check(batch, **options)
            for pdl in (False, True):
                enable_pdl(pdl)
                try:
                    assert torch.equal(check(batch, planned=not options, **options), first)
                finally:
                    enable_pdl(False)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=["bf16", "e4m3"])
def test_a_layer_with_a_soft_cap_runs_in_a_step_that_is_planned_as_one(
    cache: torch.dtype, device: torch.device
) -> None:
    rows = [(1, 3000), (1, 64), (1, 500), (40, 90), (200, 300)]
    batch = random_batch(Shape(64, 4, 28, 128, cache, torch.bfloat16), rows, decodes=3, padding=7, device=device)
    check(batch, planned=True, softcap=5.0)
    check(batch, planned=True)


def show_errors(batch: AttentionBatch, options: dict[str, Any]) -> None:
    """Print where the result is wrong, by row, head and dimension."""
    got = paged_attention(batch.q, batch.k, batch.v, batch.meta, **batch.options, **options).float()
    want = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options, **options)
    wrong = ~((got - want).abs() < 2e-2 * (1 + want.abs()))
    if wrong.any():
        print(f"{len(batch.rows)} rows, {options.keys()}: {int(wrong.sum())} of {wrong.numel()} values are wrong")
        for name, dims in (("rows", (1, 2)), ("heads", (0, 2)), ("dimensions", (0, 1))):
            print(f"  {name}: {wrong.sum(dims).nonzero().flatten().tolist()[:40]}")
        row, head = wrong.sum(2).nonzero()[0].tolist()
        print(
            f"  row {row} ({batch.rows[row]}), head {head}:", got[row, head, :8].tolist(), want[row, head, :8].tolist()
        )


@pytest.mark.gpu
@pytest.mark.parametrize("pdl", [False, True])
def test_a_graph_serves_other_lengths(device: torch.device, pdl: bool) -> None:
    enable_pdl(pdl)
    try:
        replay_with_other_lengths(device)
    finally:
        enable_pdl(False)


def replay_with_other_lengths(device: torch.device) -> None:
    shape = Shape(64, 4, 28, 128, torch.bfloat16, torch.bfloat16)
    rows = [(1, 6000)] * 8
    batch = random_batch(shape, rows, decodes=8, device=device)
    out = torch.empty_like(batch.q)

    def step() -> None:
        meta = plan_attention(
            batch.meta, num_tokens=len(batch.q), num_kv_heads=4, head_dim=128, kv_dtype=torch.bfloat16
        )
        for _ in range(3):
            paged_attention(batch.q, batch.k, batch.v, meta, out=out, **batch.options)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    pick = random.Random(1)
    for _ in range(20):
        lengths = [pick.choice([0, 1, 5999, pick.randint(1, 6000)]) for _ in rows]
        batch.meta.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        want = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options)
        torch.testing.assert_close(out.float(), want, atol=1.2e-2, rtol=1.2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", [torch.bfloat16, FP8], ids=["bf16", "e4m3"])
def test_a_graph_of_a_mixed_step_serves_other_lengths(device: torch.device, cache: torch.dtype) -> None:
    shape = Shape(64, 4, 28, 128, cache, torch.bfloat16)
    rows = [(1, 6000)] * 8 + [(0, 3000)] * 4
    batch = random_batch(shape, rows, decodes=8, padding=512, device=device)
    out, meta = torch.empty_like(batch.q), replace(batch.meta, max_query_len=512)

    def step() -> None:
        plans = plan_attention(meta, num_tokens=len(batch.q), num_kv_heads=4, head_dim=128, kv_dtype=cache)
        for _ in range(3):
            paged_attention(batch.q, batch.k, batch.v, plans, out=out, **batch.options)

    enable_pdl(True)
    try:
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    finally:
        enable_pdl(False)
    pick = random.Random(1)
    for _ in range(20):
        counts = [pick.choice([0, 1, 128, pick.randint(0, 128)]) for _ in range(4)]
        lengths = [pick.choice([0, 1, 5999, pick.randint(1, 6000)]) for _ in range(8)]
        lengths += [pick.randint(n, 3000) if n else 0 for n in counts]
        starts = [*range(9), *(8 + end for end in itertools.accumulate(counts))]
        meta.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        meta.query_start.copy_(torch.tensor(starts, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        want = reference_attention(batch.q.float(), batch.k, batch.v, meta, **batch.options)
        torch.testing.assert_close(out.float(), want, atol=1.2e-2, rtol=1.2e-2)


@pytest.mark.gpu
def test_a_result_repeats_bit_for_bit(device: torch.device) -> None:
    shape = Shape(64, 4, 28, 128, torch.bfloat16, torch.bfloat16)
    batch = random_batch(shape, [(1, 8000), (1, 100), (1, 3000)], decodes=3, device=device)
    first = check(batch)
    assert decode_config(128, 2, 90, 12).max_split < 8000
    for _ in range(50):
        assert torch.equal(paged_attention(batch.q, batch.k, batch.v, batch.meta, **batch.options), first)
