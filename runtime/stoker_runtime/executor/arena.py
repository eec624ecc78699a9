"""The memory of KV pages: one tensor a model, all its layers side by side.

Invariants: page p of every arena holds the same tokens, so what copies or moves a page does so in each.
Knows nothing of who owns pages.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from stoker_runtime.config import EngineConfig
from stoker_runtime.models.spec import ModelSpec

KV_TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}


def kv_arena(config: EngineConfig, spec: ModelSpec, pages: int, device: torch.device) -> torch.Tensor:
    """`[layers, caches, pages, Hkv, B, D]` of a resolved `config`, blank."""
    shape = (spec.num_layers, spec.caches, pages, spec.kv_heads, config.page_size, spec.head_dim)
    # Zeros, not garbage: masked lanes of attention multiply V's unwritten rows by 0, and 0 x NaN is NaN.
    return zeroed(shape, KV_TORCH_DTYPES[config.kv_cache_dtype], device)


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU untouched pages stay unbacked, so an arena costs memory only as sequences fill it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)
