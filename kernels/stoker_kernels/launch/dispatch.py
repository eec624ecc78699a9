"""Picks the implementation of an op by device, SM and dtype, and says why when there is none.

Invariants: implementations of an op are tried in the order of their registration; a CUDA tensor never reaches
the reference unless the reference is pinned by name; a choice is made once per (op, device, dtype) and kept.
Implementations are named by "module:function" and imported at their first use, so that a machine without
Triton can import every op. Where batch invariance is demanded, those alone are tried that say that they have it.
Knows nothing of what an op computes.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from stoker_kernels.launch.chip import BF16_SM, FP8_SM, LEAST_SM, chip_of

PACKAGE = Path(__file__).parents[1]
MAIN_OPS = {"gemm": "linear", "attention": "paged_attention", "norm": "rms_norm"}
"""Folders whose name says enough where an implementation is pinned: `--kernel gemm=cublas`."""
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a kernel would run: device type, SM (90 for 9.0; 0 off CUDA), and the dtype of its data."""

    device: str
    sm: int
    dtype: torch.dtype


Supports = Callable[[Target], str | None]
"""Returns None where the implementation runs, else the reason it does not."""


class KernelUnavailable(RuntimeError):
    """No implementation of an op for a dtype and SM. `reasons` holds one sentence for each implementation."""

    def __init__(self, op: str, target: Target, reasons: dict[str, str]) -> None:
        where = f"sm_{target.sm}" if target.device == "cuda" else target.device
        detail = "; ".join(f"{name}: {reason}" for name, reason in reasons.items()) or "none is registered"
        super().__init__(f"no kernel for op {op} with {dtype_name(target.dtype)} on {where} ({detail})")
        self.op = op
        self.dtype = target.dtype
        self.sm = target.sm
        self.reasons = reasons


@dataclass(frozen=True, slots=True)
class Implementation:
    """One way to run an op: `path` is "module:function", imported after `supports` has agreed.

    `invariant`: the bits of a row of its result depend on that row's operands and on the shapes of weights, and on
    nothing else of a call. `usual`: it is tried where that is not demanded.
    """

    op: str
    name: str
    path: str
    supports: Supports
    invariant: bool = False
    usual: bool = True

    def load(self) -> Function:
        """Import the function."""
        module, _, attribute = self.path.partition(":")
        function: Function = getattr(importlib.import_module(module), attribute)
        return function


_registry: dict[str, dict[str, Implementation]] = {}
_pins: dict[str, str] = {}
_selected: dict[tuple[str, torch.device, torch.dtype], tuple[Implementation, Function, dict[str, str]]] = {}
_sms: dict[torch.device, int] = {}
_demands = {"batch invariance": False}


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` → `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def interpreting() -> bool:
    """Whether Triton runs kernels on CPU tensors: TRITON_INTERPRET=1, set before its import."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def sm_of(device: torch.device) -> int:
    """The SM of a CUDA device as major·10 + minor; 0 for any other device."""
    if device.type != "cuda":
        return 0
    if device not in _sms:
        major, minor = torch.cuda.get_device_capability(device)
        _sms[device] = major * 10 + minor
    return _sms[device]


@functools.cache
def sm_count(device: torch.device) -> int:
    """SMs of a device; for the interpreter, which has none, a small number: any is right, that makes small plans."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def register(op: str, name: str, path: str, supports: Supports, *, invariant: bool = False) -> None:
    """Add an implementation after those that `op` already has; it is tried after them.

    `invariant` as of `Implementation`. Raises ValueError when the op has an implementation of that name.
    """
    _add(Implementation(op, name, path, supports, invariant))


def register_invariant(op: str, name: str, path: str, supports: Supports) -> None:
    """Add an implementation that is tried where batch invariance is demanded alone; errors as `register`."""
    _add(Implementation(op, name, path, supports, invariant=True, usual=False))


def demand_invariance(demanded: bool) -> None:
    """Have every op chosen among its batch-invariant implementations from now on, or as usual again."""
    if demanded != _demands["batch invariance"]:
        _demands["batch invariance"] = demanded
        _selected.clear()


def invariance_demanded() -> bool:
    """Whether the bits of a row may depend on nothing but the row."""
    return _demands["batch invariance"]


def ops() -> tuple[str, ...]:
    """Every op there is: each folder of the package with an `op.py` is imported, which registers what lies in it."""
    for path in sorted(PACKAGE.glob("*/op.py")):
        importlib.import_module(f"stoker_kernels.{path.parent.name}")
    return tuple(_registry)


def implementations(op: str) -> tuple[str, ...]:
    """An op's usual implementations in the order they are tried. Raises ValueError for an unknown op."""
    return tuple(name for name, each in _op(op).items() if each.usual)


def pin(op: str, name: str) -> None:
    """Use implementation `name` of `op`, or of the main op of that folder, and no other (`--kernel op=name`).

    Raises ValueError naming the nearest known op or implementation.
    """
    op = MAIN_OPS.get(op, op)
    known = implementations(op)
    if name not in known:
        raise ValueError(f"op {op} has no implementation {name!r}{_nearest(name, known)}; it has {', '.join(known)}")
    _pins[op] = name
    _forget(op)


def unpin(op: str) -> None:
    """Undo `pin`."""
    op = MAIN_OPS.get(op, op)
    _pins.pop(op, None)
    _forget(op)


