"""What the C kernels for CPUs have in common: the types they take, and where they run.

Invariants: the numbers of TYPES are those of csrc/cpu_floats.h. Does not know what a kernel computes.
"""

from __future__ import annotations

import torch

from stoker_kernels.launch import cc
from stoker_kernels.launch.dispatch import Supports, Target, dtype_name

TYPES = {torch.bfloat16: 0, torch.float32: 1}
# Numbers that a vector holds: rows of the kernels are whole vectors.
LANES = 16


def compiled_supports(stem: str) -> Supports:
    """CPUs for which csrc/STEM.c is compiled, or can be."""

    def supports(target: Target) -> str | None:
        if target.device != "cpu":
            return "needs a CPU"
        return cc.refusal(stem) if target.dtype in TYPES else f"takes {', '.join(map(dtype_name, TYPES))}"

    return supports
