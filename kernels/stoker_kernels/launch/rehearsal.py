"""A rehearsal: a step's Python runs, and what it would launch is found, compiled where need be, and loaded.

Between `rehearse()` and its end no kernel of ours and no product of cuBLAS is launched, so a rehearsal takes
milliseconds and may run any step that the engine could be asked for. What it did not find is compiled together
afterwards (`at_need.compile_missing`).
Invariants: one rehearsal at a time, on the thread that launches.
Knows nothing of Triton, of CUDA, or of steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from stoker_kernels.launch.aot_index import Wanted


@dataclass(frozen=True, slots=True, eq=False)
class Missing:
    """A launch without a cubin: the kernel, what it needs, the SM, and why there is none."""

    kernel: Any
    wanted: Wanted
    sm: int
    reason: str


_missing: dict[str, Missing] | None = None


def rehearsing() -> bool:
    """Whether launches are prepared and not made."""
    return _missing is not None


def note_missing(missing: Missing) -> None:
    """Remember what has to be compiled before the launch can be made."""
    assert _missing is not None, "outside of a rehearsal a kernel is compiled at once"
    _missing[f"{missing.sm} {missing.wanted.kernel}({missing.wanted})"] = missing


@contextmanager
def rehearse() -> Iterator[dict[str, Missing]]:
    """Rehearse what the block runs; yields what was missing, by description, as it grows."""
    global _missing
    if _missing is not None:
        raise RuntimeError("a rehearsal is under way")
    _missing = {}
    try:
        yield _missing
    finally:
        _missing = None