def select(op: str, device: torch.device, dtype: torch.dtype) -> Function:
    """The function that runs `op` on `device` for `dtype`. Raises KernelUnavailable with the reasons."""
    found = _selected.get((op, device, dtype))
    if found is None:
        chosen_one, refused = _choose(op, Target(device.type, sm_of(device), dtype))
        found = _selected[(op, device, dtype)] = (chosen_one, chosen_one.load(), refused)
    return found[1]


def require(device: torch.device, dtype: torch.dtype, names: tuple[str, ...]) -> dict[str, str]:
    """Select the ops of `names` at start-up → {op: implementation}. Raises KernelUnavailable."""
    for op in names:
        select(op, device, dtype)
    return {op: _selected[(op, device, dtype)][0].name for op in names}


def refusal(op: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why nothing runs `op`, in the words of KernelUnavailable; None where something does. Selects nothing.

    None for an op that is pinned, too: what is wrong with that is no matter of the device alone, and `select` says it.
    """
    if op in _pins:
        return None
    try:
        _choose(op, Target(device.type, sm_of(device), dtype))
    except KernelUnavailable as error:
        return str(error)
    return None


def chosen() -> dict[str, str]:
    """Op → implementation for everything selected so far, for the start-up log.

    Where an op got several, each stands with its dtypes: "triton (bfloat16), reference (float32)". A second choice on
    CUDA stands with what was wrong with those before it: "cublas; no table: its kernels are not built".
    """
    by_op: dict[str, dict[str, list[str]]] = {}
    for (op, device, dtype), (implementation, _, refused) in _selected.items():
        reasons = refused if device.type == "cuda" else {}
        label = "; no ".join([implementation.name, *(f"{name}: {reason}" for name, reason in reasons.items())])
        by_op.setdefault(op, {}).setdefault(label, []).append(dtype_name(dtype))
    return {
        op: next(iter(names))
        if len(names) == 1
        else ", ".join(f"{name} ({', '.join(dict.fromkeys(dtypes))})" for name, dtypes in names.items())
        for op, names in sorted(by_op.items())
    }


def reference_supports(target: Target) -> str | None:
    """The reference serves every device but CUDA; there it runs only when pinned."""
    return "runs on CUDA only when pinned" if target.device == "cuda" else None


def cpu_supports(*dtypes: torch.dtype) -> Supports:
    """What is written for CPUs: tensors of `dtypes` there."""

    def supports(target: Target) -> str | None:
        if target.device != "cpu":
            return "needs a CPU"
        return None if target.dtype in dtypes else f"takes {', '.join(map(dtype_name, dtypes))}"

    return supports


def type_refusal(target: Target) -> str | None:
    """Why a GPU does not multiply the type of the target's data; None where it does."""
    chip = chip_of(target.sm)
    if target.dtype is torch.bfloat16 and not chip.bf16:
        return f"bfloat16 needs sm_{BF16_SM} or newer"
    if target.dtype is torch.float8_e4m3fn and not chip.fp8:
        return f"float8_e4m3fn needs sm_{FP8_SM} or newer"
    return None


def triton_supports(*dtypes: torch.dtype, min_sm: int = LEAST_SM) -> Supports:
    """What Triton kernels of `dtypes` run on: CUDA from `min_sm` on, if the chip has the type; the CPU interpreting."""

    def supports(target: Target) -> str | None:
        if target.dtype not in dtypes:
            return f"takes {', '.join(map(dtype_name, dtypes))}"
        if target.device == "cuda":
            return type_refusal(target) or (None if target.sm >= min_sm else f"needs sm_{min_sm} or newer")
        return None if target.device == "cpu" and interpreting() else "needs CUDA, or TRITON_INTERPRET=1"

    return supports


def _add(one: Implementation) -> None:
    implementations = _registry.setdefault(one.op, {})
    if one.name in implementations:
        raise ValueError(f"op {one.op} already has an implementation named {one.name}")
    implementations[one.name] = one


def _op(op: str) -> dict[str, Implementation]:
    if op not in _registry:
        # Who names a room, such as gemm, means the first op that lives there.
        lives = [name for name, known in _registry.items() if any(f".{op}." in each.path for each in known.values())]
        hint = f", did you mean {lives[0]}?" if lives else _nearest(op, _registry)
        raise ValueError(f"unknown op {op!r}{hint}; there are {', '.join(_registry)}")
    return _registry[op]


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {near[0]}?" if near else ""


def _choose(op: str, target: Target) -> tuple[Implementation, dict[str, str]]:
    known, demanded = _op(op), invariance_demanded()
    candidates = [known[_pins[op]]] if op in _pins else list(known.values())
    reasons: dict[str, str] = {}
    for candidate in candidates:
        if not (candidate.invariant if demanded else candidate.usual):
            if demanded and candidate.usual:
                reasons[candidate.name] = "is not batch-invariant"
            continue
        pinned_reference = op in _pins and candidate.name == "reference"
        reason = None if pinned_reference else candidate.supports(target)
        if reason is None:
            return candidate, reasons
        reasons[candidate.name] = reason
    raise KernelUnavailable(op, target, reasons)


def _forget(op: str) -> None:
    for key in [key for key in _selected if key[0] == op]:
        del _selected[key]
