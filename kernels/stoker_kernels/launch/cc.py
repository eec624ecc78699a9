"""Compiles C kernels for CPUs: `python -m stoker_kernels.launch.cc [--out FOLDER]` ahead of time, or once when needed.

A source `OP/csrc/cpu_NAME.c`, with the headers `launch/csrc/cpu_*.h`, becomes a shared library a level of processor;
the best one that this processor has is loaded. Ahead of time they lie in the folder of compiled kernels, else in the
user's cache.
Invariants: a library's name holds the hash of its source and flags, so an old one is never loaded; it is written whole
or not at all. Nothing is compiled for a processor that is not x86-64 but on that processor itself.
Does not know: what the functions of a library take.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from stoker_kernels.launch.aot_index import aot_folder, cache_folder

PACKAGE = Path(__file__).parents[1]
HEADERS = Path(__file__).parent / "csrc"
# -ffp-contract: a product and a sum in two roundings stay two, as the formats are defined.
FLAGS = ("-O3", "-std=gnu11", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread", "-Wno-psabi")
# Level of x86-64 → flags of /proc/cpuinfo that it needs; the best first.
LEVELS = {
    "x86-64-v4": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "x86-64-v3": ("avx2", "bmi2", "f16c", "fma"),
}
NATIVE = "native"


class CcMissing(RuntimeError):
    """No compiled library, and no compiler to make one; says what to install."""


def sources() -> dict[str, Path]:
    """Every C source of the package by its stem."""
    return {path.stem: path for path in sorted(PACKAGE.glob("*/csrc/cpu_*.c"))}


@functools.cache
def processor_flags() -> frozenset[str]:
    """What this processor can do, in the words of /proc/cpuinfo; nothing for one that is not x86-64."""
    if platform.machine() != "x86_64":
        return frozenset()
    return frozenset(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())


@functools.cache
def level() -> str:
    """The best level of this processor."""
    return next((name for name, needs in LEVELS.items() if processor_flags().issuperset(needs)), NATIVE)


def file_name(stem: str, wanted: str) -> str:
    """The library's name for a level."""
    said = sources()[stem].read_bytes() + " ".join((*FLAGS, wanted)).encode()
    said += b"".join(path.read_bytes() for path in sorted(HEADERS.glob("cpu_*.h")))
    if wanted == NATIVE:
        said += f"{platform.machine()} {platform.processor()} {platform.node()}".encode()
    return f"{stem}-{wanted}-{hashlib.sha256(said).hexdigest()[:16]}.so"


def compile_library(stem: str, wanted: str, folder: Path) -> Path:
    """Compile a source for a level. Raises CcMissing without a compiler, or with the compiler's words."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise CcMissing("needs a C compiler (cc), which is not installed: apt-get install gcc")
    folder.mkdir(parents=True, exist_ok=True)
    wide = ("-mprefer-vector-width=512",) if wanted == "x86-64-v4" else ()
    with tempfile.TemporaryDirectory(dir=folder) as place:
        made = Path(place) / "library.so"
        command = [compiler, *FLAGS, f"-march={wanted}", *wide, f"-I{HEADERS}", "-o", str(made), str(sources()[stem])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise CcMissing(f"{compiler} does not compile {stem}.c: {done.stderr.strip()[-500:]}")
        return made.replace(folder / file_name(stem, wanted))


@functools.cache
def library(stem: str) -> ctypes.CDLL:
    """The library of a source for this processor, compiled now where it is not yet. Raises CcMissing."""
    name = file_name(stem, level())
    for folder in (aot_folder(), cache_folder()):
        if (folder / name).is_file():
            return ctypes.CDLL(str(folder / name))
    return ctypes.CDLL(str(compile_library(stem, level(), cache_folder())))


@functools.cache
def refusal(stem: str) -> str | None:
    """Why there is no library for this processor; None where there is one."""
    try:
        library(stem)
    except (CcMissing, OSError) as error:
        return str(error)
    return None


def bf16_refusal(stem: str) -> str | None:
    """The same of a source that multiplies bf16 as it is."""
    if platform.machine() != "x86_64" or "avx512_bf16" not in processor_flags():
        return "needs a processor with AVX-512 BF16"
    return refusal(stem)


def main(argv: list[str]) -> int:
    """Compile every source for every level of this kind of processor."""
    parser = argparse.ArgumentParser(prog="python -m stoker_kernels.launch.cc", description=main.__doc__)
    parser.add_argument("--out", type=Path, default=aot_folder(), help="where to put the libraries")
    folder = parser.parse_args(argv).out
    if platform.machine() != "x86_64":
        sys.stdout.write("no level is compiled ahead for this kind of processor\n")
        return 0
    for stem in sources():
        for wanted in LEVELS:
            sys.stdout.write(f"{compile_library(stem, wanted, folder)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
