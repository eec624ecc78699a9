"""The benchmark's oracle shares nothing with what it checks: of the engine it knows types and names, no function."""

from __future__ import annotations

import ast
import importlib
import types
from pathlib import Path

import pytest

from stoker_runtime.bench import reference

FOLDER = Path(reference.__file__).parent
OWN = reference.__name__
ENGINE = ("stoker_runtime", "stoker_kernels")


def borrowed(file: Path) -> list[tuple[str, str]]:
    """What a module imports of the engine: (module, name)."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(each.name, "") for each in node.names if each.name.startswith(ENGINE)]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith(ENGINE):
            found += [(node.module, each.name) for each in node.names]
    return [(module, name) for module, name in found if not f"{module}.".startswith(f"{OWN}.")]


def meaning(module: str, name: str) -> object:
    assert name, f"{module} as a whole: whatever it computes could be asked for"
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_it_borrows_no_function(file: Path) -> None:
    for module, name in borrowed(file):
        value = meaning(module, name)
        is_computing = isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.ModuleType)
        assert not is_computing, f"{file.name}: {module}.{name} computes; say here anew what it means"


def test_a_borrowed_function_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    within = "def f():\n    from stoker_kernels.quant import pack_rows\n"
    file.write_text(f"from stoker_kernels.quant import PLANE_KINDS\n{within}")
    assert borrowed(file) == [("stoker_kernels.quant", "PLANE_KINDS"), ("stoker_kernels.quant", "pack_rows")]
    assert isinstance(meaning("stoker_kernels.quant", "pack_rows"), types.FunctionType)
