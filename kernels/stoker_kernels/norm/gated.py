"""RMS norm of groups of columns beside a gate, which is let through before the norm (Mamba-2) or after it (delta nets).

Invariants: fp32 accumulation, one rounding, at the end, to the result's dtype.
Knows nothing of models.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports

_FLOATS = triton_supports(torch.bfloat16, torch.float16, torch.float32)
register("gated_rms_norm", "triton", "stoker_kernels.norm.triton_gated:gated_rms_norm", _FLOATS)
register("gated_rms_norm", "reference", "stoker_kernels.norm.reference:gated_rms_norm", reference_supports)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, group: int, gate_first: bool) -> Tensor:
    """`x [T,F]`, `gate [T,F]` → `[T,F]`: each `group` of columns by the root of its own mean square.

    `gate_first`: of x · silu(gate); else silu(gate) is multiplied with what was normed. `weight [F]`, or `[group]` for
    all groups, of x's dtype or fp32. Rows may be strided. Raises ValueError for shapes that do not fit.
    """
    if x.shape != gate.shape or x.shape[1] % group or weight.shape[0] not in (group, x.shape[1]):
        raise ValueError(f"gated_rms_norm: x {list(x.shape)}, gate {list(gate.shape)}, weight {list(weight.shape)}")
    y: Tensor = select("gated_rms_norm", x.device, x.dtype)(x, gate, weight, eps, group=group, gate_first=gate_first)
    return y
