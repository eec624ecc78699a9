"""A wheel as `make wheel` builds it carries what was compiled, and an installed one finds it, without any compiler.

Compiling all takes minutes: one CUDA kernel, one of Triton's and one library for CPUs are compiled by the commands of
the Makefile, where these put them; the other CUDA kernels are there by name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from stoker_kernels.launch import aot, cc, nvcc

ROOT = Path(__file__).parents[3]
PARTS = ("cli", "operator", "runtime", "kernels")
SMALL = "sm90_decode"
TRITON = """
from stoker_kernels.launch import aot
from stoker_kernels.launch.aot_index import aot_folder, sm_folder
variant = next(each for each in aot.variants(90, compact=True) if "commit_tokens" in each.name)
aot.write_all([variant], sm_folder(aot_folder(), 90), 1)
"""
LIBRARY = """
import sys
from stoker_kernels.launch import cc
from stoker_kernels.launch.aot_index import aot_folder
cc.compile_library(sys.argv[1], cc.level(), aot_folder())
"""
# What the installed package says where nothing can be compiled.
ASKED = """
import json, subprocess, sys
def none(*_, **__):
    raise AssertionError("a compiler was asked for")
subprocess.run = subprocess.Popen = none
from stoker_kernels.launch import aot, cc, cuda, nvcc
from stoker_kernels.launch.aot_index import Wanted, compiled_ahead, find_cubin, read_index
(kernel, cubins), = read_index(90)._by_kernel.items()
cubin = cubins[0]
kinds = {name: (kind.split(":")[0], True) for name, kind in cubin.arguments.items()}
kinds |= {name: ("none", False) for name, value in cubin.constants.items() if value is None}
fixed = {name: value for name, value in cubin.constants.items() if value is not None}
path, _ = find_cubin(90, Wanted(kernel, cubin.source, kinds, fixed, cubin.options))
print(json.dumps({
    "package": nvcc.__file__,
    "missing": nvcc.missing(90),
    "none": [stem for stem, arch in nvcc.targets().items() if cuda.missing_cubin(stem, arch)],
    "cuda": str(cuda.cubin_path("%s", "sm_90a")),
    "triton": str(path),
    "ahead": compiled_ahead(),
    "library": cc.library(sys.argv[1])._name,
}))
""" % SMALL  # noqa: UP031


def run(command: list[str], tree: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=tree, text=True, capture_output=True, env=os.environ | environment, timeout=300, check=False
    )
    if done.returncode and re.search("No matching distribution|Connection|Temporary failure|timed out", done.stderr):
        pytest.skip(f"no index serves what builds a wheel: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def recipe(tree: Path) -> list[str]:
    """The commands of `make wheel`, without making anything."""
    shown = run(["make", "-n", "-o", ".venv/.dev", "wheel", "SMS=90"], tree)
    return [line for line in shown.splitlines() if line.startswith(".venv/bin/python ")]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as it is checked out, where nothing is compiled yet."""
    tree = tmp_path_factory.mktemp("wheel") / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "Makefile", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    for name in (*PARTS, "crds"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("_aot", "__pycache__", "*.egg-info"))
    # Hatch reads what git ignores, as in a checkout.
    run(["git", "init", "-q"], tree)
    return tree


@pytest.fixture(scope="module")
def compiled(tree: Path) -> Path:
    """The tree, once the commands of `make wheel` before the last have compiled something into it."""
    try:
        nvcc.toolkit()
    except nvcc.NvccMissing as missing:
        pytest.skip(str(missing))
    folder = tree / "kernels" / "stoker_kernels" / "_aot"
    folder.mkdir()
    for stem, arch in nvcc.targets().items():
        if stem != SMALL:
            (folder / nvcc.cubin_name(stem, arch)).write_text(f"{stem} for {arch}")
    commands = [command.split()[1:] for command in recipe(tree)]
    assert [" ".join(each) for each in commands[:3]] == [
        "-m stoker_kernels.launch.nvcc",
        "-m stoker_kernels.launch.cc",
        "-m stoker_kernels.launch.aot --sm 90",
    ]
    code = {"PYTHONPATH": str(tree / "kernels"), "STOKER_AOT_DIR": ""}
    said = run([sys.executable, *commands[0]], tree, **code)
    assert [line.split()[0] for line in said.splitlines()] == [SMALL]
    run([sys.executable, "-c", LIBRARY, next(iter(cc.sources()))], tree, **code)
    run([sys.executable, "-c", TRITON], tree, **code)
    assert (folder / nvcc.cubin_name(SMALL, "sm_90a")).read_bytes().startswith(b"\x7fELF")
    return tree


@pytest.fixture(scope="module")
def wheel(compiled: Path) -> Path:
    """What the last command of `make wheel` builds."""
    run([sys.executable, *recipe(compiled)[3].split()[1:]], compiled)
    (found,) = (compiled / "dist").glob("*.whl")
    return found


def test_a_wheel_carries_every_cubin(compiled: Path, wheel: Path) -> None:
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if "/_aot/" in name}
    package = compiled / "kernels"
    there = {str(path.relative_to(package)) for path in package.rglob("_aot/**/*") if path.is_file()}
    assert inside == there
    of_cuda = {f"stoker_kernels/_aot/{nvcc.cubin_name(stem, arch)}" for stem, arch in nvcc.targets().items()}
    assert of_cuda <= inside
    assert len(of_cuda) == len(nvcc.sources())
    (variant,) = (each for each in aot.variants(90, compact=True) if "commit_tokens" in each.name)
    assert {f"stoker_kernels/_aot/sm_90/{variant.name}.cubin", "stoker_kernels/_aot/sm_90/index.json"} <= inside


def test_an_installed_wheel_finds_them_where_nothing_compiles(wheel: Path, tmp_path: Path) -> None:
    place, stem = tmp_path / "site", next(iter(cc.sources()))
    run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(place), str(wheel)], tmp_path)
    nothing = {"PATH": str(tmp_path), "CC": str(tmp_path / "none"), "STOKER_KERNEL_CACHE": str(tmp_path / "cache")}
    told = run([sys.executable, "-c", ASKED, stem], tmp_path, PYTHONPATH=str(place), STOKER_AOT_DIR="", **nothing)
    found = json.loads(told.splitlines()[-1])
    aot_folder = place / "stoker_kernels" / "_aot"
    assert Path(found["package"]).is_relative_to(place)
    assert found["missing"] == found["none"] == []
    assert found["cuda"] == str(aot_folder / nvcc.cubin_name(SMALL, "sm_90a"))
    assert Path(found["triton"]).parent == aot_folder / "sm_90"
    assert found["ahead"] == {"90": 1}
    assert found["library"] == str(aot_folder / cc.file_name(stem, cc.level()))
    assert not (tmp_path / "cache").exists()
