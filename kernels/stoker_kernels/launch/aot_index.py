"""What has been compiled ahead of time, and which of it fits a launch.

`python -m stoker_kernels.launch.aot` writes, for each SM, cubins and one `index.json` that describes them all. A launch
is described the same way: the type of each argument and whether it is a multiple of 16, the constants, the options.

What is not among them is compiled on this machine once (`at_need`) and kept in the user's cache, described alike.

Invariants: a cubin fits only if it was compiled from the sources that are imported now, for these types, constants
and options; of several that fit, the one that assumes most is taken, so a generic variant serves where an aligned one
does not apply. A kernel without a fitting variant is remembered with the reason, once.
Knows nothing of Triton, of CUDA, or of loading.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

INDEX = "index.json"
POINTER_ALIGNMENT = 16

log = logging.getLogger(__name__)
_compiled: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Cubin:
    """One compiled variant: its file, how to launch it, and what it was compiled for.

    `arguments`: name → type as in `AotSpec.signature`, in the order of the kernel's parameters. `shared`: bytes.
    """

    file: str
    kernel: str
    source: str
    entry: str
    threads: int
    shared: int
    launch_pdl: bool
    arguments: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def fits(self, wanted: Wanted) -> int:
        """How many of its assumptions `wanted` meets; −1 where it breaks one."""
        if self.source != wanted.source or self.options != wanted.options:
            return -1
        if any(self.constants.get(name, value) != value for name, value in wanted.constants.items()):
            return -1
        met = 0
        for name, (kind, divisible) in wanted.arguments.items():
            if name in self.constants:
                if (kind, self.constants[name]) != ("none", None):
                    return -1
                continue
            base, divisor = split_type(self.arguments[name])
            if base != kind or (divisor > 1 and not divisible):
                return -1
            met += divisor > 1
        return met


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a launch needs: name → (type, whether it is a multiple of 16); a None has the type "none"."""

    kernel: str
    source: str
    arguments: Mapping[str, tuple[str, bool]]
    constants: Mapping[str, Any]
    options: Mapping[str, Any]

    def __str__(self) -> str:
        kinds = [f"{name}: {kind}{':16' if even else ''}" for name, (kind, even) in self.arguments.items()]
        fixed = [f"{name}={value}" for name, value in (*self.constants.items(), *self.options.items())]
        return ", ".join(kinds + fixed)


class Index:
    """The cubins of one folder, by kernel."""

    def __init__(self, folder: Path, cubins: Iterable[Cubin]) -> None:
        self.folder = folder
        self._by_kernel: dict[str, list[Cubin]] = {}
        for cubin in cubins:
            self.add(cubin)

    def add(self, cubin: Cubin) -> None:
        """One more, that lies in the folder."""
        self._by_kernel.setdefault(cubin.kernel, []).append(cubin)

    def path(self, cubin: Cubin) -> Path:
        """Where one of them lies."""
        return self.folder / cubin.file

    def find(self, wanted: Wanted) -> Cubin | None:
        """The variant that fits best, or None."""
        known = self._by_kernel.get(wanted.kernel, ())
        best = max(known, key=lambda cubin: cubin.fits(wanted), default=None)
        return best if best is not None and best.fits(wanted) >= 0 else None

    def reason(self, wanted: Wanted) -> str:
        """Why `find` gave None, in words."""
        known = self._by_kernel.get(wanted.kernel, ())
        if not known:
            return f"none is in {self.folder}"
        if all(cubin.source != wanted.source for cubin in known):
            return "the sources have changed since; run python -m stoker_kernels.launch.aot"
        return f"no variant for {wanted}"


def split_type(text: str) -> tuple[str, int]:
    """A type of a signature → (type, what its value is a multiple of): pointers are 16-byte aligned unless they say."""
    base, _, mark = text.partition(":")
    return base, int(mark) if mark else POINTER_ALIGNMENT if base.startswith("*") else 1


def aot_folder() -> Path:
    """Where compiled kernels lie: STOKER_AOT_DIR, or `_aot` beside this file."""
    return Path(os.environ.get("STOKER_AOT_DIR") or Path(__file__).parents[1] / "_aot")


def cache_folder() -> Path:
    """Where kernels compiled on this machine are kept: STOKER_KERNEL_CACHE, or `stoker/kernels` in the user's cache."""
    named = os.environ.get("STOKER_KERNEL_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stoker" / "kernels"


def sm_folder(root: Path, sm: int) -> Path:
    """The part of a folder of compiled kernels that is for one SM."""
    return root / f"sm_{sm}"


def write_index(folder: Path, cubins: Iterable[Cubin]) -> None:
    """Describe the cubins of a folder; replaces the file at once."""
    partial = folder / f"{INDEX}.partial"
    partial.write_text(json.dumps([asdict(cubin) for cubin in cubins], indent=1) + "\n")
    partial.replace(folder / INDEX)


def ahead_command(sm: int) -> str:
    """What compiles for an SM before a start does."""
    return f"python -m stoker_kernels.launch.aot --sm {sm} compiles them ahead"


def compiled_ahead() -> dict[int, int]:
    """SM → kernels of Triton's that came precompiled for it, by the index of its folder."""
    folders = ((path.parent, path.parent.name.removeprefix("sm_")) for path in aot_folder().glob(f"sm_*/{INDEX}"))
    return {int(sm): len(list(folder.glob("*.cubin"))) for folder, sm in sorted(folders, key=lambda each: int(each[1]))}


@functools.cache
def read_index(sm: int) -> Index:
    """The index for an SM; an empty one where nothing was compiled."""
    folder = sm_folder(aot_folder(), sm)
    if not (folder / INDEX).exists():
        log.info("kernels: none came precompiled for sm_%d in %s; %s", sm, folder.parent, ahead_command(sm))
        return Index(folder, ())
    return Index(folder, (Cubin(**entry) for entry in json.loads((folder / INDEX).read_text())))


@functools.cache
def cached_index(sm: int) -> Index:
    """What was compiled on this machine for an SM, in this process or before it."""
    folder = sm_folder(cache_folder(), sm)
    found = []
    for description in sorted(folder.glob("*.json")):
        try:
            cubin = Cubin(**json.loads(description.read_text()))
        except (ValueError, TypeError) as error:  # of another release, or not ours
            log.warning("kernels: %s is not a description of a kernel: %s", description, error)
            continue
        if (folder / cubin.file).exists():
            found.append(cubin)
    return Index(folder, found)


def find_cubin(sm: int, wanted: Wanted) -> tuple[Path, Cubin] | None:
    """The cubin for a launch and its file: of those that came precompiled, else of those compiled here."""
    for index in (read_index(sm), cached_index(sm)):
        cubin = index.find(wanted)
        if cubin is not None:
            return index.path(cubin), cubin
    return None


def note_compiled(kernel: str, reason: str) -> None:
    """Remember, and log once a kernel, that it is compiled by this process."""
    if kernel not in _compiled:
        _compiled[kernel] = reason
        log.info("kernels: %s is compiled here (%s)", kernel, reason)


def compiled_at_start() -> dict[str, str]:
    """Kernel → why it had to be compiled in this process; empty where everything came precompiled."""
    return dict(_compiled)
