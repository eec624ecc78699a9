"""Every file and module that a page, a docstring or a comment names is there.

A path counts by its end: `plan/fit.py` is operator/stoker_operator/plan/fit.py. A page or a module means the files of
its own root unless it names another; pages of docs/ and of the repository's root mean all. `*` stands for anything,
`a_{b,c}.py` for two, and a word in capitals (`OP/op.py`) for any name.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

import pytest
from tests.docs.test_documents import FOREIGN, PAGES, ROOT, files, spread

CODE_ROOTS = ("cli", "docs", "e2e", "kernels", "operator", "runtime", "tests")
PACKAGES = {f"stoker_{root}": root for root in ("cli", "kernels", "operator", "runtime")}
PATH = re.compile(r"(?<![\w/.*<$:~-])((?:[\w*{},.-]+/)*[\w*{},-]+\.(?:py|md|cu|cuh|lock|Dockerfile))(?![\w/])")
FOLDER = re.compile(r"`((?:[\w*-]+/)+)`")
MODULE = re.compile(r"\b((?:stoker_(?:cli|operator|runtime|kernels))(?:\.\w+)+)")
# The tests of names are full of names that are not there.
SOURCES = [
    name
    for name in files()
    if name.endswith(".py") and name.startswith(CODE_ROOTS) and not name.startswith("tests/docs/")
]

# Charts that were name what was there.
OTHERS = [
    name
    for name in files()
    if name in ("Makefile", "pyproject.toml")
    or name.endswith((".cu", ".cuh", ".h", ".cpp", ".Dockerfile"))
    or (name.endswith(".tpl") and name.startswith("charts/"))
    or (name.endswith(".yaml") and name.startswith(("charts/", "crds/")))
]


def prose_of(module: str) -> Iterator[str]:
    """The docstrings and comments of a module."""
    source = (ROOT / module).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node, clean=False) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def names(text: str) -> Iterator[str]:
    for found in PATH.findall(text):
        yield from spread(found)
    yield from (found.rstrip("/") for found in FOLDER.findall(text))


@cache
def known(root: str) -> frozenset[str]:
    """What a file of `root` may mean: every end of every path in it, and whole paths of the repository."""
    ends = set()
    folders = {str(folder) for file in files() for folder in PurePosixPath(file).parents if folder.name}
    for file in (*files(), *folders):
        parts = PurePosixPath(file).parts
        near = root in ("", parts[0]) or parts[0] == "tests"
        ends |= {"/".join(parts[at:]) for at in range(len(parts) if near else 1)}
        if parts[0] in ("cli", "operator", "runtime", "kernels"):
            ends.add("/".join(parts[1:]))
    return frozenset(ends)


def is_there(name: str, where: str) -> bool:
    if not name.endswith(".md"):
        name = re.sub(r"[A-Z]{2,}(?![a-z])", "*", name)  # OP/op.py: of any op
    root = where.partition("/")[0] if where.startswith(CODE_ROOTS) and not where.startswith("docs/") else ""
    ends = known("" if where.startswith("tests/") else root)
    if "*" in name:
        return any(PurePosixPath(end).match(name) for end in ends)
    return name in ends or PurePosixPath(name).name in FOREIGN


@cache
def defined(module: Path) -> frozenset[str]:
    """The names at the top of a module."""
    found: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Assign():
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
            case ast.ImportFrom() | ast.Import():
                found |= {alias.asname or alias.name for alias in node.names}
    return frozenset(found)


def is_module(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something that one defines."""
    package, *rest = name.split(".")
    place = ROOT / PACKAGES[package] / package
    for at, part in enumerate(rest):
        if (place / part).is_dir():
            place /= part
        elif (place / f"{part}.py").is_file():
            following = rest[at + 1 : at + 2]
            return not following or following[0] in defined(place / f"{part}.py")
        else:
            return part in defined(place / "__init__.py")
    return True


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_a_page_names_what_is_there(page: str) -> None:
    text = re.sub(r"\]\([^)]*\)|https?://\S+", "]", (ROOT / page).read_text(encoding="utf-8"))
    assert sorted({name for name in names(text) if not is_there(name, page)}) == []
    assert sorted({name for name in MODULE.findall(text) if not is_module(name)}) == []


@pytest.mark.parametrize("root", CODE_ROOTS)
def test_code_names_what_is_there(root: str) -> None:
    missing = []
    for module in SOURCES:
        if not module.startswith(f"{root}/"):
            continue
        for text in prose_of(module):
            text = re.sub(r"https?://\S+", "", text)
            missing += [f"{module}: {name}" for name in names(text) if not is_there(name, module)]
            missing += [f"{module}: {name}" for name in MODULE.findall(text) if not is_module(name)]
    assert sorted(set(missing)) == []


@pytest.mark.parametrize("file", OTHERS)
def test_other_files_name_what_is_there(file: str) -> None:
    text = re.sub(r"https?://\S+", "", (ROOT / file).read_text(encoding="utf-8"))
    assert sorted({name for name in names(text) if not is_there(name, file)}) == []
    assert sorted({name for name in MODULE.findall(text) if not is_module(name)}) == []


def test_what_is_not_there_is_noticed() -> None:
    assert not is_there("plan_rollout.py", "operator/stoker_operator/reconcile.py")
    assert is_there("plan/rollout.py", "operator/stoker_operator/reconcile.py")
    assert not is_there("reconcile.py", "runtime/stoker_runtime/config.py")
    assert is_there("stoker_operator/reconcile.py", "runtime/stoker_runtime/config.py")
    assert is_module("stoker_runtime.request.SamplingParams")
    assert not is_module("stoker_runtime.request.absent")
    assert not is_module("stoker_runtime.absent")
