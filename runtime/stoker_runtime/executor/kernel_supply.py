"""Makes a start have every kernel that its model can need: what did not come with the package is built here, and kept.

CUDA kernels first, where nvcc's wheels are installed; Triton's after a rehearsal of every step has told which are
missing. Neither needs a C compiler. Both go to the user's cache (`STOKER_KERNEL_CACHE`), so the next start finds them.
Invariants: a kernel of Triton's that cannot be built ends the start, by name; for one of CUDA's another implementation
takes its place, which the log then says. Nothing is compiled once the engine is ready.
Knows nothing of steps.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

import torch

from stoker_kernels.launch import nvcc
from stoker_kernels.launch.aot_index import cache_folder
from stoker_kernels.launch.dispatch import KernelUnavailable, sm_of
from stoker_kernels.launch.rehearsal import Missing, rehearse
from stoker_runtime.errors import KernelUnavailableError

log = logging.getLogger(__name__)

SECONDS_A_LINE = 10.0  # where standard error is no terminal


class BuildProgress:
    """How far a build has come: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._live = sys.stderr.isatty()
        self._began = self._said = time.monotonic()

    def __call__(self, done: int, total: int, name: str) -> None:
        """`done` of `total` are built, `name` last."""
        now = time.monotonic()
        if self._live:
            filled = 30 * done // total
            bar = "#" * filled + "." * (30 - filled)
            end = "\n" if done == total else ""
            sys.stderr.write(f"\r{self._what} [{bar}] {done}/{total} {name:40.40}{end}")
            sys.stderr.flush()
        elif done == total or now - self._said > SECONDS_A_LINE:
            self._said = now
            log.info("kernels: %s: %d of %d after %.0f s", self._what, done, total, now - self._began)


def supply_cuda(device: torch.device) -> None:
    """Build the CUDA kernels that are made for this device and not there; without nvcc, say what that costs."""
    missing = nvcc.missing(sm_of(device)) if device.type == "cuda" else []
    if not missing:
        return
    try:
        nvcc.toolkit()
        log.info("kernels: building %d CUDA kernels into %s, once; takes minutes", len(missing), nvcc.cache())
        nvcc.build(nvcc.cache(), os.cpu_count() or 1, BuildProgress("building CUDA kernels"))
    except (RuntimeError, OSError) as error:
        log.warning(
            "kernels: %d CUDA kernels for this GPU are not built (%s): attention and products of few tokens run on "
            "Triton's and cuBLAS's, which is slower. To have them at the next start: %s",
            len(missing), ", ".join(missing), error,
        )  # fmt: skip


def supply_triton(steps: Callable[[], None]) -> None:
    """Rehearse `steps`, then compile what they miss, several at a time, and rehearse again, which loads that.

    Raises KernelUnavailableError for an op that has no kernel here, or one that does not compile.
    """
    missing = _rehearsed(steps)
    if not missing:
        return
    from stoker_kernels.launch.at_need import CompileFailed, compile_missing

    log.info("kernels: compiling %d of Triton's into %s, once", len(missing), cache_folder())
    try:
        compile_missing(missing.values(), BuildProgress("compiling Triton kernels"))
    except (CompileFailed, OSError) as error:
        raise KernelUnavailableError(str(error), param="kernel") from error
    left = _rehearsed(steps)
    if left:
        raise KernelUnavailableError(f"compiled, and still missing: {', '.join(left)}", param="kernel")


def _rehearsed(steps: Callable[[], None]) -> dict[str, Missing]:
    with torch.inference_mode(), rehearse() as missing:
        try:
            steps()
        except KernelUnavailable as error:
            raise KernelUnavailableError(str(error)) from error
    return dict(missing)
