"""Compiles csrc/*.cu to cubins ahead of time: `python -m stoker_kernels.launch.nvcc [--out FOLDER]`.

Uses the nvcc of the PyPI wheels (extra `build`); needs no GPU and no CUDA toolkit.
Invariants: one cubin per (source, architecture) of TARGETS; a cubin is written whole or not at all; its name is that of
the state of its sources, and one of another state is neither used nor kept.
Does not know: how cubins are launched (`cuda`).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from stoker_kernels.launch.aot_index import aot_folder, cache_folder

PACKAGE = Path(__file__).parents[1]
# A source's name begins with what it is compiled for.
ARCHES = {"sm90": "sm_90a"}
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
Report = Callable[[int, int, str], None]
"""(done, all, name of the last)."""
FLAGS = ("-cubin", "-std=c++17", "-O3", "-Xptxas", "-warn-spills", "-Xptxas", "-warn-lmem-usage")


def sources() -> dict[str, Path]:
    """Every CUDA source of the package by its stem: `OP/csrc/STEM.cu`."""
    return {path.stem: path for path in sorted(PACKAGE.glob("*/csrc/*.cu"))}


def read_by(stem: str) -> list[Path]:
    """What is compiled into `stem`: its source, and the headers that it includes, or that these include."""
    named = {path.name: path for path in headers()}
    found = [sources()[stem]]
    for path in found:  # grows while it is walked
        included = [named[name] for name in _INCLUDE.findall(path.read_text()) if name in named]
        found += [header for header in dict.fromkeys(included) if header not in found]
    return found


def cubin_name(stem: str, arch: str) -> str:
    """The file of csrc/`stem`.cu for `arch` ("sm_90a"), which names the state of all that is compiled into it.

    So a cubin of other sources, whose kernels may take other arguments, is not found.
    """
    return f"{stem}.{arch}.{_digest(PACKAGE, stem)}.cubin"


@functools.cache
def _digest(package: Path, stem: str) -> str:
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in read_by(stem):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def headers() -> list[Path]:
    """Every header that a source may include."""
    return sorted(PACKAGE.glob("*/csrc/*.cuh"))


def targets() -> dict[str, str]:
    """What there is to compile: stem → architecture."""
    return {stem: ARCHES[stem.split("_")[0]] for stem in sources()}


class NvccMissing(RuntimeError):
    """No nvcc among the installed wheels, or nothing that it can preprocess with; says what to install."""


def toolkit() -> Path:
    """The folder that holds bin/nvcc of the wheels. Raises NvccMissing with the packages to install."""
    if shutil.which("g++") is None:
        raise NvccMissing("nvcc preprocesses with g++, which is not installed: apt-get install g++")
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for folder in sorted(Path(root).glob("cu1*")):
            if (folder / "bin" / "nvcc").exists():
                return folder
    raise NvccMissing("nvcc is not installed: pip install 'stoker[build]'")


def compile_cubin(stem: str, arch: str, out: Path) -> str:
    """Compile csrc/`stem`.cu for `arch` into `out`; returns the compiler's remarks.

    Raises RuntimeError with the compiler's errors.
    """
    root = toolkit()
    target = out / cubin_name(stem, arch)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    command = [str(root / "bin" / "nvcc"), f"-arch={arch}", *FLAGS, f"-I{root / 'include'}",
               f"-I{PACKAGE / 'launch' / 'csrc'}", "-o", str(partial), str(sources()[stem])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed for {stem} on {arch}:\n{done.stdout}{done.stderr}")
    os.replace(partial, target)
    for other in {*out.glob(f"{stem}.{arch}.*cubin")} - {target}:
        other.unlink(missing_ok=True)
    return (done.stdout + done.stderr).strip()


def build(out: Path, jobs: int, report: Report = lambda *_: None) -> list[str]:
    """Compile what `out` lacks; returns one line per cubin. `report` hears of each that is done."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = [(stem, arch) for stem, arch in targets().items() if not (out / cubin_name(stem, arch)).exists()]
    lines = []
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(compile_cubin, stem, arch, out): f"{stem} {arch}" for stem, arch in wanted}
        for finished in as_completed(running):
            lines.append(f"{running[finished]} {finished.result()}".strip())
            report(len(lines), len(wanted), running[finished])
    return lines


@functools.cache
def cache() -> Path:
    """Where cubins built at a start are kept: in the user's cache, a folder for each state of the sources."""
    digest = hashlib.sha256("".join(cubin_name(*target) for target in targets().items()).encode())
    return cache_folder() / f"cuda-{digest.hexdigest()[:12]}"


def missing(sm: int) -> list[str]:
    """The sources for an SM of which there is no cubin, neither one that came nor one in the cache."""
    of_sm = {stem: arch for stem, arch in targets().items() if arch.rstrip("a") == f"sm_{sm}"}
    folders = (aot_folder(), cache())
    return [stem for stem, arch in of_sm.items() if not any((at / cubin_name(stem, arch)).exists() for at in folders)]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=aot_folder(), help="folder for the cubins (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time")
    options = parser.parse_args()
    for line in build(options.out, options.jobs):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
