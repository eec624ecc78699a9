"""Bidirectional attention in Triton: flash attention (Dao 2023) over a ragged batch, without a cache.

A program is one head and one tile of `BLOCK_M` queries of one sequence. It finds its sequence from `starts` on the
device, as prefill does: sequence i owns the tiles from `⌊starts[i] / BLOCK_M⌋ + i` on, and a launch of
`⌊T / BLOCK_M⌋ + S` tiles serves any lengths.

Invariants: every token is written once. Without a window no key is masked; with one, blocks of keys out of every
query's sight are not read. Knows nothing of dispatch.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_kernel import kernel
from stoker_kernels.launch.triton_tile import find_row, padded_dim

LOG2E = math.log2(math.e)
LEAST_FIRST = 64  # columns of a head that is computed in two parts
# Head dimensions of BERT's family, where MiniLM has 32 and nearly all others 64, and of vision towers: 72 and 80.
_HEAD_DIMS = (32, 64, 72, 80, 128)


@kernel(do_not_specialize=["num_rows", "window"])
def _bidirectional_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    starts_ptr,
    scale_log2,
    num_rows,
    q_stride,
    k_stride,
    v_stride,
    out_stride,
    window,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,
    PRECISION: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """REST: columns of a head behind the first BLOCK_D, which are products of their own; 0: a head is one block."""
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = find_row(starts_ptr, tile, num_rows, 0, BLOCK_M, 128)
    start = tl.load(starts_ptr + row)
    length = tl.load(starts_ptr + row + 1) - start
    first = (tile - (start // BLOCK_M + row)) * BLOCK_M
    if first >= length:
        return

    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    token = first + tl.arange(0, BLOCK_M)
    column = head * HEAD_DIM + d
    in_dim = d < HEAD_DIM
    in_out = (token < length)[:, None] & in_dim[None, :]
    at = (start + token).to(tl.int64)
    q = tl.load(q_ptr + at[:, None] * q_stride + column[None, :], mask=in_out, other=0.0)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if REST > 0:
        rest = BLOCK_D + tl.arange(0, REST)
        in_rest = rest < HEAD_DIM
        rest_column = head * HEAD_DIM + rest
        rest_in_out = (token < length)[:, None] & in_rest[None, :]
        q_rest = tl.load(q_ptr + at[:, None] * q_stride + rest_column[None, :], mask=rest_in_out, other=0.0)
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    begin = 0
    end = length
    if window is not None:
        begin = tl.maximum(first - window, 0) // BLOCK_N * BLOCK_N
        end = tl.minimum(first + BLOCK_M + window, length)
    for key in range(begin, end, BLOCK_N):
        inside = key + n < length
        source = (start + key + n).to(tl.int64)
        k_ptrs = k_ptr + source[None, :] * k_stride + column[:, None]
        v_ptrs = v_ptr + source[:, None] * v_stride + column[None, :]
        k = tl.load(k_ptrs, mask=inside[None, :] & in_dim[:, None], other=0.0)
        v = tl.load(v_ptrs, mask=inside[:, None] & in_dim[None, :], other=0.0)
        s = tl.dot(q, k, input_precision=PRECISION)
        if REST > 0:
            k_rest_ptrs = k_ptr + source[None, :] * k_stride + rest_column[:, None]
            k_rest = tl.load(k_rest_ptrs, mask=inside[None, :] & in_rest[:, None], other=0.0)
            v_rest_ptrs = v_ptr + source[:, None] * v_stride + rest_column[None, :]
            v_rest = tl.load(v_rest_ptrs, mask=inside[:, None] & in_rest[None, :], other=0.0)
            s = tl.dot(q_rest, k_rest, s, input_precision=PRECISION)
        s = s * scale_log2
        s = tl.where(inside[None, :], s, -float("inf"))
        if window is not None:
            s = tl.where(tl.abs(token[:, None] - (key + n)[None, :]) <= window, s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        if window is not None:
            # Of a row that saw no key yet: the difference of two infinities is no number.
            m_new = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.exp2(s - m_new[:, None])
        alpha = tl.exp2(m - m_new)
        norm = norm * alpha + tl.sum(p, 1)
        m = m_new
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
        if REST > 0:
            acc_rest = tl.dot(p.to(v.dtype), v_rest, acc_rest * alpha[:, None], input_precision=PRECISION)
    if window is not None:
        norm = tl.where(token < length, norm, 1.0)  # beyond the end none saw a key
    out_ptrs = out_ptr + at[:, None] * out_stride + column[None, :]
    tl.store(out_ptrs, (acc / norm[:, None]).to(out_ptr.dtype.element_ty), mask=in_out)
    if REST > 0:
        rest_ptrs = out_ptr + at[:, None] * out_stride + rest_column[None, :]
        tl.store(rest_ptrs, (acc_rest / norm[:, None]).to(out_ptr.dtype.element_ty), mask=rest_in_out)


def bidirectional_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    *,
    scale: float,
    window: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`bidirectional.bidirectional_attention` on a GPU, or on CPU tensors in Triton's interpreter."""
    tokens, heads, dim = q.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device) if out is None else out
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        if tensor.shape != q.shape or tensor.stride(2) != 1 or tensor.stride(1) != dim:
            raise ValueError(f"bidirectional_attention: {name}'s heads must be contiguous in a token, like q's")
    if tokens == 0:
        return out
    rows = starts.shape[0] - 1
    config = _config(q.dtype, dim)
    _bidirectional_kernel[(tokens // config["BLOCK_M"] + rows, heads)](
        q,
        k,
        v,
        out,
        starts,
        scale * LOG2E,
        rows,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        out.stride(0),
        window,
        HEAD_DIM=dim,
        PRECISION="ieee" if q.dtype is torch.float32 else "tf32",
        num_warps=4,
        num_stages=_stages(dim),
        **config,
        **launch_options(q.device),
    )
    return out


def _config(dtype: torch.dtype, dim: int) -> dict[str, int]:
    block_d, rest = _columns(dim)
    small = dtype is torch.float32 or block_d + rest > 128
    return {"BLOCK_M": 64, "BLOCK_N": 32 if small else 64, "BLOCK_D": block_d, "REST": rest}


def _columns(dim: int) -> tuple[int, int]:
    """The powers of two that a head is computed in: one, or two where these have fewer columns together."""
    whole, first = padded_dim(dim), 1 << (dim.bit_length() - 1)
    rest = padded_dim(dim - first) if dim > first else 0
    return (first, rest) if rest and first >= LEAST_FIRST and first + rest < whole else (whole, 0)


def _stages(dim: int) -> int:
    return 3 if _columns(dim)[1] else 2


def _register() -> None:
    strides = dict.fromkeys(("q_stride", "k_stride", "v_stride", "out_stride"), I32_DIVISIBLE)
    for dtype, torch_dtype in ((FP16, torch.float16), (BF16, torch.bfloat16)):
        pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), f"*{dtype}")
        scalars = {"starts_ptr": f"*{I32}", "scale_log2": FP32, "num_rows": I32, **strides}
        for dim in _HEAD_DIMS:
            tile = {**_config(torch_dtype, dim), "HEAD_DIM": dim, "PRECISION": "tf32"}
            for windowed in (False, True) if dim == 64 else (False,):
                register_aot(
                    _bidirectional_kernel,
                    {**pointers, **scalars, **({"window": I32} if windowed else {})},
                    [tile if windowed else {**tile, "window": None}],
                    options={"num_warps": 4, "num_stages": _stages(dim)},
                    min_sm=75 if dtype == FP16 else 80,
                    compact=dtype == FP16 and dim == 64 and not windowed,
                )


_register()
