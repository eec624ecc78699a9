"""Norm, RoPE with KV write, activation and embedding in plain PyTorch: oracle and CPU backend.

Invariants: the signatures are those of the public ops; arithmetic is fp32 with one rounding, at the end, to
the dtype of the result; fp8 results are clamped first, because torch's conversion gives NaN beyond the
range.
Knows nothing of dispatch or of any GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.quant_types import Quantized

FP8_MAX = 448.0
# The smallest scale a token can get: an all-zero row must not divide by zero.
MIN_SCALE = 1e-12


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """RMS norm over the last dimension of `x`."""
    return _deliver(_rms(x, weight, eps), x.dtype, out)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """`residual += x` in place, then the norm of the rounded sum."""
    residual.copy_(residual.float() + x.float())
    return _deliver(_rms(residual, weight, eps), x.dtype, out)


def rms_norm_quant(x: Tensor, weight: Tensor, eps: float) -> Quantized:
    """`rms_norm`, then one fp8 scale a token."""
    return _quantize(_rms(x, weight, eps))


def add_rms_norm_quant(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Quantized:
    """`add_rms_norm`, then one fp8 scale a token."""
    residual.copy_(residual.float() + x.float())
    return _quantize(_rms(residual, weight, eps))


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
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Optional per-head norm of q and k, rotary embedding of both, k and v into their pages; returns q."""
    heads = qkv.float().view(-1, num_q_heads + 2 * num_kv_heads, head_dim)
    q, k, v = torch.split(heads, [num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None:
        q = _rms(q, q_norm, eps)
    if k_norm is not None:
        k = _rms(k, k_norm, eps)
    table = cos_sin[positions.long()].unsqueeze(1)
    q, k = _rotate(q, table, interleaved), _rotate(k, table, interleaved)
    written = slot_mapping >= 0
    page_size = k_cache.shape[2]
    pages = slot_mapping[written] // page_size
    offsets = slot_mapping[written] % page_size
    k_cache[pages, :, offsets] = _to_cache(k[written], k_cache.dtype, k_scale)
    v_cache[pages, :, offsets] = _to_cache(v[written], v_cache.dtype, v_scale)
    return _deliver(q, qkv.dtype, out)


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up`, gate first."""
    gate, up = x.float().chunk(2, dim=-1)
    return _deliver(torch.nn.functional.silu(gate) * up, x.dtype, out)


def gelu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up` with the exact (erf) gelu, gate first."""
    gate, up = x.float().chunk(2, dim=-1)
    return _deliver(torch.nn.functional.gelu(gate) * up, x.dtype, out)


def gelu_tanh_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up` with the tanh approximation, gate first."""
    gate, up = x.float().chunk(2, dim=-1)
    return _deliver(torch.nn.functional.gelu(gate, approximate="tanh") * up, x.dtype, out)


def silu_and_mul_quant(x: Tensor) -> Quantized:
    """`silu_and_mul`, then one fp8 scale a token."""
    gate, up = x.float().chunk(2, dim=-1)
    return _quantize(torch.nn.functional.silu(gate) * up)


def quantize_fp8(x: Tensor) -> Quantized:
    """fp8 with one scale a token."""
    return _quantize(x.float())


def embed(ids: Tensor, table: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rows of `table` by id."""
    rows = table[ids.long()]
    return rows if out is None else out.copy_(rows)


def _deliver(value: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    return value.to(dtype) if out is None else out.copy_(value)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


def _quantize(value: Tensor) -> Quantized:
    scale = (value.abs().amax(-1, keepdim=True) * (1.0 / FP8_MAX)).clamp_min(MIN_SCALE)
    data = (value * scale.reciprocal()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Quantized(data, scale)


def _rotate(x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
    half = table.shape[-1] // 2
    cos, sin = table[..., :half], table[..., half:]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
    pair = (first * cos - second * sin, second * cos + first * sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([turned, x[..., 2 * half :]], dim=-1)


def _to_cache(value: Tensor, dtype: torch.dtype, scale: Tensor | None) -> Tensor:
    if scale is not None:
        value = value * scale.reciprocal().view(1, -1, 1)
    if dtype == torch.float8_e4m3fn:
        value = value.clamp(-FP8_MAX, FP8_MAX)
    return value.to(dtype)
