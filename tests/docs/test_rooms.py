"""A house with rooms: no folder is too full, and each says what it is for and what it must never know."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from tests.docs.test_documents import ROOT

PACKAGES = sorted(
    found.parent
    for root in ("cli/stoker_cli", "operator/stoker_operator", "runtime/stoker_runtime", "kernels/stoker_kernels")
    for found in (ROOT / root).rglob("__init__.py")
)
MOST_MODULES = 20
MOST_LINES = 400


def named(package: Path) -> str:
    return package.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("package", PACKAGES, ids=named)
def test_a_room_says_what_it_is(package: Path) -> None:
    said = ast.get_docstring(ast.parse((package / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert "Must never know" in said or "Knows nothing of" in said


@pytest.mark.parametrize("package", PACKAGES, ids=named)
def test_a_room_is_not_too_full(package: Path) -> None:
    modules = [file for file in package.glob("*.py") if file.name != "__init__.py"]
    assert len(modules) <= MOST_MODULES
    lines = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in modules}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_every_folder_with_modules_is_a_package() -> None:
    roots = {package.parts[len(ROOT.parts)] for package in PACKAGES}
    folders = {file.parent for root in roots for file in (ROOT / root).rglob("*.py")}
    assert folders - set(PACKAGES) == set()
