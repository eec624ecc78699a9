"""What kernels over ragged tokens share about their tiles: how a tile holds a head, whose tokens it has, and of keys in
pages where they lie, how e4m3 is unpacked, and the products and the soft-cap of attention.

Invariants: a launch of `⌊tokens / tokens_of_tile⌋ + rows + 1` tiles serves any lengths of the rows. An e4m3 cache is
read as 16-bit pairs and unpacked into f16 exactly, where need be by integer operations, so that it runs on every SM.
Knows nothing of which keys a query sees, nor of what else is done with a tile.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from stoker_kernels.launch.dispatch import interpreting

# How `unpack_e4m3` works: plain integer operations (the interpreter's way), the same two pairs at a time, or the
# conversion instruction of SM 8.9 on, which gives the value itself and not 2⁻⁸ of it.
UNPACK_PLAIN = tl.constexpr(0)
UNPACK_PAIRS = tl.constexpr(1)
UNPACK_CVT = tl.constexpr(2)


def padded_dim(head_dim: int) -> int:
    """The head dimension as a tile holds it: the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def unpack_of(*, fp8: bool, cvt: bool) -> int:
    """How a kernel unpacks e4m3: by the conversion instruction where `cvt`; 0 for other caches."""
    unpack = UNPACK_PLAIN if interpreting() else UNPACK_CVT if cvt else UNPACK_PAIRS
    return int(unpack.value) if fp8 else 0


@triton.jit
def find_row(query_start_ptr, tile, num_rows, first_token, tokens_of_tile, BLOCK_ROWS: tl.constexpr):
    """The row that owns `tile`; `num_rows` for the padding's."""
    below = 0
    for first in range(0, num_rows + 1, BLOCK_ROWS):
        rows = first + tl.arange(0, BLOCK_ROWS)
        starts = tl.load(query_start_ptr + rows, mask=rows <= num_rows, other=0) - first_token
        owned = (rows <= num_rows) & (starts // tokens_of_tile + rows <= tile)
        below += tl.sum(owned.to(tl.int32), 0)
    return below - 1


@triton.jit
def find_chunk(query_start_ptr, seq_lens_ptr, tile, num_rows, num_tokens, first_token, tokens_of_tile):
    """(row, its first token, its number of tokens in this launch, its keys, the tile's first token in the row).

    Padding is the row `num_rows`, which has no keys. A tile that begins past its row's tokens has nothing to do.
    """
    row = find_row(query_start_ptr, tile, num_rows, first_token, tokens_of_tile, 128)
    row_start = tl.load(query_start_ptr + row)
    real = row < num_rows
    row_end = tl.load(query_start_ptr + row + 1, mask=real, other=num_tokens)
    seq_len = tl.load(seq_lens_ptr + row, mask=real, other=0)
    first = (tile - ((row_start - first_token) // tokens_of_tile + row)) * tokens_of_tile
    return row, row_start, row_end - row_start, seq_len, first


@triton.jit
def unpack_e4m3(pairs, UNPACK: tl.constexpr):
    """uint16 pairs of e4m3 → two f16 tensors (low bytes, high bytes), times 2⁻⁸ unless UNPACK is UNPACK_CVT.

    e4m3's exponent and mantissa, shifted to f16's fields, differ from f16 by the bias 15 − 7 alone, subnormals
    included. The asm forms take two pairs: (low₀ high₀ low₁ high₁) → (low₀ low₁), (high₀ high₁).
    """
    if UNPACK == UNPACK_CVT:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a;
            .reg .b16 l, h;
            prmt.b32 a, $2, 0, 0x3120;
            mov.b32 {l, h}, a;
            cvt.rn.f16x2.e4m3x2 $0, l;
            cvt.rn.f16x2.e4m3x2 $1, h;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    elif UNPACK == UNPACK_PAIRS:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b;
            shl.b32 a, $2, 8;
            shl.b32 b, $2, 7;
            and.b32 b, b, 0x3f803f80;
            lop3.b32 $0, a, 0x80008000, b, 0xea;
            shr.b32 b, $2, 1;
            and.b32 b, b, 0x3f803f80;
            lop3.b32 $1, $2, 0x80008000, b, 0xea;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = ((pairs << 8) & 0x8000 | (pairs << 7) & 0x3F80).to(tl.float16, bitcast=True)
        high = (pairs & 0x8000 | (pairs >> 1) & 0x3F80).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def dot_keys(q, q_odd, k, FP8: tl.constexpr, PRECISION: tl.constexpr, UNPACK: tl.constexpr):
    """q·k of a tile, `[BLOCK_M, BLOCK_N]` fp32. FP8: k holds pairs, and q_odd the odd dimensions of the queries."""
    if FP8:
        k_even, k_odd = unpack_e4m3(k, UNPACK)
        s = tl.dot(q, k_even, input_precision=PRECISION)
        s = tl.dot(q_odd, k_odd, s, input_precision=PRECISION)
    else:
        s = tl.dot(q, k, input_precision=PRECISION)
    return s


@triton.jit
def add_values(
    p, v, alpha, acc, acc_odd, FP8: tl.constexpr, PRECISION: tl.constexpr, UNPACK: tl.constexpr
):  # fmt: skip
    """acc · alpha + p·v of a tile: (acc, acc_odd). FP8: v holds pairs, whose odd dimensions are of acc_odd."""
    acc = acc * alpha[:, None]
    if FP8:
        v_even, v_odd = unpack_e4m3(v, UNPACK)
        p = p.to(tl.float16)
        acc = tl.dot(p, v_even, acc, input_precision=PRECISION)
        acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None], input_precision=PRECISION)
    else:
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, acc_odd


@triton.jit
def soft_cap(logits_log2, cap):
    """cap·tanh(x/cap) of x in units of log2: `logits_log2` is x·log2(e), and so is the result."""
    LOG2E: tl.constexpr = 1.4426950408889634
    z = tl.exp2(logits_log2 * (2.0 / cap))
    # tanh(y) = 1 − 2/(e^{2y} + 1): no overflow, e^{2y} = ∞ gives 1.
    return (1.0 - 2.0 / (z + 1.0)) * (cap * LOG2E)


@triton.jit
def page_offsets(
    page_row_ptr,
    key,
    end,
    head,
    stride_page,
    stride_head,
    stride_token,
    page_shift,
    WHOLE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Element offsets `[BLOCK_N]` of keys [key, key + BLOCK_N) of one head; `key` is a multiple of BLOCK_N.

    A page holds `1 << page_shift` keys. WHOLE: at least BLOCK_N, so that the keys lie in one page.
    """
    n = tl.arange(0, BLOCK_N)
    in_page = (1 << page_shift) - 1
    if WHOLE:
        page = tl.load(page_row_ptr + (key >> page_shift)).to(tl.int64)
        return page * stride_page + head * stride_head + ((key & in_page) + n) * stride_token
    pages = tl.load(page_row_ptr + ((key + n) >> page_shift), mask=key + n < end, other=0).to(tl.int64)
    return pages * stride_page + head * stride_head + ((key + n) & in_page) * stride_token
