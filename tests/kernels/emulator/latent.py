"""The latent decode kernels on the emulator: a step's arguments, and both launches.

Invariants: what no launch writes is NaN, so that a result that misses something shows.
Knows nothing of how a step is planned.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from tests.kernels.emulator.build import compile_emulated, tensor_map
from tests.kernels.emulator.decode import Region
from tests.kernels.latent_attention.latent_batches import LatentBatch

from stoker_kernels.latent_attention.sm90_latent import (
    ROPE,
    SHARED_BYTES,
    TILE_HEADS,
    WIDTH,
    LatentArguments,
    cluster_of,
    combine_heads,
    decode_arguments,
)


def compile_latent(folder: Path) -> ctypes.CDLL:
    """The kernels, whose sizes are what the launcher thinks."""
    parts = ("latent_ring.cuh", "latent_consumers.cuh", "latent_combine.cuh", "tile_softmax.cuh")
    library = compile_emulated(("sm90_latent.cuh", *parts), "latent.cpp", folder)
    assert library.arguments_size() == ctypes.sizeof(LatentArguments)
    assert library.shared_bytes() == SHARED_BYTES
    return library


def run(library: ctypes.CDLL, batch: LatentBatch, scale: float, parts: int, seed: int = 0) -> torch.Tensor:
    """What the rows of one token see of their latents, `[rows, heads, rank]`, the plan being in the workspace."""
    meta, rows = batch.meta, batch.meta.num_decodes
    heads, widened, rank = batch.kv_b.shape
    nope = batch.q.shape[2] - ROPE
    del widened
    moved = torch.einsum("thn,hnr->thr", batch.q[:rows, :, :nope].float(), batch.kv_b[:, :nope].float())
    absorbed = moved.to(batch.q.dtype).contiguous()
    out = torch.full_like(absorbed, float("nan"))
    meta.workspace.partial.fill_(float("nan"))
    meta.workspace.partial_lse.fill_(float("nan"))
    arguments = decode_arguments(out, batch.cache, meta, scale)
    rotated = batch.q[:rows, :, nope:]
    pages, _, page, _ = batch.cache.shape
    maps = [
        tensor_map(absorbed.data_ptr(), (rank, heads, rows), (rank, heads * rank), 2, (TILE_HEADS, 1)),
        tensor_map(rotated.data_ptr(), (ROPE, heads, rows), (rotated.stride(1), rotated.stride(0)), 2, (TILE_HEADS, 1)),
        tensor_map(batch.cache.data_ptr(), (WIDTH, pages * page), (WIDTH,), 2, (arguments.box_rows,)),
    ]
    written = (Region * 2)(*(Region(t.data_ptr(), t.nbytes) for t in (absorbed, batch.q)))
    by_address = [ctypes.byref(item) for item in (*maps, arguments)]
    out_bytes = ctypes.c_int64(out.nbytes)
    library.latent(parts * arguments.head_tiles, cluster_of(arguments.head_tiles), seed, *by_address, written, len(written), out_bytes)
    each = combine_heads(rows, heads)
    library.combine(rows * -(-heads // each), seed, ctypes.byref(arguments), each)
    return out
