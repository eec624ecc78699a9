"""GGUF's blocks in plain PyTorch: oracle, and what runs where nothing is compiled.

A block of K columns is read as uint8 [B, bytes] and becomes fp32 [B, K], in the steps of its format's definition.
Invariants: each step is rounded to fp32. Knows nothing of dispatch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.block_gemm.fields import Fields, fields_of
from stoker_kernels.block_gemm.planes import fields_of_planes
from stoker_kernels.quant import BLOCK_FORMATS, PLANE_KINDS, BlockRows, BlockWeight, PlaneRows

LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def block_linear(x: Tensor, weight: BlockWeight, *, bias: Tensor | None, out: Tensor | None) -> Tensor:
    """y = x · Wᵀ + bias, in fp32 with one rounding."""
    values = torch.cat([decode_piece(piece) for piece in weight.pieces])
    y = torch.nn.functional.linear(x.float(), values, None if bias is None else bias.float())
    return y.to(x.dtype) if out is None else out.copy_(y)


def block_rows(ids: Tensor, table: BlockWeight, dtype: torch.dtype) -> Tensor:
    """Rows of a table by id."""
    (piece,) = table.pieces
    if isinstance(piece, PlaneRows):
        return decode_planes(piece)[ids.long()].to(dtype)
    return decode_blocks(plain_rows(piece)[ids.long()], piece.format).to(dtype)


def plain_rows(piece: BlockRows) -> Tensor:
    """The rows as a file has them, uint8 [N, row bytes], of packed ones too."""
    if not piece.packed:
        return piece.data
    _, size = BLOCK_FORMATS[piece.format]
    count, row_bytes = piece.data.shape
    planes, scales = (2, 2) if size == 34 else (1, size - 16)
    groups = piece.data.view(count // 16, row_bytes // size, 16 * size)
    # Of a plane: four vectors of sixteen rows of two columns in the four half bytes of a word.
    words = groups[..., : planes * 256].contiguous().view(torch.int16).view(*groups.shape[:2], planes, 4, 16, 2)
    halves = torch.stack([words >> shift & 15 for shift in (0, 4, 8, 12)], dim=4).to(torch.uint8)
    codes = halves.permute(2, 0, 5, 1, 3, 4, 6).reshape(planes, count, -1, 32)
    if planes == 2:
        codes = codes[0] | codes[1] << 4
    else:
        codes = codes[0, ..., :16] | codes[0, ..., 16:] << 4
    parts = groups[..., planes * 256 :].reshape(*groups.shape[:2], scales // 2, 16, 2)
    heads = parts.permute(0, 3, 1, 2, 4).reshape(count, -1, scales)
    return torch.cat([heads, codes], dim=-1).view(count, row_bytes)


def decode_piece(piece: BlockRows | PlaneRows) -> Tensor:
    """The values of rows in either layout, fp32 [N, K]."""
    return decode_planes(piece) if isinstance(piece, PlaneRows) else decode_blocks(plain_rows(piece), piece.format)


def decode_blocks(data: Tensor, name: str) -> Tensor:
    """Rows of blocks, uint8 [N, row bytes] → their values, fp32 [N, K]. Raises KeyError for an unknown format."""
    columns, size = BLOCK_FORMATS[name]
    values = _values(fields_of(data.reshape(-1, size), name), name)
    return values.reshape(data.shape[0], data.shape[1] // size * columns)


def decode_planes(piece: PlaneRows) -> Tensor:
    """Rows in planes → their values, fp32 [N, K]."""
    return _values(fields_of_planes(piece), piece.format).view(piece.rows, piece.columns)


def _values(fields: Fields, name: str) -> Tensor:
    """fp32 [B, K]."""
    kind = PLANE_KINDS[name]
    scale = fields.factor.float() if fields.scales is None else fields.factor.float() * fields.scales.float()
    codes = _levels(fields.codes) if kind.levels else fields.codes.float() - kind.offset
    values = _spread(scale, codes) * codes
    if fields.low_factor is None:
        return values
    if fields.lows is None:
        return values + fields.low_factor.float()
    return values - _spread(fields.low_factor.float() * fields.lows.float(), codes)


def _spread(scales: Tensor, values: Tensor) -> Tensor:
    """[B, G] against [B, K]: the scale of each value's group."""
    return scales.repeat_interleave(values.shape[1] // scales.shape[1], dim=1)


def _levels(nibbles: Tensor) -> Tensor:
    return torch.tensor(LEVELS, dtype=torch.float32, device=nibbles.device)[nibbles.long()]
