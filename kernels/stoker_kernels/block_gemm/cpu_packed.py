"""GGUF's blocks of 32 columns on a CPU: packed once, in their own memory and as many bytes, and multiplied as they lie.

Products of x in bf16 are computed in bf16 where the processor has AMX (csrc/cpu_packed_tiles.c) or AVX-512 BF16
(csrc/cpu_packed.c), all others in fp32 by any processor's vectors (csrc/cpu_packed_floats.c).
Invariants: what the C functions get is contiguous and lies within its tensors; sizes are checked here, for C does not.
Does not know: which layer a weight serves.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import replace

import torch
from torch import Tensor

from stoker_kernels.launch import cc
from stoker_kernels.launch.compiled import TYPES, Kernel, handed, operands, shared
from stoker_kernels.quant import BlockRows, BlockWeight

# The order is that of KINDS in csrc/cpu_packed.c.
PACKED = ("Q8_0", "Q4_0", "Q4_1", "IQ4_NL")
GROUP, COLUMNS = 16, 32
_HALVES, _TILES, _FLOATS = "cpu_packed", "cpu_packed_tiles", "cpu_packed_floats"
_halves_product = Kernel(_HALVES, "stoker_packed_product")
_tiles_product = Kernel(_TILES, "stoker_packed_tiles_product")
_floats_product = Kernel(_FLOATS, "stoker_packed_floats_product")
_packed_rows = Kernel(_FLOATS, "stoker_packed_rows")


class _Work(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pieces", "x", "sums", "bias", "y")),
        *((name, ctypes.c_long) for name in ("count", "columns", "tokens", "stride", "groups", "step")),
        *((name, ctypes.c_int) for name in ("wide", "threads")),
    )


class _Lookup(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "ids", "out", "bad")),
        *((name, ctypes.c_long) for name in ("rows", "count", "columns")),
        *((name, ctypes.c_int) for name in ("kind", "wide_ids", "type")),
    )


def refusal() -> str | None:
    """Why nothing is packed here; None where it is."""
    return cc.refusal(_FLOATS)


@functools.cache
def bf16_refusal() -> str | None:
    """Why products of x in bf16 are computed in fp32; None where they are not."""
    return cc.bf16_refusal(_HALVES)


@functools.cache
def tiles_refusal() -> str | None:
    """Why products of x in bf16 are computed by vectors; None where AMX computes them, of one token too."""
    if not {"amx_tile", "amx_bf16"} <= cc.processor_flags() or bf16_refusal() is not None:
        return "needs a processor with AMX BF16"
    refused = cc.refusal(_TILES)
    if refused is None and not cc.library(_TILES).stoker_tiles_allowed():
        return "the system gives this process no tiles"
    return refused


def packs(name: str, rows: int) -> bool:
    """Whether rows of this format are packed."""
    return name in PACKED and rows % GROUP == 0


def pack(weight: BlockWeight) -> BlockWeight:
    """Pack a weight in its own memory; as it is where a piece is of another format, or nothing is compiled here.

    Whoever held the weight as it was must not read it again.
    """
    fits = all(packs(piece.format, piece.rows) and not piece.packed for piece in weight.blocks)
    if not fits or weight.in_planes or weight.device.type != "cpu" or refusal() is not None:
        return weight
    for piece in weight.blocks:
        if _pack()(PACKED.index(piece.format), piece.data.data_ptr(), piece.rows, weight.in_features):
            raise MemoryError(f"no memory to pack rows of {weight.in_features} columns")
    return replace(weight, pieces=tuple(replace(piece, packed=True) for piece in weight.blocks))


def product(x: Tensor, weight: BlockWeight, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """`block_gemm.block_linear` of a packed weight."""
    halves = x.dtype == torch.bfloat16 and bf16_refusal() is None
    (tokens, columns), wanted = x.shape, weight.out_features
    inner, y = operands(x, halves, wanted, out)
    shift = None if bias is None else bias.float().contiguous()
    if tokens:
        pieces = [(PACKED.index(each.format), each.data.data_ptr(), each.rows) for each in weight.blocks]
        listed = (ctypes.c_int64 * (3 * len(pieces)))(*(number for piece in pieces for number in piece))
        threads, step = shared(tokens * columns * wanted, wanted // GROUP)
        sums = torch.empty(tokens * (columns // COLUMNS), dtype=torch.float32)
        work = _Work(
            ctypes.addressof(listed), inner.data_ptr(), sums.data_ptr(), None if shift is None else shift.data_ptr(),
            y.data_ptr(), len(pieces), columns, tokens, wanted, wanted // GROUP, step, y.dtype == torch.float32,
            threads,
        )  # fmt: skip
        by_vectors = _halves_product if halves else _floats_product
        (_tiles_product if halves and tiles_refusal() is None else by_vectors)(work, listed)
    return handed(y, x, out)


def rows(piece: BlockRows, ids: Tensor | None, count: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The values of rows `ids` (int32 or int64, contiguous), or of the first: [count, columns] of `dtype`.

    Raises ValueError for an id that the piece does not have; a tape that is replayed gives zeros.
    """
    values = torch.empty((count, columns), dtype=dtype if dtype in TYPES else torch.float32)
    bad = ctypes.c_long(piece.rows)  # that is none
    work = _Lookup(
        piece.data.data_ptr(), None if ids is None else ids.data_ptr(), values.data_ptr(), ctypes.addressof(bad),
        piece.rows, count, columns, PACKED.index(piece.format), ids is not None and ids.dtype == torch.int64,
        TYPES[values.dtype],
    )  # fmt: skip
    _packed_rows(work, bad)
    if bad.value != piece.rows:
        raise ValueError(f"ids lie in [0, {piece.rows}), not {bad.value}")
    return values.to(dtype)


def _pack() -> ctypes._NamedFuncPointer:
    function = cc.library(_FLOATS).stoker_pack
    function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_long, ctypes.c_long]
    return function
