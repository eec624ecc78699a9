"""Weights and activations as numbers once more, by what their layouts mean: a part of the oracle `reference.model`.

Invariants: shares only the types of weights with the engine, and none of its packing, unpacking or rounding; GGUF's
blocks are decoded by their publisher's package.
Knows nothing of products.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as decode_gguf
from torch import Tensor

from stoker_kernels.quant import (
    BLOCK_FORMATS,
    AnyWeight,
    BlockRows,
    BlockWeight,
    Fp4Weight,
    Int8Weight,
    IntegerWeight,
    Layout,
    LinearWeight,
)
from stoker_runtime.bench.reference.planes import plane_rows, plane_values

LARGEST_FP8 = 448.0  # of e4m3
FP8_BLOCK = 128
FRAGMENTS = {
    "half bytes": {"t": 4, "q": 8, "c": 4, "s": 4, "e": 2, "p": 2, "h": 2},
    "bytes": {"i": 2, "t": 4, "q": 8, "c": 4, "s": 2, "p": 2, "e": 2, "h": 2},
    "half words": {"t": 4, "q": 8, "c": 4, "s": 4, "e": 2},
}
"""What a 64 × 64 block has in its order, slowest first (fragment_gemm/csrc): row 8q + 2t + h, column 32i + 16s + 8p +
2c + e, of half bytes and half words 16s + 8p + 2c + e.
"""


def values_of(weight: Tensor | AnyWeight) -> Tensor:
    """The numbers `[N, K]` that a weight stands for, columns as its activations have them; a dense one as it is."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, BlockWeight):
        pieces = [_decoded(_file_rows(piece), piece.format) for piece in weight.blocks]
        pieces += [plane_values(piece) for piece in weight.planes]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if isinstance(weight, IntegerWeight):
        return _integers(weight)
    if isinstance(weight, Fp4Weight):
        return _fp4(weight)
    if isinstance(weight, Int8Weight):
        return weight.data.float() * weight.scale
    return weight.data if weight.kind == "dense" else fp8_values(weight)


def parts_of(weight: AnyWeight, rows: int) -> Iterator[Tensor]:
    """`values_of` of at most so many rows after the other: of an FP8 weight, or one in planes, no more at a time."""
    if isinstance(weight, BlockWeight) and weight.in_planes:
        for piece in weight.planes:
            yield from (plane_rows(piece, part) for part in torch.arange(piece.rows, device=piece.device).split(rows))
        return
    if not isinstance(weight, LinearWeight) or weight.scale is None or weight.kind != "fp8_channel":
        yield from values_of(weight).split(rows)
        return
    for data, scale in zip(weight.data.split(rows), weight.scale.split(rows), strict=True):
        yield fp8_values(LinearWeight(data, scale, "fp8_channel"))


def rows_of(table: Tensor | AnyWeight, ids: Tensor) -> Tensor:
    """The rows `ids` `[T]` of `values_of` of a table: of one in planes no others are decoded."""
    if isinstance(table, BlockWeight) and table.in_planes and len(table.planes) == 1:
        return plane_rows(table.planes[0], ids)
    return values_of(table)[ids]


def fp8_values(weight: LinearWeight) -> Tensor:
    """fp32 `[N, K]` of a weight in FP8: each number times the scale of its tensor, row or 128 × 128 block."""
    assert weight.scale is not None, "FP8 weights have scales"
    rows, columns = weight.data.shape
    tall, wide = (FP8_BLOCK, FP8_BLOCK) if weight.kind == "fp8_block" else (rows // weight.scale.shape[0], columns)
    row = torch.arange(rows, device=weight.data.device) // tall
    column = torch.arange(columns, device=weight.data.device) // wide
    return weight.data.float() * weight.scale[row][:, column]


def as_read(x: Tensor, weight: AnyWeight) -> Tensor:
    """What products with `weight` read of activations `[T, K]`."""
    if isinstance(weight, Int8Weight):
        return as_int8_reads(x)
    return as_fp8_reads(x) if weight.takes_quantized else x


def as_int8_reads(x: Tensor) -> Tensor:
    """What is left of activations `[T, K]` after they were rounded to 255 integers with a scale a token."""
    scale = torch.clamp(x.float().abs().max(dim=-1, keepdim=True).values * (1.0 / 127.0), min=1e-12)
    return (x * (1.0 / scale)).round().clamp(-127.0, 127.0) * scale


def as_fp8_reads(x: Tensor) -> Tensor:
    """What is left of activations `[T, K]`, of 16 bits, after they were rounded to e4m3 with a scale a token.

    Both quotients are products with a reciprocal, by definition: 16-bit numbers often lie half-way between two of e4m3.
    """
    x = x.to(torch.bfloat16).float()
    scale = torch.clamp(x.abs().max(dim=-1, keepdim=True).values * (1.0 / LARGEST_FP8), min=1e-12)
    return (x * (1.0 / scale)).clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).float() * scale


