"""What there is to compile ahead of time: kernel modules add their kernels with signatures and constants.

Invariants: a spec names every argument of its kernel, in the signature or among the constants; `LAUNCH_PDL` is added
when compiling: True from SM 9.0 on, False below.
Knows nothing of compiling (`aot.py`), and imports no Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

I32, I64, FP32, FP16, BF16 = "i32", "i64", "fp32", "fp16", "bf16"
# Integers that are multiples of 16 (strides, row lengths): without the mark their loads would be scalar.
I32_DIVISIBLE = "i32:16"
# A pointer into a packed upload, that may start at any element.
I32_ANYWHERE = f"*{I32}:1"
SMS = (75, 80, 86, 89, 90, 100, 103, 120)


@dataclass(frozen=True, slots=True)
class AotSpec:
    """One kernel, one set of argument types, and the sets of constants to compile it with.

    `signature` maps a runtime argument to its type: "*bf16" for a pointer (16-byte aligned), "i32", "i32:16", "fp32".
    `constants` are sets of constexprs and of arguments passed as None. `options` are launch options, as num_warps.
    The test of every commit compiles `compact` specs with their first constants; the command compiles everything.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: tuple[Mapping[str, Any], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    min_sm: int = 75
    max_sm: int = 999
    compact: bool = True


_specs: list[AotSpec] = []


def register_aot(
    kernel: Any,
    signature: Mapping[str, str],
    constants: Iterable[Mapping[str, Any]],
    *,
    options: Mapping[str, Any] | None = None,
    min_sm: int = 75,
    max_sm: int = 999,
    compact: bool = True,
) -> None:
    """Add one spec; see `AotSpec`."""
    _specs.append(AotSpec(kernel, dict(signature), tuple(constants), dict(options or {}), min_sm, max_sm, compact))


def specs() -> tuple[AotSpec, ...]:
    """Every spec of the modules imported so far."""
    return tuple(_specs)
