"""Makes a start have every kernel that its model can need: what did not come with the package is built here, and kept.

CUDA kernels first, where nvcc's wheels are installed; Triton's after a rehearsal of every step has told which are
missing. Neither needs a C compiler. Both go to the user's cache (`STOKER_KERNEL_CACHE`), so the next start finds them.
Of products the tiles that were measured on this GPU are taken, and with `--tune` those that are missing measured first.
Invariants: a kernel of Triton's that cannot be built ends the start, by name; for one of CUDA's another implementation
takes its place, which the log then says. Nothing is compiled once the engine is ready.
Knows nothing of steps.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from stoker_kernels.gemm import GemmWeight, use_tuned
from stoker_kernels.launch import nvcc
from stoker_kernels.launch.aot_index import ahead_command, cache_folder, compiled_ahead
from stoker_kernels.launch.chip import BF16_SM
from stoker_kernels.launch.dispatch import KernelUnavailable, sm_of
from stoker_kernels.launch.rehearsal import Missing, rehearse
from stoker_runtime.errors import KernelUnavailableError
from stoker_runtime.models.parameter import Parameter, Role, stored_kind
from stoker_runtime.models.spec import ModelSpec

log = logging.getLogger(__name__)

SECONDS_A_LINE = 10.0  # where standard error is no terminal
TUNED_SM = 90  # whose products have tiles of our own to choose from
TUNE_SECONDS = 900
# What is read in a few microseconds by any tile.
LEAST_ELEMENTS = 1 << 20


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
    sm = sm_of(device) if device.type == "cuda" else 0
    if 0 < sm < BF16_SM:
        log.warning(
            "kernels: sm_%d: Triton multiplies here without tensor cores, so attention, experts and packed weights are "
            "slow; products of dense weights are cuBLAS's. A model trained in bfloat16 may go beyond float16's range",
            sm,
        )  # fmt: skip
    missing = nvcc.missing(sm) if sm else []
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


def supply_triton(steps: Callable[[], None], *, index: int = 0, among: int = 1) -> None:
    """Rehearse `steps`, then compile what they miss, several at a time, and rehearse again, which loads that.

    `index`: of this rank `among` those of this machine, which share the work. Raises KernelUnavailableError for an op
    that has no kernel here, or one that does not compile.
    """
    missing = _rehearsed(steps)
    if not missing:
        return
    from stoker_kernels.launch.at_need import CompileFailed, compile_missing

    names = sorted({each.wanted.kernel for each in missing.values()})
    log.info("kernels: compiling %d of Triton's into %s, once: %s", len(missing), cache_folder(), ", ".join(names))
    for sm in sorted({each.sm for each in missing.values()} - set(compiled_ahead())):
        log.info("kernels: none came compiled for sm_%d; %s", sm, ahead_command(sm))
    try:
        compile_missing(missing.values(), BuildProgress("compiling Triton kernels"), index=index, among=among)
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


def gemm_weights(spec: ModelSpec, dtype: str, quantization: str) -> list[GemmWeight]:
    """The weights, each once, whose products have tiles to choose from: dense ones in bf16, and e4m3 by rows."""
    found = (weight for each in spec.parameters() for weight in _gemms(spec, each, dtype, quantization))
    return list(dict.fromkeys(found))


def _gemms(spec: ModelSpec, parameter: Parameter, dtype: str, quantization: str) -> Iterator[GemmWeight]:
    is_head = parameter.role is Role.EMBEDDING and parameter.name == "embed" and spec.shares_table
    if not is_head and parameter.role not in (Role.LINEAR, Role.HEAD):
        return
    kind = stored_kind(parameter, quantization)
    if parameter.elements < LEAST_ELEMENTS or dtype != "bfloat16" or kind not in ("dense", "fp8_channel"):
        return
    (n, k), fp8 = parameter.shape, kind == "fp8_channel"
    yield GemmWeight(n, k, fp8, False)
    if parameter.name.endswith("gate_up") and spec.gated and spec.activation == "silu" and not spec.ffn_bias:
        yield GemmWeight(n, k, fp8, True)


def supply_tiles(device: torch.device, weights: Sequence[GemmWeight], *, tune: bool) -> None:
    """Have products take the tiles that were measured on this GPU; with `tune` measure those that are missing first."""
    if device.type != "cuda" or sm_of(device) != TUNED_SM:
        if tune:
            log.info("gemm: --tune has nothing to measure here: tiles of our own are for GPUs of SM 9.0")
        return
    gpu = torch.cuda.get_device_name(device)
    if tune:
        _measure(weights, gpu)
    known = use_tuned(gpu) & set(weights)
    if known:
        log.info("gemm: %d of %d weights go by tiles that were measured on this GPU", len(known), len(weights))
    if len(known) < len(set(weights)):
        log.info("gemm: %d weights go by the rule; stoker tune MODEL measures them", len(set(weights) - known))


def _measure(weights: Sequence[GemmWeight], gpu: str) -> None:
    """In a process of its own: a tile that fails on this card costs its measurement, and not the start."""
    from stoker_kernels.bench.tune import left_to_measure

    left = left_to_measure(weights, gpu)
    if not left:
        return
    log.info("gemm: measuring the tiles of %d weights on this GPU, once; takes a few seconds each", len(left))
    program = [sys.executable, "-m", "stoker_kernels.bench.tune", *map(str, left)]
    try:
        done = subprocess.run(program, capture_output=True, text=True, timeout=TUNE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("gemm: the tiles could not be measured, the rule stays: %s", error)
        return
    for line in done.stdout.splitlines():
        log.info("gemm: %s", line)
    if done.returncode:
        last = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[-1]
        log.warning("gemm: not all tiles could be measured, the rule stays for the rest: %s", last)