def _decoded(data: Tensor, name: str) -> Tensor:
    values = decode_gguf(data.cpu().numpy(), GGMLQuantizationType[name])
    return torch.from_numpy(values).float().to(data.device)


def _file_rows(piece: BlockRows) -> Tensor:
    """The rows of blocks as a file has them; packed ones are read code by code (launch/csrc/cpu_packed_order.h)."""
    if not piece.packed:
        return piece.data
    _, size = BLOCK_FORMATS[piece.format]
    planes, head = (2, 2) if size == 34 else (1, size - 16)
    (count, row_bytes), packed = piece.data.shape, piece.data.flatten()
    row, block = torch.arange(count)[:, None, None], torch.arange(row_bytes // size)[None, :, None]
    start = row // 16 * 16 * row_bytes + block * 16 * size
    column, byte = torch.arange(32), torch.arange(head)
    shift = 4 * (column // 2 % 4)
    codes = torch.zeros((count, row_bytes // size, 32), dtype=torch.uint8)
    for plane in range(planes):
        place = start + 256 * plane + 64 * (column // 8) + 4 * (row % 16) + 2 * (column % 2) + shift // 8
        codes |= (packed[place] >> shift % 8 & 15) << 4 * plane
    heads = packed[start + 256 * planes + 32 * (byte // 2) + 2 * (row % 16) + byte % 2]
    halves = codes if planes == 2 else codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([heads, halves], dim=-1).view(count, row_bytes)


def _integers(weight: IntegerWeight) -> Tensor:
    """`(code - zero) · scale`, both steps rounded as the scales' dtype says; columns back where `order` took them."""
    rows, columns = weight.out_features, weight.in_features
    device, dtype = weight.data.device, weight.scale.dtype
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None, :]
    row = _stored(row, rows, weight.layout)
    at = row * columns + column
    if weight.layout in ("fragments", "pairs"):
        at = _fragment_place(row, column, columns, "half bytes" if weight.bits == 4 else "bytes")
    per_byte = 8 // weight.bits
    if weight.layout == "lanes":
        codes = _lane_codes(weight.data, weight.bits, rows, columns)
    else:
        byte = weight.data.flatten()[at // per_byte].int()
        codes = byte >> (at % per_byte) * weight.bits & (1 << weight.bits) - 1
    group = column[0] // weight.group
    zero = 1 << weight.bits - 1 if weight.zero is None else weight.zero[group].t()[row[:, 0]].to(dtype)
    values = ((codes.to(dtype) - zero) * weight.scale[group].t()[row[:, 0]]).float()
    if weight.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, weight.order.long(), values)


def _fp4(weight: Fp4Weight) -> Tensor:
    """e2m1 by its bits (sign, two of exponent, one of mantissa) times the scales of block and row."""
    if weight.layout in ("fragments", "pairs"):
        return _fp4_fragments(weight)
    rows, columns = weight.out_features, weight.in_features
    at = torch.arange(rows * columns, device=weight.data.device)
    code = weight.data.flatten()[at // 2].int() >> at % 2 * 4 & 15
    if weight.layout == "lanes":
        code = _lane_codes(weight.data, 4, rows, columns).flatten()
    exponent, mantissa = code >> 1 & 3, code & 1
    size = torch.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * 2.0 ** (exponent - 1))
    values = torch.where(code > 7, -size, size).view(rows, columns)
    bits = weight.scale.t().contiguous()
    scale = bits.view(torch.float8_e4m3fn).float() if weight.kind == "nvfp4" else 2.0 ** (bits.float() - 127.0)
    spread = scale.repeat_interleave(columns // scale.shape[1], dim=1)
    return values * spread if weight.factor is None else values * spread * weight.factor[:, None]


def _lane_codes(data: Tensor, bits: int, rows: int, columns: int) -> Tensor:
    """Codes int32 [rows, columns] of sixteen rows side by side: 256 bytes of half codes for 32 columns of them."""
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    unit, within = row // 16 * (columns // 32) + column // 32, column % 32
    shift, found = 4 * (within // 2 % 4), torch.zeros(rows, columns, dtype=torch.int32)
    for plane in range(bits // 4):
        place = 256 * (bits // 4 * unit + plane) + 64 * (within // 8) + 4 * (row % 16) + 2 * (within % 2) + shift // 8
        found |= (data.flatten()[place].int() >> shift % 8 & 15) << 4 * plane
    return found


def _fp4_fragments(weight: Fp4Weight) -> Tensor:
    """The same of fragments: bits of half words, and scales of NVFP4 with five bits of exponent and ten."""
    rows, columns, device = weight.out_features, weight.in_features, weight.data.device
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None, :]
    row = _stored(row, rows, weight.layout)
    byte = 2 * _fragment_place(row, column, columns, "half words")
    data = weight.data.flatten()
    half = data[byte].int() | data[byte + 1].int() << 8
    number = _placed_float(half, row % 2 + 2 * (column // 8 % 2))
    bits = weight.scale.int()[column[0] // (columns // weight.scale.shape[0])].t()[row[:, 0]]
    if weight.factor is None:
        return torch.ldexp(number, bits - 127)
    return torch.ldexp(number * (1.0 + (bits & 7) / 8), (bits >> 3) - 10) * weight.factor[row]


def _placed_float(half: Tensor, field: Tensor) -> Tensor:
    """The number of one of four fields of a half word, whose bits lie where bf16 has its own, moved down by three a
    field, and of the last one where there is room.
    """
    plain, last = half << 3 * field, field == 3
    sign = torch.where(last, half >> 14, plain >> 15) & 1
    exponent = torch.where(last, half >> 10, plain >> 7) & 3
    mantissa = torch.where(last, half >> 13, plain >> 6) & 1
    number = torch.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * 2.0 ** (exponent - 1))
    return torch.where(sign == 1, -number, number)


def _stored(row: Tensor, rows: int, layout: Layout) -> Tensor:
    """Where a row of `rows` rests: in "pairs" gate and up in turn."""
    return row % (rows // 2) * 2 + row // (rows // 2) if layout == "pairs" else row


def fp4_expert_values(data: Tensor, scale: Tensor, factor: Tensor | None) -> Tensor:
    """fp32 `[rows, K]` of an expert in MXFP4, or with a `factor` a row in NVFP4, as the kernels have it rest, number by
    number: the step of a column, its place in it, and the bits of that place's half word.
    """
    start, size = _steps(data.shape[1] * 2, 256 if factor is None else 128, data.device)
    place, word = _places(start, size)
    byte = start // 2 + word * 4 + place % 2 * 2
    half = data[:, byte].int() | data[:, byte + 1].int() << 8
    number = _placed_float(half, (place // 2).expand_as(half))
    step = torch.cumsum(torch.diff(start, prepend=start[:1]) > 0, 0)
    bits = scale.int()[step, :, place].t()
    if factor is None:
        return torch.ldexp(number, bits - 94 - 127)
    return torch.ldexp(number * (1.0 + (bits & 7) / 8), (bits >> 3) - 10) * factor[:, None]


def int4_expert_values(data: Tensor, scale: Tensor, group: int) -> Tensor:
    """fp32 `[rows, K]` of an expert in integers of four bits as the kernels have it rest, number by number, both steps
    rounded as the scales' dtype says. `scale` `[groups, rows, 2]`: scales beside zero points.
    """
    columns = data.shape[1] * 2
    start, size = _steps(columns, 256, data.device)
    place, word = _places(start, size)
    byte = start // 2 + word * 4 + place % 2 * 2 + place // 4
    codes = data[:, byte].int() >> place // 2 % 2 * 4 & 15
    of = torch.arange(columns, device=data.device) // (group or columns)
    factor, zero = scale[of, :, 0].t(), scale[of, :, 1].t()
    return ((codes.to(scale.dtype) - zero) * factor).float()


def int8_expert_values(data: Tensor, scale: Tensor, group: int) -> Tensor:
    """The same of integers of eight bits, `[rows, K]`, a byte each."""
    of = torch.arange(data.shape[1], device=data.device) // (group or data.shape[1])
    return ((data.to(scale.dtype) - scale[of, :, 1].t()) * scale[of, :, 0].t()).float()


def _steps(columns: int, whole: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the step of each column of an expert in four bits begins, and how many columns it has: `whole` at most."""
    starts: list[int] = []
    sizes: list[int] = []
    while sum(sizes) < columns:
        left = columns - sum(sizes)
        starts.append(sum(sizes))
        sizes.append(whole if left >= whole else 1 << left.bit_length() - 1)
    step = torch.repeat_interleave(torch.tensor(sizes, device=device))
    return torch.tensor(starts, device=device)[step], torch.tensor(sizes, device=device)[step]


def _places(start: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """The code place of each column, and its word, both within its step."""
    within = torch.arange(len(start), device=start.device) - start
    return within // (size // 8), within % (size // 8)


def _fragment_place(row: Tensor, column: Tensor, columns: int, unit: str) -> Tensor:
    """Where what a row and a column have lies, counted in units of FRAGMENTS."""
    part = {
        "t": row // 2 % 4, "q": row // 8 % 8, "c": column // 2 % 4, "i": column // 32 % 2, "s": column // 16 % 4,
        "e": column % 2, "p": column // 8 % 2, "h": row % 2,
    }  # fmt: skip
    place = row // 64 * (columns // 64) + column // 64
    for name, size in FRAGMENTS[unit].items():
        place = place * size + part[name] % size
    return place
