"""The latent decode kernels on the emulator: a step's arguments, and both launches.

Invariants: what no launch writes is NaN, so that a result that misses something shows.
Knows nothing of how a step is planned.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from tests.kernels.emulator.build import TensorMap, compile_emulated, tensor_map
from tests.kernels.emulator.decode import Region
from tests.kernels.latent_attention.latent_batches import LatentBatch

from stoker_kernels.latent_attention.sm90_latent import (
    ROPE,
    SHARED_BYTES,
    TILE_HEADS,
    WIDTH,
    ByteCache,
    LatentArguments,
    cluster_of,
    combine_heads,
    context_arguments,
    decode_arguments,
    summed,
)


def compile_latent(folder: Path) -> ctypes.CDLL:
    """The kernels, whose sizes are what the launcher thinks."""
    names = ("ring", "producer", "widen", "consumers", "combine")
    parts = (*(f"latent_{name}.cuh" for name in names), "tile_softmax.cuh")
    library = compile_emulated(("sm90_latent.cuh", *parts), "latent.cpp", folder)
    assert library.arguments_size() == ctypes.sizeof(LatentArguments)
    assert library.bytes_size() == ctypes.sizeof(ByteCache)
    assert library.shared_bytes() == SHARED_BYTES
    return library


def absorbed_of(batch: LatentBatch) -> torch.Tensor:
    """Queries as latents, `[tokens, heads, rank]`."""
    nope = batch.q.shape[2] - ROPE
    moved = torch.einsum("thn,hnr->thr", batch.q[..., :nope].float(), batch.kv_b[:, :nope].float())
    return moved.to(batch.q.dtype).contiguous()


def launch(
    library: ctypes.CDLL, batch: LatentBatch, absorbed: torch.Tensor, arguments: LatentArguments, parts: int,
    seed: int, out: torch.Tensor,
) -> None:  # fmt: skip
    """`parts` parts of each tile of heads."""
    (tokens, heads, rank), rotated = absorbed.shape, batch.q[..., batch.q.shape[2] - ROPE :]
    pages, _, page, _ = batch.cache.shape
    box = (arguments.group, TILE_HEADS // arguments.group)
    strides = (rotated.stride(1), rotated.stride(0))
    maps = [
        tensor_map(absorbed.data_ptr(), (rank, heads, tokens), (rank, heads * rank), 2, box),
        tensor_map(rotated.data_ptr(), (ROPE, heads, tokens), strides, 2, box),
    ]
    held: list[TensorMap | ByteCache | None] = [None, None]
    if batch.cache_scale is None:
        held[0] = tensor_map(batch.cache.data_ptr(), (WIDTH, pages * page), (WIDTH,), 2, (arguments.box_rows,))
    else:
        held[1] = ByteCache(batch.cache.data_ptr(), batch.cache_scale.data_ptr())
    written = (Region * 2)(*(Region(t.data_ptr(), t.nbytes) for t in (absorbed, batch.q)))
    by_address = [None if item is None else ctypes.byref(item) for item in (*maps, *held, arguments)]
    ctas, cluster = parts * arguments.head_tiles, cluster_of(arguments.head_tiles, batch.cache.dtype)
    of_chunks = arguments.lse is not None
    library.latent(of_chunks, ctas, cluster, seed, *by_address, written, len(written), ctypes.c_int64(out.nbytes))


def run(library: ctypes.CDLL, batch: LatentBatch, scale: float, parts: int, seed: int = 0) -> torch.Tensor:
    """What the rows of one token see of their latents, `[rows, heads, rank]`, the plan being in the workspace."""
    meta, rows = batch.meta, batch.meta.num_decodes
    absorbed = absorbed_of(batch)[:rows]
    out = torch.full_like(absorbed, float("nan"))
    meta.workspace.partial.fill_(float("nan"))
    meta.workspace.partial_lse.fill_(float("nan"))
    arguments = decode_arguments(out, batch.cache, meta, scale)
    launch(library, batch, absorbed, arguments, parts, seed, out)
    heads = out.shape[1]
    each = combine_heads(rows, heads)
    library.combine(summed(parts, rows), rows * -(-heads // each), seed, ctypes.byref(arguments), each)
    return out


def run_context(
    library: ctypes.CDLL, batch: LatentBatch, scale: float, parts: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """What chunks see of their context, `[tokens, heads, rank]`, and its log-sums `[tokens, heads]`."""
    absorbed = absorbed_of(batch)
    out = torch.full_like(absorbed, float("nan"))
    lse = torch.full(absorbed.shape[:2], -float("inf"))
    launch(library, batch, absorbed, context_arguments(out, lse, batch.cache, batch.meta, scale), parts, seed, out)
    return out, lse
