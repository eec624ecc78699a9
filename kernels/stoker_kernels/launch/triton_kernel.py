"""`@kernel`: a Triton kernel that is launched from its precompiled cubin, and compiled only where there is none.

`kernel[grid](*arguments, **constants_and_options)` reads like Triton's own. Runtime arguments are given by position,
constants and options by name.

Invariants: a launch goes to torch's current device and stream, does not synchronise and can be captured once the same
kind of launch has happened outside of a capture. What a launch needs is found once per (types, divisibility,
constants, options), by Triton's own rules of specialization. A launch without a precompiled variant is compiled by
Triton, without its launcher and so without a C compiler (`at_need`), and noted (`aot_index.note_compiled`), never
silently; in a rehearsal it is left to be compiled with the others. Launches come from one thread at a time.
Knows nothing of what kernels compute.
"""
# mypy: allow-untyped-defs, allow-any-generics

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import BaseBackend
from triton.runtime.jit import JITCallable, JITFunction, native_specialize_impl

from stoker_kernels.launch.aot_index import Cubin, Wanted, cached_index, find_cubin, note_compiled, read_index
from stoker_kernels.launch.cubin_launch import CubinLaunch
from stoker_kernels.launch.dispatch import interpreting, sm_of
from stoker_kernels.launch.rehearsal import Missing, note_missing, rehearsing

_FALSE, _TRUE, _BACKEND = repeat(False), repeat(True), repeat(BaseBackend)


def kernel(function: Callable[..., Any] | None = None, *, do_not_specialize: Sequence[str] = ()) -> Any:
    """Decorator for a kernel that is launched; functions that kernels call stay `@triton.jit`.

    `do_not_specialize` names integers of which no divisibility is assumed.
    """
    if function is None:
        return partial(kernel, do_not_specialize=do_not_specialize)
    if interpreting():
        return triton.jit(do_not_specialize=list(do_not_specialize))(function)
    return PrecompiledKernel(function, do_not_specialize=list(do_not_specialize))


class PrecompiledKernel(JITFunction):  # type: ignore[misc]
    """A Triton function whose launches look for a cubin first."""

    def __init__(self, function: Callable[..., Any], do_not_specialize: list[str]) -> None:
        super().__init__(function, do_not_specialize=do_not_specialize)
        self._specialized = [not each.do_not_specialize for each in self.params]
        self._launches: dict[Any, CubinLaunch] = {}

    def run(self, *args, grid, warmup, **kwargs):
        """Launch; what `kernel[grid](...)` calls."""
        if warmup:
            return super().run(*args, grid=grid, warmup=True, **kwargs)
        device = torch.cuda.current_device()
        kinds = self.kinds(args)
        key = (device, kinds, *kwargs.items())
        launch = self._launches.get(key)
        if launch is None:
            launch = self._load(device, kinds, kwargs)
            if launch is None:
                return None
            self._launches[key] = launch
        if not rehearsing():
            launch(grid, device, args)
        return None

    def kinds(self, args: Sequence[Any]) -> tuple[tuple[Any, Any], ...]:
        """Each argument's type and specialization, as Triton sees them."""
        return tuple(map(native_specialize_impl, _BACKEND, args, _FALSE, self._specialized, _TRUE))

    @property
    def identity(self) -> str:
        """`triton_rms_norm.rms_norm_kernel`: what it is called in the index."""
        return f"{self.module.rpartition('.')[2]}.{self.__name__.strip('_')}"

    @cached_property
    def source(self) -> str:
        """A digest of its text, of the functions it calls and of the constants they read, as imported now."""
        text = "\n".join((triton.__version__, *_pieces(self, set())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def wanted(self, kinds: Sequence[tuple[Any, Any]], keywords: dict[str, Any]) -> Wanted:
        """Describe a launch by the kinds of its arguments, as Triton specializes them, and its keyword arguments."""
        arguments = {}
        for name, (kind, note) in zip(self.arg_names, kinds, strict=False):
            if kind == "constexpr":
                arguments[name] = ("none" if note is None else "i32", False)
            else:
                arguments[name] = (kind, note == "D")
        constants = {name: value for name, value in keywords.items() if name in self.arg_names}
        options = {name: value for name, value in keywords.items() if name not in constants and name != "launch_pdl"}
        return Wanted(self.identity, self.source, arguments, constants, options)

    def _load(self, device: int, kinds: Sequence[tuple[Any, Any]], keywords: dict[str, Any]) -> CubinLaunch | None:
        """The launch of a cubin, compiled now where there is none; None where a rehearsal leaves that to its end."""
        sm = sm_of(torch.device("cuda", device))
        wanted = self.wanted(kinds, keywords)
        found = find_cubin(sm, wanted)
        if found is None:
            missing = Missing(self, wanted, sm, read_index(sm).reason(wanted))
            note_compiled(self.identity, missing.reason)
            if rehearsing():
                note_missing(missing)
                return None
            found = _compiled(missing)
        path, cubin = found
        positions = {name: position for position, name in enumerate(self.arg_names)}
        return CubinLaunch(path, cubin, [positions[name] for name in cubin.arguments], device)


def _compiled(missing: Missing) -> tuple[Path, Cubin]:
    from stoker_kernels.launch import at_need  # seldom needed, and it imports the compiler's side

    cubin = at_need.compile_one(missing)
    return cached_index(missing.sm).path(cubin), cubin


def _pieces(function: Any, seen: set[Any]) -> Iterator[str]:
    """The texts that shape a kernel: its own, those of the JIT functions it names, and their global constants."""
    if function.fn in seen:
        return
    seen.add(function.fn)
    yield function.src
    for name in sorted(set(function.fn.__code__.co_names)):
        value = function.__globals__.get(name)
        if isinstance(value, JITCallable):
            yield from _pieces(value, seen)
        elif isinstance(value, tl.constexpr):
            yield f"{name} = {value.value!r}"
