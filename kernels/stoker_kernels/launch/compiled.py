"""What the C kernels for CPUs have in common: the types they take, where they run, how they are called, and a tape of
their calls.

A kernel takes the address of one structure, so that a call is two addresses. `Tape.record` notes those that a function
makes, on the thread that runs it; `replay` makes them again by one call, in the time that a few of them take.
Invariants: the numbers of TYPES are those of csrc/cpu_floats.h. A tape is right as long as what its calls read and
write lies where it lay; it keeps what was allocated while it was recorded. A function that computes by anything but
these kernels has no tape.
Does not know what a kernel computes.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stoker_kernels.launch import cc
from stoker_kernels.launch.dispatch import Supports, Target, dtype_name

TYPES = {torch.bfloat16: 0, torch.float32: 1}
# Numbers that a vector holds: rows of the kernels are whole vectors.
LANES = 16
# Multiplications below which a second thread costs more than it brings.
THREAD_WORK = 1 << 18
# Parts of the work for each thread: one that is late, or shares its processor, takes fewer.
PARTS_PER_THREAD = 6
_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
    }
)


def compiled_supports(stem: str) -> Supports:
    """CPUs for which csrc/STEM.c is compiled, or can be."""

    def supports(target: Target) -> str | None:
        if target.device != "cpu":
            return "needs a CPU"
        return cc.refusal(stem) if target.dtype in TYPES else f"takes {', '.join(map(dtype_name, TYPES))}"

    return supports


def shared(multiplications: int, groups: int) -> tuple[int, int]:
    """How many threads a product of so many multiplications is for, and how many of its groups of rows a part has."""
    threads = torch.get_num_threads() if multiplications >= THREAD_WORK else 1
    return threads, max(1, groups // (PARTS_PER_THREAD * threads)) if threads > 1 else groups


def operands(x: Tensor, halves: bool, rows: int, out: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [T, K] as a product reads it, in bf16 or fp32, and where it writes: `out` [T, rows] itself where that fits."""
    inner = x.contiguous() if halves else x.float().contiguous()
    if out is not None and out.is_contiguous() and out.dtype in (inner.dtype, torch.float32):
        return inner, out
    return inner, torch.empty((len(x), rows), dtype=inner.dtype)


def handed(y: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
    """What was written, where and as it was asked for: in `out`, or in x's dtype."""
    if out is None:
        return y.to(x.dtype)
    return y if out is y else out.copy_(y)


class Kernel:
    """The C function `name` of csrc/STEM.c: `void name(const struct Work *)`."""

    def __init__(self, stem: str, name: str) -> None:
        self._stem, self._name = stem, name

    def __call__(self, work: ctypes.Structure, *kept: object) -> None:
        """Run it. `kept`: what `work` points to that is no tensor."""
        function = getattr(cc.library(self._stem), self._name)
        function.restype = None
        function(ctypes.byref(work))
        if _recorder.tape is not None:
            _recorder.tape.note(ctypes.cast(function, ctypes.c_void_p).value or 0, work, kept)


class Tape:
    """Calls of C kernels, in order. `bytes`: what they keep; `refusal`: why they are not all that a function did."""

    def __init__(self) -> None:
        self.bytes = 0
        self.refusal: str | None = None
        self._calls: list[int] = []  # function, work, function, …
        self._kept: list[object] = []
        self._array: ctypes.Array[ctypes.c_void_p] | None = None

    def record(self, run: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What `run` returns, its calls noted. `refusal` says afterwards whether something else computed, too."""
        outer, _recorder.tape = _recorder.tape, self
        try:
            with _Watch(self):
                result = run()
        finally:
            _recorder.tape = outer
        self._array = (ctypes.c_void_p * len(self._calls))(*self._calls)
        return result

    def replay(self) -> None:
        """Make the calls again. Only of a tape that was recorded, and not refused."""
        assert self.refusal is None, "a tape that is not whole is replayed"
        assert self._array is not None, "a tape is replayed before it is recorded"
        _replay()(self._array, len(self._array) // 2)

    def note(self, function: int, work: ctypes.Structure, kept: tuple[object, ...]) -> None:
        """Add one call."""
        self._calls += (function, ctypes.addressof(work))
        self._kept += (work, kept)

    def keep(self, made: torch.Tensor) -> None:
        """Hold memory that calls may use."""
        self.bytes += made.nbytes
        self._kept.append(made)


def refuse_tape(reason: str) -> None:
    """Say that what runs now reads values, or computes, in a way that no tape has."""
    if _recorder.tape is not None:
        _recorder.tape.refusal = reason


class _Recorder(threading.local):
    tape: Tape | None = None


class _Watch(TorchDispatchMode):
    """Keeps what torch allocates, passes views, and refuses everything else that torch computes."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape = tape

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled. To be kept from torch's compiler would import it, in the middle of a step, and that
        fails where the user has no name, as in a pod.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._tape.keep(found)
        elif func._schema.is_mutable or not _only_views(found, (args, kwargs)):
            self._tape.refusal = str(func)
        return found


def _only_views(found: Any, given: Any) -> bool:
    stored = {_stored(each) for each in tree_leaves(given) if isinstance(each, torch.Tensor)} - {None}
    return all(isinstance(each, torch.Tensor) and _stored(each) in stored for each in tree_leaves(found))


def _stored(tensor: torch.Tensor) -> int | None:
    """Where the tensor's memory begins; None of one whose memory only a library knows, as oneDNN's packed weights."""
    return None if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


@functools.cache
def _replay() -> ctypes._NamedFuncPointer:
    function = cc.library("cpu_tape").stoker_replay
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_long], None
    return function


_recorder = _Recorder()
