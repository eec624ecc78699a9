"""Who may enter an op's package: outside of it only what its `__init__` exports is imported.

An op's own tests and benchmarks, and those of several ops (`stoker_kernels.bench`), may go deeper; `launch` has no
public side of its own. Ops are folders: a new one is held to this without being named anywhere.
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import stoker_kernels

ROOT = Path(__file__).parents[2]
PACKAGE = Path(stoker_kernels.__file__).parent
OPEN = {"launch", "bench"}
OPS = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - OPEN
# Who may enter any op: its benchmarks, and what stands in for a device under its tests.
INSIDE = ("kernels/stoker_kernels/bench/", "tests/kernels/bench/", "tests/kernels/emulator/", "tests/kernels/launch/")
# Tests of the engine that replace a launch by a record of it.
RECORDING = ("tests/runtime/executor/test_start_compiles_nothing.py",)


# What a run of the scenarios leaves: layers of images, with our packages in them.
LEFT = ROOT / "e2e" / "cluster" / "run"


def sources() -> list[Path]:
    folders = ("cli", "operator", "runtime", "kernels", "tests", "e2e")
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if ".venv" not in path.parts and LEFT not in path.parents]


def at_home(name: str, op: str) -> bool:
    """Whether a file may use what is inside of `op`."""
    return name.startswith((f"kernels/stoker_kernels/{op}/", f"tests/kernels/{op}/", *INSIDE, *RECORDING))


def entered(tree: ast.AST) -> list[tuple[str, str]]:
    """(op, what of it) of each import of a module or name in an op's package; "" for the package itself."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("stoker_kernels."):
            _, op, *deeper = node.module.split(".")
            found += [(op, ".".join((*deeper, name.name))) for name in node.names]
        elif isinstance(node, ast.Import):
            parts = [name.name.split(".") for name in node.names if name.name.startswith("stoker_kernels.")]
            found += [(op, ".".join(deeper)) for _, op, *deeper in parts]
    return [(op, name) for op, name in found if op in OPS]


def trespasses(name: str, text: str) -> list[str]:
    """What a file imports of an op that the op does not export."""
    return [
        f"{name} imports stoker_kernels.{op}: {inner}"
        for op, inner in entered(ast.parse(text))
        if not at_home(name, op) and inner and inner not in importlib.import_module(f"stoker_kernels.{op}").__all__
    ]


def test_only_what_an_op_exports_is_imported_from_outside() -> None:
    found = []
    for path in sources():
        text = path.read_text(encoding="utf-8")
        if "stoker_kernels" in text:
            found += trespasses(path.relative_to(ROOT).as_posix(), text)
    assert found == []


@pytest.mark.parametrize("op", sorted(OPS))
def test_what_an_op_exports_is_public_functions_and_types(op: str) -> None:
    package = importlib.import_module(f"stoker_kernels.{op}")
    assert package.__doc__
    assert "Must never know" in package.__doc__
    modules = [name for name in package.__all__ if isinstance(getattr(package, name), type(ast))]
    assert modules == []


def test_a_deeper_import_is_noticed() -> None:
    text = "from stoker_kernels.norm.reference import rms\nfrom stoker_kernels.norm import rms_norm, triton_rms_norm"
    assert len(trespasses("runtime/stoker_runtime/new.py", text)) == 2
    assert trespasses("kernels/stoker_kernels/norm/new.py", text) == []
    assert len(trespasses("kernels/stoker_kernels/rope/new.py", "import stoker_kernels.gemm.table")) == 1
