"""What runs each op, for the log of the start and for `describe`.

Invariants: only ops that a step has used stand here.
Knows nothing of steps.
"""

from __future__ import annotations

import torch

from stoker_kernels.attention import attention_kernels
from stoker_kernels.launch import dispatch
from stoker_runtime.models.spec import ModelSpec


def kernels_in_use(spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> dict[str, str]:
    """Op → implementation; of attention on a GPU the kernels that it stands for."""
    chosen = dispatch.chosen()
    if device.type == "cuda" and chosen.get("paged_attention") == "triton":
        group = spec.heads // spec.kv_heads
        chosen["paged_attention"] = attention_kernels(
            device, kv_dtype=kv_dtype, head_dim=spec.head_dim, group=group, softcap=spec.attention_softcap
        )
    return chosen
