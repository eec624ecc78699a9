"""QK norm, rotary embedding and KV write in Triton: one launch between the QKV projection and attention.

Invariants: each value of the projection is read once and written once; a program takes a few tokens and one head.
Pairs that rotate together sit in the same thread.
Knows nothing of page tables.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from stoker_kernels.launch.aot_registry import BF16, FP16, FP32, I32, I32_DIVISIBLE, I64, register_aot
from stoker_kernels.launch.pdl import launch_options, pdl_trigger, pdl_wait
from stoker_kernels.launch.triton_fp8 import fp8_storage, store_rounded
from stoker_kernels.launch.triton_kernel import kernel


@kernel
def _qk_norm_rope_kv_write_kernel(
    qkv,
    positions,
    slot_mapping,
    cos_sin,
    q_out,
    k_cache,
    v_cache,
    q_norm,
    k_norm,
    k_scale,
    v_scale,
    tokens,
    qkv_stride,
    page_stride,
    head_stride,
    q_heads,
    kv_heads,
    eps,
    head_dim,
    rotated,
    page_shift,
    EXACT: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    CENTRED: tl.constexpr,
    EACH_HEAD: tl.constexpr,
    TOKENS: tl.constexpr,
    LAUNCH_PDL: tl.constexpr,
):
    """EXACT: all of a head's `2 * HALF` dimensions rotate. Else `rotated` of `head_dim` do; REST is 0 where all do.

    CENTRED: norms take the mean off. EACH_HEAD: they have a weight for each head.
    """
    if EXACT:
        D: tl.constexpr = 2 * HALF
        ROT: tl.constexpr = 2 * HALF
    else:
        D = head_dim
        ROT = rotated
    # Positions and places are settled since the step's embedding: only `qkv` has to be waited for.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    here = token < tokens
    row = token.to(tl.int64)
    pair = tl.arange(0, HALF)
    paired = pair < ROT // 2
    inside = here[:, None] & paired[None, :]
    position = tl.load(positions + token, mask=here, other=0)
    slot = tl.load(slot_mapping + token, mask=here, other=-1)
    angle = cos_sin + position.to(tl.int64)[:, None] * ROT + pair[None, :]
    cos = tl.load(angle, mask=inside, other=0.0)
    sin = tl.load(angle + ROT // 2, mask=inside, other=0.0)
    pdl_wait(LAUNCH_PDL)
    pdl_trigger(LAUNCH_PDL)
    first = 2 * pair if INTERLEAVED else pair
    second = first + (1 if INTERLEAVED else ROT // 2)
    rest = ROT + tl.arange(0, REST if REST > 0 else 1)
    rest_inside = here[:, None] & (rest < D)[None, :]
    place = (slot >> page_shift) * page_stride + (slot & ((1 << page_shift) - 1)) * D
    written = (slot >= 0)[:, None] & paired[None, :]
    rest_written = (slot >= 0)[:, None] & (rest < D)[None, :]

    head = tl.program_id(1)
    source = qkv + row[:, None] * qkv_stride + head * D
    a = tl.load(source + first[None, :], mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + second[None, :], mask=inside, other=0.0).to(tl.float32)
    c = a
    if REST > 0:
        c = tl.load(source + rest[None, :], mask=rest_inside, other=0.0).to(tl.float32)
    is_q = head < q_heads
    is_v = head >= q_heads + kv_heads
    # A constant and a runtime condition do not mix in one `and`.
    if q_norm is not None:  # noqa: SIM102
        if is_q:
            q_gain = q_norm + head * D if EACH_HEAD else q_norm
            a, b, c = _norm(a, b, c, q_gain, first, second, rest, paired, eps, D, REST, CENTRED)
    if k_norm is not None:  # noqa: SIM102
        if (not is_q) & (not is_v):
            k_gain = k_norm + (head - q_heads) * D if EACH_HEAD else k_norm
            a, b, c = _norm(a, b, c, k_gain, first, second, rest, paired, eps, D, REST, CENTRED)
    if not is_v:
        a, b = a * cos - b * sin, b * cos + a * sin
    if is_q:
        target = q_out + (row[:, None] * q_heads + head) * D
        _store(target, a, b, c, first, second, rest, inside, rest_inside, REST)
    elif is_v:
        kv_head = head - q_heads - kv_heads
        if v_scale is not None:
            inverse = tl.div_rn(1.0, tl.load(v_scale + kv_head))
            a, b, c = a * inverse, b * inverse, c * inverse
        v_target = v_cache + place[:, None] + kv_head * head_stride
        _store(v_target, a, b, c, first, second, rest, written, rest_written, REST)
    else:
        kv_head = head - q_heads
        if k_scale is not None:
            inverse = tl.div_rn(1.0, tl.load(k_scale + kv_head))
            a, b, c = a * inverse, b * inverse, c * inverse
        k_target = k_cache + place[:, None] + kv_head * head_stride
        _store(k_target, a, b, c, first, second, rest, written, rest_written, REST)


@triton.jit
def _store(target, a, b, c, first, second, rest, mask, rest_mask, REST: tl.constexpr):
    """Write a head's three pieces in the target's type."""
    store_rounded(target + first[None, :], a, mask)
    store_rounded(target + second[None, :], b, mask)
    if REST > 0:
        store_rounded(target + rest[None, :], c, rest_mask)


@triton.jit
def _norm(a, b, c, weight, first, second, rest, paired, eps, D, REST: tl.constexpr, CENTRED: tl.constexpr):
    """Norm over the head dimension, whose values lie in three pieces."""
    if CENTRED:
        total = tl.sum(a, axis=1) + tl.sum(b, axis=1)
        if REST > 0:
            total += tl.sum(c, axis=1)
        mean = (total / D)[:, None]
        a = tl.where(paired[None, :], a - mean, 0.0)
        b = tl.where(paired[None, :], b - mean, 0.0)
        if REST > 0:
            c = tl.where((rest < D)[None, :], c - mean, 0.0)
    squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
    if REST > 0:
        squares += tl.sum(c * c, axis=1)
    inverse = tl.rsqrt(squares / D + eps)[:, None]
    a *= inverse * tl.load(weight + first, mask=paired, other=0.0).to(tl.float32)[None, :]
    b *= inverse * tl.load(weight + second, mask=paired, other=0.0).to(tl.float32)[None, :]
    if REST > 0:
        c *= inverse * tl.load(weight + rest, mask=rest < D, other=0.0).to(tl.float32)[None, :]
    return a, b, c


# A head a program: its chain of load, norm and store is short, and there are programs enough to hide it. 7B on an H200,
# µs at 64, 256 and 8192 tokens: 1.2, 1.7, 39; a token a program took 3.5 at 64, several heads in turn 2.3 and 41.
_BLOCK, _LARGE_BLOCK, _WARPS = 8, 16, 4  # tokens a program, up to _FEW_TOKENS tokens and beyond; its warps
_FEW_TOKENS = 128
_EXACT_DIMS = (64, 128, 256)  # head dimensions with kernels of their own; others run in the tile above


def in_one_block(qkv: Tensor, *args: Tensor, **kwargs: Any) -> Tensor:
    """`rope.qk_norm_rope_kv_write` on CUDA, in the same blocks for any number of tokens."""
    return qk_norm_rope_kv_write(qkv, *args, **kwargs, large_blocks=False)


def qk_norm_rope_kv_write(
    qkv: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    centred: bool = False,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
    large_blocks: bool = True,
) -> Tensor:
    """`rope.qk_norm_rope_kv_write` on CUDA. `large_blocks`: where there are many tokens."""
    tokens = qkv.shape[0]
    if out is None:
        out = torch.empty((tokens, num_q_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    page_stride, head_stride = _check(qkv, cos_sin, k_cache, v_cache, out)
    if tokens == 0:
        return out
    rot = cos_sin.shape[1]
    tile = _tile(qkv.dtype, head_dim, rot)
    block = _LARGE_BLOCK if large_blocks and tile["EXACT"] and tokens > _FEW_TOKENS else _BLOCK
    grid = (triton.cdiv(tokens, block), num_q_heads + 2 * num_kv_heads)
    _qk_norm_rope_kv_write_kernel[grid](
        qkv,
        positions,
        slot_mapping,
        cos_sin,
        out,
        fp8_storage(k_cache),
        fp8_storage(v_cache),
        q_norm,
        k_norm,
        k_scale,
        v_scale,
        tokens,
        qkv.stride(0),
        page_stride,
        head_stride,
        num_q_heads,
        num_kv_heads,
        eps,
        head_dim,
        rot,
        k_cache.shape[2].bit_length() - 1,
        INTERLEAVED=interleaved,
        CENTRED=centred,
        EACH_HEAD=any(norm is not None and norm.dim() > 1 for norm in (q_norm, k_norm)),
        TOKENS=block,
        **tile,
        num_warps=_WARPS,
        **launch_options(qkv.device),
    )
    return out


def _tile(dtype: torch.dtype, head_dim: int, rot: int) -> dict[str, int | bool]:
    """How a head splits into pairs that rotate and a rest that does not, each padded to a power of two."""
    return {
        "EXACT": head_dim == rot and rot in _EXACT_DIMS and dtype is not torch.float32,
        "HALF": max(_EXACT_DIMS[0] // 2, triton.next_power_of_2(rot // 2)),
        "REST": triton.next_power_of_2(head_dim - rot) if head_dim > rot else 0,
    }


def _check(qkv: Tensor, cos_sin: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor) -> tuple[int, int]:
    """The strides of a page and of a head in the caches, after the layout is known to be what the kernel assumes."""
    head_dim = k_cache.shape[3]
    if k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (head_dim, 1):
        raise ValueError("k_cache and v_cache take equal strides and contiguous [page_size, head_dim] blocks")
    page = k_cache.shape[2]
    if page & (page - 1):
        raise ValueError(f"a page holds a power of two of tokens, not {page}")
    if qkv.stride(1) != 1 or not cos_sin.is_contiguous() or not out.is_contiguous():
        raise ValueError("qkv takes rows of contiguous values; cos_sin and out are contiguous")
    return k_cache.stride(0), k_cache.stride(1)


# Pairs and rest of heads of which a part rotates, or nothing, as published models have them.
_PARTS = ((32, 32), (32, 64), (64, 32), (32, 128), (32, 256))  # (HALF, REST)


def _register() -> None:
    for dtype in (BF16, FP16, FP32):
        for cache in (dtype, "fp8e4nv", "u8"):
            for normed in (False, True):
                for block in (_BLOCK, _LARGE_BLOCK):
                    _register_one(dtype, cache, normed, block)
            if dtype != FP32:
                parts = [{"EXACT": False, "HALF": half, "REST": rest} for half, rest in _PARTS]
                _register_tiles(dtype, cache, I32_DIVISIBLE, parts, _BLOCK, norm="", compact=cache == BF16)
            if dtype == BF16:
                _register_rare(cache)
            if dtype == FP16:  # GPT-J
                _register_tiles(dtype, cache, I32_DIVISIBLE, parts[-1:], _BLOCK, norm="", more={"INTERLEAVED": True})


def _register_one(dtype: str, cache: str, normed: bool, block: int) -> None:
    for exact, dim in ((True, I32_DIVISIBLE), (False, I32)):
        if (exact and dtype == FP32) or (not exact and block != _BLOCK):
            continue  # what serves no speed has one kernel
        tiles = [{"EXACT": exact, "HALF": head // 2, "REST": 0} for head in _EXACT_DIMS]
        compact = dtype == BF16 and normed and exact and block == _BLOCK
        _register_tiles(dtype, cache, dim, tiles, block, norm=dtype if normed else "", compact=compact)


def _register_rare(cache: str) -> None:
    """Heads of which a part rotates or of neighbouring pairs, norms with a weight in fp32 or with one for each head."""
    parts = [{"EXACT": False, "HALF": half, "REST": rest} for half, rest in _PARTS]
    whole = [{"EXACT": True, "HALF": head // 2, "REST": 0} for head in _EXACT_DIMS]
    _register_tiles(BF16, cache, I32_DIVISIBLE, parts[1::2], _BLOCK, norm=BF16)
    _register_tiles(BF16, cache, I32_DIVISIBLE, parts[-1:], _BLOCK, norm=FP32)
    _register_tiles(BF16, cache, I32_DIVISIBLE, parts, _BLOCK, norm="", more={"INTERLEAVED": True})
    for block in (_BLOCK, _LARGE_BLOCK):
        _register_tiles(BF16, cache, I32_DIVISIBLE, whole, block, norm="", more={"INTERLEAVED": True})
        each_head: dict[str, object] = {"INTERLEAVED": True, "CENTRED": True, "EACH_HEAD": True}
        _register_tiles(BF16, cache, I32_DIVISIBLE, whole, block, norm=BF16, more=each_head)
        _register_tiles(BF16, cache, I32_DIVISIBLE, whole, block, norm=FP32)


def _register_tiles(
    dtype: str,
    cache: str,
    dim: str,
    tiles: list[dict[str, int | bool]],
    block: int,
    *,
    norm: str,
    more: dict[str, object] | None = None,
    compact: bool = False,
) -> None:
    signature = {
        "qkv": f"*{dtype}",
        "positions": f"*{I32}",
        "slot_mapping": f"*{I64}",
        "cos_sin": f"*{FP32}",
        "q_out": f"*{dtype}",
        "k_cache": f"*{cache}",
        "v_cache": f"*{cache}",
        "tokens": I32,
        "qkv_stride": I32_DIVISIBLE,
        "page_stride": I32_DIVISIBLE,
        "head_stride": dim,  # in pages of one token a head's width
        "q_heads": I32,
        "kv_heads": I32,
        "eps": FP32,
        "head_dim": dim,
        "rotated": dim,
        "page_shift": I32,
    }
    constants: dict[str, object] = {"INTERLEAVED": False, "CENTRED": False, "EACH_HEAD": False, "TOKENS": block}
    constants |= more or {}
    scaled = cache != dtype
    for names, given, kind in ((("q_norm", "k_norm"), bool(norm), norm), (("k_scale", "v_scale"), scaled, FP32)):
        if given:
            signature |= dict.fromkeys(names, f"*{kind}")
        else:
            constants |= dict.fromkeys(names)
    register_aot(
        _qk_norm_rope_kv_write_kernel,
        signature,
        [constants | tile for tile in tiles],
        options={"num_warps": _WARPS},
        min_sm=89 if cache == "fp8e4nv" else 75,
        max_sm=88 if cache == "u8" else 999,
        compact=compact,
    )


_register()
