"""The prefill kernel of csrc/sm90_prefill.cuh, run on the CPU by `emulator/`: tiles, descriptors, masks, turns."""

from __future__ import annotations

import ctypes

import pytest
import torch
from tests.kernels.attention.batches import AttentionBatch, Shape, random_batch
from tests.kernels.emulator.build import cache_maps, compile_emulated, tensor_map

from stoker_kernels.attention.reference import reference_attention
from stoker_kernels.attention.sm90_decode import LOG2E
from stoker_kernels.attention.sm90_prefill import SHARED_BYTES, TILE_ROWS, PrefillArguments, tile_count


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    sources = ("sm90_prefill.cuh", "tile_softmax.cuh")
    library = compile_emulated(sources, "prefill.cpp", tmp_path_factory.mktemp("emulator"))
    assert library.arguments_size() == ctypes.sizeof(PrefillArguments)
    assert library.shared_bytes() == SHARED_BYTES
    return library


def run(kernels: ctypes.CDLL, batch: AttentionBatch, decodes: int, seed: int = 0) -> torch.Tensor:
    _, kv_heads, page, dim = batch.k.shape
    tokens, q_heads, _ = batch.q.shape
    group = q_heads // kv_heads
    out = torch.full_like(batch.q, float("nan"))
    rows = len(batch.rows) - decodes
    tickets = torch.zeros(2, dtype=torch.int32)
    m = batch.meta
    tensors = (out, m.page_table, m.seq_slots[decodes:], m.query_start[decodes:], m.seq_lens[decodes:], tickets)
    arguments = PrefillArguments(
        *(t.data_ptr() for t in tensors),
        batch.scale * LOG2E,
        rows, tokens, decodes, tile_count(tokens - decodes, rows, group), kv_heads, group, out.stride(0),
        m.page_table.stride(0), page.bit_length() - 1, kv_heads * page, page, min(64, page),
    )  # fmt: skip
    q_map = tensor_map(batch.q.data_ptr(), (dim, q_heads, tokens), (dim, q_heads * dim), 2, (group, TILE_ROWS // group))
    kernels.prefill(3, seed, *(ctypes.byref(item) for item in (q_map, *cache_maps(batch), arguments)))
    assert not tickets.any()
    return out


def check(kernels: ctypes.CDLL, shape: Shape, rows: list[tuple[int, int]], decodes: int = 0, padding: int = 0) -> None:
    batch = random_batch(shape, rows, decodes=decodes, padding=padding)
    got = run(kernels, batch, decodes).float()[decodes:]
    want = reference_attention(batch.q.float(), batch.k, batch.v, batch.meta, **batch.options)[decodes:]
    torch.testing.assert_close(got, want, atol=1.2e-2, rtol=1.2e-2)


def shape(page: int, kv_heads: int, group: int) -> Shape:
    return Shape(page, kv_heads, kv_heads * group, 128, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("keys", [5, 64, 65, 128, 129, 200, 300, 400])
def test_each_number_of_blocks_matches(kernels: ctypes.CDLL, keys: int) -> None:
    check(kernels, shape(64, 1, 7), [(5, keys)])


def test_a_ragged_step_matches(kernels: ctypes.CDLL) -> None:
    check(kernels, shape(64, 2, 7), [(1, 30), (1, 0), (20, 20), (0, 0), (1, 1), (37, 190)], decodes=2, padding=25)


@pytest.mark.parametrize(("page", "kv_heads", "group"), [(16, 1, 8), (32, 2, 1), (128, 1, 3)])
def test_each_page_and_group_matches(kernels: ctypes.CDLL, page: int, kv_heads: int, group: int) -> None:
    check(kernels, shape(page, kv_heads, group), [(3, 3), (60, 150), (2, 290)], padding=1)


def test_a_step_of_padding_alone_is_zero(kernels: ctypes.CDLL) -> None:
    batch = random_batch(shape(64, 1, 4), [(0, 0), (0, 0)], decodes=0, padding=40)
    assert not run(kernels, batch, 0).any()
