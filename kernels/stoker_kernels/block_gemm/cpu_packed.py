"""GGUF's blocks of 32 columns on processors with AVX-512 BF16: packed once, multiplied as they lie (csrc/cpu_packed.c).

A weight is packed in its own memory, in as many bytes. Products take bf16; other types of x read unpacked values.
Invariants: what the C functions get is contiguous and lies within its tensors; sizes are checked here, for C does not.
Does not know: which layer a weight serves.
"""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.launch import cc
from stoker_kernels.quant import BlockRows, BlockWeight

# The order is that of KINDS in csrc/cpu_packed.c.
PACKED = ("Q8_0", "Q4_0", "Q4_1", "IQ4_NL")
GROUP, COLUMNS = 16, 32
# Multiplications below which a second thread costs more than it brings.
THREAD_WORK = 1 << 20
# Parts of the work for each thread: one that is late, or shares its processor, takes fewer.
PARTS_PER_THREAD = 6
_STEM = "cpu_packed"


@functools.cache
def refusal() -> str | None:
    """Why nothing is packed here; None where it is."""
    if platform.machine() != "x86_64" or "avx512_bf16" not in cc.processor_flags():
        return "needs a processor with AVX-512 BF16"
    return cc.refusal(_STEM)


def packs(name: str, rows: int) -> bool:
    """Whether rows of this format are packed on a processor that can."""
    return name in PACKED and rows % GROUP == 0


def pack(weight: BlockWeight) -> BlockWeight:
    """Pack a weight in its own memory; as it is where a piece is of another format, or the processor cannot.

    Whoever held the weight as it was must not read it again.
    """
    fits = all(packs(piece.format, piece.rows) and not piece.packed for piece in weight.blocks)
    if not fits or weight.in_planes or weight.device.type != "cpu" or refusal() is not None:
        return weight
    for piece in weight.blocks:
        if _library().stoker_pack(PACKED.index(piece.format), piece.data.data_ptr(), piece.rows, weight.in_features):
            raise MemoryError(f"no memory to pack rows of {weight.in_features} columns")
    return replace(weight, pieces=tuple(replace(piece, packed=True) for piece in weight.blocks))


def product(x: Tensor, weight: BlockWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """`block_gemm.block_linear` of x in bf16 and a packed weight."""
    x = x.contiguous()
    (tokens, columns), wanted = x.shape, weight.out_features
    direct = out is not None and out.dtype in (torch.bfloat16, torch.float32) and out.is_contiguous()
    y = out if direct and out is not None else torch.empty((tokens, wanted), dtype=torch.bfloat16)
    shift = None if bias is None else bias.float().contiguous()
    if tokens:
        pieces = [(PACKED.index(each.format), each.data.data_ptr(), each.rows) for each in weight.blocks]
        threads = torch.get_num_threads() if tokens * columns * wanted >= THREAD_WORK else 1
        step = max(1, wanted // (GROUP * PARTS_PER_THREAD * threads)) if threads > 1 else wanted // GROUP
        sums = torch.empty(tokens * (columns // COLUMNS), dtype=torch.float32)
        _library().stoker_packed_product(
            (ctypes.c_int64 * (3 * len(pieces)))(*(number for piece in pieces for number in piece)), len(pieces),
            columns, x.data_ptr(), tokens, sums.data_ptr(), None if shift is None else shift.data_ptr(),
            y.data_ptr(), wanted, y.dtype == torch.float32, step, threads,
        )  # fmt: skip
    return y if out is None or out is y else out.copy_(y)


def rows(piece: BlockRows, ids: Tensor | None, count: int, columns: int) -> Tensor:
    """The values of rows `ids` (int64, contiguous, within the piece), or of the first: fp32 [count, columns]."""
    values = torch.empty((count, columns), dtype=torch.float32)
    _library().stoker_packed_rows(
        PACKED.index(piece.format), piece.data.data_ptr(), None if ids is None else ids.data_ptr(), count, columns,
        values.data_ptr(),
    )  # fmt: skip
    return values


@functools.cache
def _library() -> ctypes.CDLL:
    found, at, long, integer = cc.library(_STEM), ctypes.c_void_p, ctypes.c_long, ctypes.c_int
    found.stoker_pack.argtypes = [integer, at, long, long]
    found.stoker_packed_rows.argtypes = [integer, at, at, long, long, at]
    found.stoker_packed_product.argtypes = [at, long, long, at, long, at, at, at, long, integer, long, integer]
    return found
