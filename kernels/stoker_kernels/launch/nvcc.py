"""Compiles csrc/*.cu to cubins ahead of time: `python -m stoker_kernels.launch.nvcc [--out FOLDER]`.

Uses the nvcc of the PyPI wheels (extra `dev`); needs no GPU and no CUDA toolkit.
Invariants: one cubin per (source, architecture) of TARGETS; a cubin is written whole or not at all; one that is newer
than every source is kept.
Does not know: how cubins are launched (`cuda`).
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from stoker_kernels.launch.aot_index import aot_folder

PACKAGE = Path(__file__).parents[1]
# A source's name begins with what it is compiled for.
ARCHES = {"sm90": "sm_90a"}
FLAGS = ("-cubin", "-std=c++17", "-O3", "-Xptxas", "-warn-spills", "-Xptxas", "-warn-lmem-usage")


def sources() -> dict[str, Path]:
    """Every CUDA source of the package by its stem: `OP/csrc/STEM.cu`."""
    return {path.stem: path for path in sorted(PACKAGE.glob("*/csrc/*.cu"))}


def headers() -> list[Path]:
    """Every header that a source may include."""
    return sorted(PACKAGE.glob("*/csrc/*.cuh"))


def targets() -> dict[str, str]:
    """What there is to compile: stem → architecture."""
    return {stem: ARCHES[stem.split("_")[0]] for stem in sources()}


class NvccMissing(RuntimeError):
    """No nvcc among the installed wheels."""


def toolkit() -> Path:
    """The folder that holds bin/nvcc of the wheels. Raises NvccMissing with the packages to install."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        for folder in sorted(Path(root).glob("cu1*")):
            if (folder / "bin" / "nvcc").exists():
                return folder
    raise NvccMissing("nvcc is not installed: pip install 'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' "
                      "'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*' 'nvidia-cuda-runtime==13.0.*'")


def compile_cubin(stem: str, arch: str, out: Path) -> str:
    """Compile csrc/`stem`.cu for `arch` into `out`; returns the compiler's remarks.

    Raises RuntimeError with the compiler's errors.
    """
    root = toolkit()
    target = out / f"{stem}.{arch}.cubin"
    partial = target.with_suffix(".partial")
    command = [str(root / "bin" / "nvcc"), f"-arch={arch}", *FLAGS, f"-I{root / 'include'}",
               f"-I{PACKAGE / 'launch' / 'csrc'}", "-o", str(partial), str(sources()[stem])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"nvcc failed for {stem} on {arch}:\n{done.stdout}{done.stderr}")
    os.replace(partial, target)
    return (done.stdout + done.stderr).strip()


def stale(stem: str, arch: str, out: Path) -> bool:
    """Whether a source is newer than the cubin, or there is none."""
    target = out / f"{stem}.{arch}.cubin"
    read = [sources()[stem], *headers()]
    return not target.exists() or target.stat().st_mtime < max(path.stat().st_mtime for path in read)


def build(out: Path, jobs: int) -> list[str]:
    """Compile everything stale into `out`; returns one line per cubin."""
    out.mkdir(parents=True, exist_ok=True)
    wanted = [(stem, arch) for stem, arch in targets().items() if stale(stem, arch, out)]
    with ThreadPoolExecutor(jobs) as pool:
        remarks = list(pool.map(lambda pair: compile_cubin(pair[0], pair[1], out), wanted))
    return [f"{stem} {arch} {remark}".strip() for (stem, arch), remark in zip(wanted, remarks, strict=True)]


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
