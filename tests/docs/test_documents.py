"""The Markdown pages: every relative link leads somewhere, and every file that a table names exists.

A name in backquotes counts as a file when it has a known ending or a folder of the repository before it; tests may be
named without their folder and ending, and `*` stands for anything.
"""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = ("charts", "cli", "crds", "docs", "e2e", "images", "kernels", "operator", "runtime", "tests")
QUOTED = re.compile(r"`([^`]+)`")
FILE = re.compile(r"[\w.*/-]+\.(py|md|yaml|yml|toml|json|Dockerfile|cu|lock)")
TEST = re.compile(r"(tests/[\w/*]+|test_[\w*]+)(\.py)?/?")
# Files of a model's own folder, what a program writes, a client's prefix of names: none of the repository's.
FOREIGN = {
    "config.json", "generation_config.json", "modules.json", "tokenizer.json", "stoker-manifest.json", "manifest.yaml",
    "faults.md", "_aot", "hosted_vllm",
}  # fmt: skip

# What builds and runs leave in the repository's folders, and git ignores: a Go SDK has pages of its own.
LEFT = ("e2e/cluster/bin/", "e2e/cluster/run/", "kernels/stoker_kernels/_aot/")


@cache
def files() -> tuple[str, ...]:
    """Every file of the repository, by its path from the root; what is beside its folders does not count."""
    roots = [entry for entry in ROOT.iterdir() if entry.is_file()]
    inside = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file())
    every = (file.relative_to(ROOT).as_posix() for file in (*roots, *inside))
    return tuple(sorted(name for name in every if not name.startswith(LEFT)))


PAGES = [page for page in files() if page.endswith(".md")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def places() -> tuple[str, ...]:
    """Every file and folder of the repository."""
    above = {str(at) for name in files() for at in PurePosixPath(name).parents if str(at) != "."}
    return (*files(), *sorted(above))


@cache
def found(wanted: str) -> tuple[str, ...]:
    """The places that end in a name, or in what fits it where it has asterisks."""
    return tuple(place for place in places() if PurePosixPath(place).match(wanted))


def exists(name: str, page: str) -> bool:
    """Whether a file or folder of this name is in the repository, or for a folder's own page, in that folder."""
    home = "." if page.startswith("docs/") else str(PurePosixPath(page).parent)
    anywhere = home == "." or name.startswith(("tests/", "test_"))
    return any(anywhere or place.startswith((f"{home}/", "tests/")) for place in found(name.rstrip("/")))


def tables(page: str) -> list[str]:
    return [line for line in (ROOT / page).read_text(encoding="utf-8").split("\n") if line.startswith("|")]


def spread(text: str) -> list[str]:
    """`a_{b,c}.py` as a_b.py and a_c.py, as a shell spreads it."""
    found = re.fullmatch(r"([^{}]*)\{([^{}]+)\}([^{}]*)", text)
    return [f"{found[1]}{part}{found[3]}" for part in found[2].split(",")] if found else [text.strip()]


def pattern(name: str) -> str:
    """The file that a name in backquotes stands for; "" for none of the repository's."""
    if name in FOREIGN:
        return ""
    if TEST.fullmatch(name):
        return name if name.endswith((".py", "/", "*")) else f"{name}*"
    return name if FILE.fullmatch(name) else ""


def missing(page: str) -> list[str]:
    """The files and tests that the page's tables name and that do not exist."""
    names = [name for line in tables(page) for text in QUOTED.findall(line) for name in spread(text)]
    return [name for name in names if pattern(name) and not exists(pattern(name), page)]


def test_there_are_pages() -> None:
    assert {"README.md", "ARCHITECTURE.md", "kernels/README.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for link in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_tables_name_files_that_exist(page: str) -> None:
    assert missing(page) == []


def parameters(function: ast.FunctionDef) -> list[str]:
    given = function.args
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]


def functions_of(op: str) -> dict[str, list[list[str]]]:
    """Name → parameters of every function at the top of a module of the op's package: a name may be there twice,
    as the op and as its reference.
    """
    found: dict[str, list[list[str]]] = {}
    for module in sorted((ROOT / "kernels" / "stoker_kernels" / op).glob("*.py")):
        for node in ast.parse(module.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(parameters(node))
    return found


def test_signatures_of_the_kernels_are_the_codes() -> None:
    wrong, checked = [], 0
    for line in tables("kernels/README.md"):
        row = re.match(r"\| `([\w/.]+?)/?` \| (.*?) \| ", line)
        if row is None:
            continue
        functions = functions_of(row[1])
        for call in re.finditer(r"`(\w+)\(([^)]*)\)", row[2]):
            if not call[1].islower():
                continue  # a class
            said = [re.split("[:=]", part)[0].strip() for part in call[2].split(",") if part.strip() != "*"]
            checked += 1
            if said not in functions.get(call[1], []):
                wrong.append(f"{row[1]}.{call[1]}: {said}, the code has {functions.get(call[1])}")
    assert wrong == []
    assert checked > 15


def test_the_drawing_of_the_floors_has_every_room() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawing = page.partition("```text")[2].partition("```")[0]
    drawn = set(re.findall(r"\w+", drawing))
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    roots = [each for each in linter["contracts"] if "." not in each.get("containers", ["."])[0]]
    floors = [floor for contract in roots for floor in contract["layers"]]
    rooms = {room.strip() for floor in floors for room in floor.split("|")}
    assert len(rooms) > 30
    assert rooms - drawn == set()


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert not exists("tests/docs/test_absent*", "README.md")
    assert not exists("absent.py", "kernels/README.md")
    assert exists("tests/docs/test_documents*", "README.md")
    assert exists("dispatch.py", "kernels/README.md")
