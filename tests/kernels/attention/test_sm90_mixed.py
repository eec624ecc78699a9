"""The mixed kernel of csrc/sm90_mixed.cuh, run on the CPU by `emulator/`: tiles and shares in a ring, masks."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from tests.kernels.attention.batches import AttentionBatch, Shape, give_up, random_batch
from tests.kernels.emulator.build import compile_emulated
from tests.kernels.emulator.decode import Plan, decode_step

from stoker_kernels.attention import sm90_decode, sm90_mixed
from stoker_kernels.attention.choose import Inputs
from stoker_kernels.attention.meta import MAX_TILES
from stoker_kernels.attention.reference import reference_attention
from stoker_kernels.attention.sm90_mixed import TILE_ROWS, WIDE_UNIT_BYTES, MixedArguments
from stoker_kernels.launch import cuda

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    parts = [f"decode_{part}.cuh" for part in ("ring", "producer", "fragments", "consumers")]
    sources = ("sm90_mixed.cuh", "attention_tile.cuh", "tile_softmax.cuh", *parts)
    library = compile_emulated(sources, "mixed.cpp", tmp_path_factory.mktemp("emulator"))
    assert library.arguments_size() == ctypes.sizeof(MixedArguments)
    assert library.staging_bytes() == WIDE_UNIT_BYTES
    assert library.tile_rows() == TILE_ROWS
    assert library.max_tiles() == MAX_TILES
    return library


BY_THREES = Plan(3)


def tiles(batch: AttentionBatch, group: int) -> list[list[int]]:
    """`[token, tokens, position, keys, slot, 0, 0, 0]` of each tile of the chunks and of the padding."""
    first, size = batch.meta.num_decodes, TILE_ROWS // group
    starts, slots = batch.meta.query_start.tolist(), batch.meta.seq_slots.tolist()
    chunks = [(starts[i], starts[i + 1], batch.rows[i][1], slots[i]) for i in range(first, len(batch.rows))]
    return [
        [at, min(size, end - at), keys - end + at, keys, slot, 0, 0, 0]
        for start, end, keys, slot in [(starts[-1], len(batch.q), 0, 0), *reversed(chunks)]
        for at in reversed(range(start, end, size))
    ]


def run(
    kernels: ctypes.CDLL,
    batch: AttentionBatch,
    plan: Plan,
    *,
    ctas: int = 3,
    decode_ctas: int = 1,
    seed: int = 0,
    **options: Any,
) -> torch.Tensor:
    step = decode_step(batch, plan, **options)
    found = tiles(batch, step.arguments.group)
    planned = torch.tensor(found or [[0] * 8], dtype=torch.int32)
    num_tiles = torch.tensor([len(found)], dtype=torch.int32)
    first = min(decode_ctas, len(step.shares)) if batch.meta.num_decodes else 0
    arguments = MixedArguments(step.arguments, planned.data_ptr(), num_tiles.data_ptr(), first)
    return step.launch(kernels.mixed, ctas, seed, arguments)


def check(
    kernels: ctypes.CDLL,
    shape: Shape,
    decodes: list[int],
    chunks: list[tuple[int, int]],
    plan: Plan = BY_THREES,
    padding: int = 0,
    **options: object,
) -> torch.Tensor:
    batch = random_batch(shape, [*((1, n) for n in decodes), *chunks], decodes=len(decodes), padding=padding)
    got = run(kernels, batch, plan, **options)  # type: ignore[arg-type]
    op = {name: options[name] for name in ("window", "sinks") if name in options}
    want = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options, **op)  # type: ignore[arg-type]
    torch.testing.assert_close(got.float(), want, atol=1.2e-2, rtol=1.2e-2)
    return got


def shape(page: int, kv_heads: int, group: int, cache: torch.dtype = BF16) -> Shape:
    return Shape(page, kv_heads, kv_heads * group, 128, cache, BF16)


both_caches = pytest.mark.parametrize("cache", [BF16, FP8], ids=["bf16", "e4m3"])
DECODES = [1, 0, 130, 64, 300]
CHUNKS = [(20, 20), (0, 0), (1, 1), (37, 190)]


@pytest.mark.matrix("decode_ctas")
@both_caches
@pytest.mark.parametrize("decode_ctas", [0, 1, 2, 3])
def test_a_mixed_step_matches(kernels: ctypes.CDLL, decode_ctas: int, cache: torch.dtype) -> None:
    options = {"decode_ctas": decode_ctas, "settled": decode_ctas != 1, "seed": decode_ctas}
    check(kernels, shape(64, 2, 7, cache), DECODES, CHUNKS, padding=25, **options)


@both_caches
@pytest.mark.parametrize("keys", [5, 63, 64, 65, 128, 129, 200])
def test_each_number_of_units_matches(kernels: ctypes.CDLL, keys: int, cache: torch.dtype) -> None:
    check(kernels, shape(64, 1, 7, cache), [], [(5, keys)])


@both_caches
@pytest.mark.parametrize(("page", "kv_heads", "group"), [(16, 1, 8), (32, 2, 1), (128, 1, 3)])
def test_each_page_and_group_matches(
    kernels: ctypes.CDLL, page: int, kv_heads: int, group: int, cache: torch.dtype
) -> None:
    check(kernels, shape(page, kv_heads, group, cache), [100, 7], [(3, 3), (70, 150), (2, 290)], padding=1)


@both_caches
def test_a_window_matches(kernels: ctypes.CDLL, cache: torch.dtype) -> None:
    for plan in (Plan(3), Plan(2, window=100)):
        check(kernels, shape(64, 2, 4, cache), [300, 71], [(40, 40), (30, 260), (20, 90)], plan, window=70)


@both_caches
@pytest.mark.parametrize("page", [32, 64])
def test_pages_that_were_given_up_are_not_read(kernels: ctypes.CDLL, page: int, cache: torch.dtype) -> None:
    rows = [*((1, keys) for keys in (300, 71)), (40, 40), (30, 260), (20, 490)]
    batch, plan = random_batch(shape(page, 1, 4, cache), rows, decodes=2), Plan(2, window=70)
    want = run(kernels, batch, plan, window=70)
    assert torch.equal(run(kernels, give_up(batch, 70), plan, window=70), want)


@both_caches
def test_sinks_match(kernels: ctypes.CDLL, cache: torch.dtype) -> None:
    sinks = torch.linspace(-2.0, 4.0, 6)
    check(kernels, shape(64, 2, 3, cache), [5, 200], [(30, 100), (3, 3)], sinks=sinks, padding=2)


@pytest.mark.matrix("plan")
@both_caches
@pytest.mark.parametrize("plan", [Plan(1), Plan(2, pieces=True), Plan(9, whole=True), Plan(4, ctas=2, tail=2)], ids=str)
def test_each_cut_matches(kernels: ctypes.CDLL, plan: Plan, cache: torch.dtype) -> None:
    check(kernels, shape(64, 2, 2, cache), [1, 0, 300, 64, 500, 65], [(40, 90)], plan, decode_ctas=2)


def test_steps_of_one_kind_match(kernels: ctypes.CDLL) -> None:
    check(kernels, shape(64, 2, 7), DECODES, [], decode_ctas=2)
    assert not check(kernels, shape(64, 1, 4), [], [(0, 0), (0, 0)], padding=40).any()


def test_chunks_of_many_pages_match(kernels: ctypes.CDLL) -> None:
    check(kernels, shape(16, 1, 2), [1100], [(3, 1200), (33, 700)])


@both_caches
def test_no_order_changes_a_bit(kernels: ctypes.CDLL, cache: torch.dtype) -> None:
    rows = [(1, 300), (1, 90), (40, 60), (9, 300)]
    batch = random_batch(shape(64, 2, 7, cache), rows, decodes=2)
    plain = run(kernels, batch, Plan(2))
    for seed in range(3):
        assert torch.equal(run(kernels, batch, Plan(2), ctas=4, decode_ctas=seed, stages=4, seed=seed + 1), plain)


@pytest.mark.parametrize(
    ("cache", "rows", "chunk", "grid", "decode_ctas"),
    [
        (BF16, 64, 128, 264, 264),
        (BF16, 64, 2048, 264, 132),
        (BF16, 1, 20, 4 * 2 + 4 * 4, 4 * 2),
        (BF16, 0, 20, 4 * 4, 0),
        (FP8, 64, 128, 264, 0),
        (FP8, 0, 20, 4 * 4, 0),
    ],
)
def test_a_launch_fills_the_sms_with_two_ctas(
    cache: torch.dtype, rows: int, chunk: int, grid: int, decode_ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, MixedArguments]] = []
    shared: list[int] = []
    monkeypatch.setattr(sm90_mixed, "sm_count", lambda _: 132)
    monkeypatch.setattr(sm90_decode, "sm_count", lambda _: 132)
    monkeypatch.setattr(sm90_mixed, "decode_maps", lambda _: [])
    monkeypatch.setattr(cuda, "kernel", lambda *args: shared.append(args[3]))
    monkeypatch.setattr(cuda, "launch", lambda _, grid, arguments, *__, **___: launched.append((grid, arguments[-1])))
    batch = random_batch(shape(64, 4, 7, cache), [(1, 500)] * rows + [(chunk, chunk)], decodes=rows)
    inputs = Inputs(batch.q, batch.k, batch.v, batch.q, batch.k_scale, batch.v_scale, None, 0.1, 0, 0.0, cache is FP8)
    sm90_mixed.launch_mixed(inputs, batch.meta, 0, settled=True)
    (found,) = launched
    assert (found[0], found[1].decode_ctas) == (grid, decode_ctas)
    assert (found[1].decode.num_shares > 0) == (rows > 0)
    assert 2 * (shared[0] + 1024) <= 228 * 1024
