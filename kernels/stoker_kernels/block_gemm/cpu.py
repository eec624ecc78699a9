"""GGUF's blocks on the CPU: packed ones by `cpu_packed`; of others csrc/cpu_blocks.c multiplies few tokens, and torch
many, with what it unpacked.

Invariants: what the C functions get is contiguous and lies within its tensors; sizes are checked here, for C does not.
Does not know: how the library was compiled (`launch.cc`).
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.block_gemm import cpu_packed
from stoker_kernels.launch import cc
from stoker_kernels.launch.compiled import refuse_tape
from stoker_kernels.quant import BLOCK_FORMATS, BlockRows, BlockWeight

# From so many tokens on a matrix that was unpacked is multiplied faster than blocks are.
UNPACKED_TOKENS = 32
# Bytes of blocks below which a second thread costs more than it brings.
THREAD_BYTES = 128 * 1024
# Elements that are unpacked at a time.
SCRATCH = 1 << 20
_KINDS = {name: at for at, name in enumerate(BLOCK_FORMATS)}


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def block_linear(x: Tensor, weight: BlockWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """`block_gemm.block_linear`."""
    if weight.packed:
        return cpu_packed.product(x, weight, bias, out)
    refuse_tape("blocks that are not packed")
    if x.shape[0] >= UNPACKED_TOKENS:
        y = torch.cat([_unpacked_product(x, piece, weight.in_features) for piece in weight.blocks], dim=1)
        y = y if bias is None else y.add_(bias)
        return y if out is None else out.copy_(y)
    floats = x.float().contiguous()
    y = torch.empty((x.shape[0], weight.out_features), dtype=torch.float32)
    row = 0
    for piece in weight.blocks:
        _product(floats, piece, y, row)
        row += piece.data.shape[0]
    y = y if bias is None else y.add_(bias)
    return y.to(x.dtype) if out is None else out.copy_(y)


def _product(x: Tensor, piece: BlockRows, y: Tensor, row: int) -> None:
    (tokens, columns), (rows, row_bytes) = x.shape, piece.data.shape
    threads = torch.get_num_threads() if piece.data.numel() >= THREAD_BYTES else 1
    long = ctypes.c_long
    cc.library("cpu_blocks").stoker_block_product(
        _KINDS[piece.format], _at(piece.data), long(row_bytes), long(rows), long(columns), _at(x), long(tokens),
        ctypes.c_void_p(y.data_ptr() + row * y.itemsize), long(y.shape[1]), threads,
    )  # fmt: skip


def _unpacked_product(x: Tensor, piece: BlockRows, columns: int) -> Tensor:
    """x [T, K] · one piece, unpacked to the dtype of x a part at a time → [T, rows]."""
    rows = piece.data.shape[0]
    step = max(1, SCRATCH // columns)
    parts = (replace(piece, data=piece.data[at : at + step]) for at in range(0, rows, step))
    return torch.cat([torch.nn.functional.linear(x, unpack(part, columns, x.dtype)) for part in parts], dim=1)


def unpack(piece: BlockRows, columns: int, dtype: torch.dtype) -> Tensor:
    """The values of a piece: [rows, columns] of `dtype`."""
    long, (rows, row_bytes) = ctypes.c_long, piece.data.shape
    if dtype == torch.bfloat16 and not piece.packed:
        values = torch.empty((rows, columns), dtype=torch.bfloat16)
        cc.library("cpu_blocks").stoker_block_rows_bf16(
            _KINDS[piece.format], _at(piece.data), long(row_bytes), long(rows), long(columns), _at(values)
        )
        return values
    if piece.packed:
        return cpu_packed.rows(piece, None, rows, columns, dtype)
    return _rows(piece, None, rows, columns).to(dtype)


def block_rows(ids: Tensor, table: BlockWeight, dtype: torch.dtype) -> Tensor:
    """`block_gemm.block_rows`."""
    (piece,) = table.blocks
    if piece.packed:
        wanted = (ids if ids.dtype in (torch.int32, torch.int64) else ids.long()).contiguous()
        return cpu_packed.rows(piece, wanted, wanted.numel(), table.in_features, dtype)
    wanted = ids.long().contiguous()
    if wanted.numel() and not 0 <= int(wanted.min()) <= int(wanted.max()) < piece.data.shape[0]:
        raise ValueError(f"ids lie in [0, {piece.data.shape[0]}), not {int(wanted.min())} to {int(wanted.max())}")
    return _rows(piece, wanted, wanted.numel(), table.in_features).to(dtype)


def _rows(piece: BlockRows, ids: Tensor | None, count: int, columns: int) -> Tensor:
    values, long = torch.empty((count, columns), dtype=torch.float32), ctypes.c_long
    cc.library("cpu_blocks").stoker_block_rows(
        _KINDS[piece.format], _at(piece.data), long(piece.data.shape[1]), None if ids is None else _at(ids),
        long(count), long(columns), _at(values),
    )  # fmt: skip
    return values
