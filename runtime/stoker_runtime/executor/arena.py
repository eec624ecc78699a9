"""The memory of what sequences keep: KV pages, one tensor a model with its layers side by side, and states by slot.

Invariants: page p of every arena holds the same tokens, so what copies or moves a page does so in each.
A slot's state is blank to who begins there, so nothing has to be cleared.
Knows nothing of who owns pages and slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from stoker_runtime.config import EngineConfig
from stoker_runtime.models.layer_specs.state_spec import Mixer
from stoker_runtime.models.spec import ModelSpec

KV_TORCH_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}


def kv_arena(
    config: EngineConfig, spec: ModelSpec, pages: int, device: torch.device, depth: int | None = None
) -> torch.Tensor:
    """`[layers of a page, caches, pages, Hkv, B, D]` of a resolved `config`, blank: all that attend, or `depth`."""
    layers = len(spec.attending) if depth is None else depth
    shape = (layers, spec.caches, pages, spec.kv_heads, config.page_size, spec.head_dim)
    # Zeros, not garbage: masked lanes of attention multiply V's unwritten rows by 0, and 0 x NaN is NaN.
    return zeroed(shape, KV_TORCH_DTYPES[config.kv_cache_dtype], device)


def state_arena(slots: int, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What `slots` sequences keep in the layers with a state: of convolutions `[layers, slots, W-1, C]` in the model's
    dtype, and states `[layers, slots, heads, …]` fp32; nothing for a model without such layers.
    """
    if spec.recurrent is None:
        return ()
    shapes = ((spec.recurrent.window, dtype), (spec.recurrent.shape, torch.float32))
    return tuple(zeroed((spec.recurrent.layers, slots, *shape), kind, device) for shape, kind in shapes)


def kept_by_layer(
    spec: ModelSpec, pages: Iterable[torch.Tensor], states: tuple[torch.Tensor, ...]
) -> list[tuple[torch.Tensor, ...]]:
    """What each layer reads and writes, as `Decoder.forward` takes it: its caches, its states, or nothing.

    `pages` are the caches of each layer that attends.
    """
    if spec.recurrent is None:
        return [tuple(layer) for layer in pages]
    caches = iter(pages)
    held = zip(*states, strict=True)
    found: list[tuple[torch.Tensor, ...]] = []
    for mixer in spec.recurrent.mixers:
        if mixer is Mixer.ATTENTION:
            found.append(tuple(next(caches)))
        else:
            found.append(next(held) if mixer is spec.recurrent.kind else ())
    return found


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU untouched pages stay unbacked, so an arena costs memory only as sequences fill it."""
    # numpy gives what is empty other strides than torch views.
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def upload(
    values: Sequence[int] | Sequence[tuple[int, ...]], device: torch.device, dtype: torch.dtype = torch.int32
) -> torch.Tensor:
    """`values` on the device, `[n]` or `[n, k]`, without waiting for it."""
    return sent(torch.tensor(values, dtype=dtype), device)


def sent(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on the device, without waiting for it."""
    # Pinned by torch's allocator, which gives the buffer to nobody else before the copy is over.
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
