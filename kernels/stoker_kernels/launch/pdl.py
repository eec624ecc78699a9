"""Programmatic dependent launch (SM 9.0 on): a kernel starts while its predecessor drains, and waits before
it reads.

Invariants: a kernel launched with it calls `pdl_wait` before its first access to memory that is not settled
(`pdl_settle`), so that a chain of such kernels is ordered like plain launches; `pdl_trigger` may come at any
point, since waiting means completion. Off until `enable_pdl(True)`; then on only where the device has it.
Results do not depend on it.
Knows nothing of which kernels follow each other.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from stoker_kernels.launch.chip import chip_of
from stoker_kernels.launch.dispatch import sm_of

# Trigger before the wait instead of after it: the kernel after next then starts, and a GEMM there fills its ring, while
# the kernel before still runs. Safe because waiting means completion, of the predecessor and so of all before it.
TRIGGER_FIRST = tl.constexpr(True)
_enabled = False


def enable_pdl(enabled: bool) -> None:
    """Launch every kernel from now on with or without programmatic dependent launch."""
    global _enabled
    _enabled = enabled


@contextmanager
def plain_launches() -> Iterator[None]:
    """Launch without it meanwhile: what reads before it waits, as products do with their weight, and finds there what
    the launch before it writes.
    """
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def pdl_on(device: torch.device) -> bool:
    """Whether kernels on `device` are launched with it now."""
    return _enabled and chip_of(sm_of(device)).pdl


def launch_options(device: torch.device) -> dict[str, bool]:
    """The keyword arguments of a launch: the kernel's constexpr `LAUNCH_PDL`, and Triton's option."""
    return {"LAUNCH_PDL": True, "launch_pdl": True} if pdl_on(device) else {"LAUNCH_PDL": False}


@triton.jit
def pdl_wait(LAUNCH_PDL: tl.constexpr):
    """Wait until the preceding kernel is complete and its writes are visible; call it before any load."""
    if LAUNCH_PDL:
        if TRIGGER_FIRST:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def pdl_settle(LAUNCH_PDL: tl.constexpr):
    """Wait, and only then let the next kernel be scheduled: all that was written before is settled for those behind.

    One such kernel a step, after those that describe the step, lets later ones read the description before they wait.
    """
    if LAUNCH_PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def pdl_trigger(LAUNCH_PDL: tl.constexpr):
    """Let the next kernel of the chain be scheduled."""
    if LAUNCH_PDL:
        gdc_launch_dependents()
