"""Compiles a Triton kernel that did not come precompiled, on this machine, and keeps it in the user's cache.

Triton writes PTX, its own ptxas makes a cubin of it, and `CubinLaunch` launches that: no C compiler takes part.
Invariants: what is compiled assumes no more of an argument than the kernel's registered specs do, so that it serves
every later launch of the same model; a file of the cache is there whole or not at all, so that processes may share it.
Knows nothing of when it is called: at a start, after a rehearsal (`rehearsal`).
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker_kernels.launch import aot
from stoker_kernels.launch.aot_index import Cubin, cached_index, split_type
from stoker_kernels.launch.aot_registry import AotSpec, specs
from stoker_kernels.launch.rehearsal import Missing

MOST_COMPILERS = 16
TRIES = 5
Report = Callable[[int, int, str], None]
"""(done, all, name of the last)."""


class CompileFailed(RuntimeError):
    """A kernel that does not compile for this device, by name, with the compiler's words."""


def compile_missing(missing: Iterable[Missing], report: Report, *, index: int = 0, among: int = 1) -> None:
    """Compile all of them, several at a time, each into the cache and its index.

    This process is number `index` `among` some of this machine that miss the same: each begins at another place of
    the order, and finds there what others have compiled meanwhile. Raises CompileFailed for the first that does not
    compile.
    """
    wanted = list(missing)
    begin = len(wanted) * index // among
    wanted = wanted[begin:] + wanted[:begin]
    for sm in {each.sm for each in wanted}:
        cached_index(sm)  # read once, here: compilers that read it at the same time would add to two of them
    done = 0
    with ThreadPoolExecutor(min(MOST_COMPILERS, max(1, (os.cpu_count() or 1) // among))) as pool:
        running = {pool.submit(compile_one, each): each for each in wanted}
        for finished in as_completed(running):
            finished.result()
            done += 1
            report(done, len(wanted), running[finished].wanted.kernel)


def compile_one(missing: Missing) -> Cubin:
    """Compile one kernel into the cache, unless it is there → its entry, which this process's index has from now on.

    Raises CompileFailed.
    """
    index = cached_index(missing.sm)
    index.folder.mkdir(parents=True, exist_ok=True)
    try:
        file = _written(variant_of(missing), index.folder)
    except Exception as error:  # Triton's errors have no common class
        raise CompileFailed(f"{missing.wanted.kernel} does not compile for sm_{missing.sm}: {error}") from error
    cubin = Cubin(**json.loads(file.with_suffix(".json").read_text()))
    index.add(cubin)
    return cubin


def _written(variant: aot.Variant, folder: Path) -> Path:
    """`aot.write_variant`, again where CPython loses count of the depth of syntax trees: before 3.11.5 it counts those
    of all threads in one place (gh-106905).
    """
    for _ in range(TRIES - 1):
        with suppress(SystemError):
            return aot.write_variant(variant, folder)
    return aot.write_variant(variant, folder)


def variant_of(missing: Missing) -> aot.Variant:
    """What to compile, such that the launch fits and so do others whose changing arguments are no multiples of 16."""
    changing = _never_assumed(missing.kernel)
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(missing.wanted.constants)
    for name, (kind, even) in missing.wanted.arguments.items():
        if kind == "none":
            constants[name] = None
        elif kind.startswith("*"):
            signature[name] = kind if even and name not in changing else f"{kind}:1"
        else:
            signature[name] = f"{kind}:16" if even and name not in changing else kind
    spec = AotSpec(missing.kernel, signature, (constants,), missing.wanted.options)
    return aot.Variant(spec, constants, missing.sm)


def _never_assumed(kernel: Any) -> set[str]:
    """Arguments of which no registered spec of the kernel assumes a multiple of 16: they change from step to step."""
    for module in aot.kernel_modules():
        importlib.import_module(module)
    forms: dict[str, set[int]] = {}
    for spec in specs():
        if spec.kernel is kernel:
            for name, kind in spec.signature.items():
                forms.setdefault(name, set()).add(split_type(kind)[1])
    return {name for name, divisors in forms.items() if divisors == {1}}
