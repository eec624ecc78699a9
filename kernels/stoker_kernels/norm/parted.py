"""RMS norms whose spans lie in parts with several ranks: the mean square of a part, and the norm by the mean of all.

Invariants: fp32 accumulation, one rounding, at the end, to the result's dtype.
Knows nothing of ranks, and of how means are brought together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import (
    cpu_supports,
    reference_supports,
    register,
    register_invariant,
    select,
    triton_supports,
)

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
for _op in ("mean_squares", "rms_norm_by"):
    register(_op, "triton", f"stoker_kernels.norm.triton_parted:{_op}", triton_supports(*_FLOATS), invariant=True)
    register_invariant(_op, "rows", f"stoker_kernels.norm.rows:{_op}", cpu_supports(*_FLOATS))
    register(_op, "reference", f"stoker_kernels.norm.reference:{_op}", reference_supports)


def mean_squares(x: Tensor, widths: Sequence[int], *, gate: Tensor | None = None) -> Tensor:
    """The mean square of neighbouring spans of `x [T,N]`'s columns, `widths` wide each: `[T, spans]` fp32.

    `gate [T,N]`: of x · silu(gate). The spans, two at most, begin at column 0. Rows may be strided. Raises ValueError
    for shapes that do not fit.
    """
    _check(x, widths, gate)
    found: Tensor = select("mean_squares", x.device, x.dtype)(x, widths, gate=gate)
    return found


def rms_norm_by(
    x: Tensor, weights: Sequence[Tensor], means: Tensor, eps: float, *, gate: Tensor | None = None
) -> Tensor:
    """Spans of `x [T,N]` by the root of a mean square that is given, `means [T, spans]` fp32, times `weights [W]` each.

    With a `gate [T,N]` it is x · silu(gate) that is normed → `[T,N]`; without one the spans are normed in place,
    columns behind them stay as they are, and → `x`. Raises ValueError for shapes that do not fit.
    """
    _check(x, [len(weight) for weight in weights], gate)
    if means.shape != (x.shape[0], len(weights)) or means.dtype != torch.float32:
        raise ValueError(f"rms_norm_by: means {list(means.shape)} of {len(weights)} spans in {means.dtype}")
    y: Tensor = select("rms_norm_by", x.device, x.dtype)(x, weights, means, eps, gate=gate)
    return y


def _check(x: Tensor, widths: Sequence[int], gate: Tensor | None) -> None:
    total = sum(widths)
    gated = gate is None or (gate.shape == x.shape and total == x.shape[1])
    if not 1 <= len(widths) <= 2 or total > x.shape[1] or not gated:
        raise ValueError(f"norms in parts: x {list(x.shape)} has no spans of {list(widths)}, or its gate differs")
