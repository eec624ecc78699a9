"""The Markdown pages: every relative link leads somewhere, and every file that a table names exists.

A name in backquotes counts as a file when it has a known ending or a folder of the repository before it; tests may be
named without their folder and ending, and `*` stands for anything.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOLDERS = ("charts", "cli", "crds", "e2e", "images", "kernels", "operator", "runtime", "tests")
QUOTED = re.compile(r"`([^`]+)`")
FILE = re.compile(r"[\w.*/-]+\.(py|md|yaml|yml|toml|json|Dockerfile|cu|lock)")
TEST = re.compile(r"(tests/[\w/*]+|test_[\w*]+)(\.py)?/?")
# Files of a model's own folder, or that a program writes: none of the repository's.
FOREIGN = {
    "config.json", "generation_config.json", "modules.json", "tokenizer.json", "stoker-manifest.json", "manifest.yaml",
}  # fmt: skip


@cache
def files() -> tuple[str, ...]:
    """Every file of the repository, by its path from the root; what is beside its folders does not count."""
    roots = [entry for entry in ROOT.iterdir() if entry.is_file()]
    inside = (file for folder in FOLDERS for file in (ROOT / folder).rglob("*") if file.is_file())
    return tuple(sorted(file.relative_to(ROOT).as_posix() for file in (*roots, *inside)))


PAGES = [page for page in files() if page.endswith(".md")]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def exists(name: str, page: str) -> bool:
    """Whether a file or folder of this name is in the repository, or for a folder's own page, in that folder."""
    wanted = name.rstrip("/")
    home = str(PurePosixPath(page).parent)
    for known in files():
        path = PurePosixPath(known)
        if not (name.startswith(("tests/", "test_")) or home == "." or known.startswith((f"{home}/", "tests/"))):
            continue
        if any(PurePosixPath(at).match(wanted) for at in (path, *path.parents) if str(at) != "."):
            return True
    return False


def tables(page: str) -> list[str]:
    return [line for line in (ROOT / page).read_text(encoding="utf-8").split("\n") if line.startswith("|")]


def missing(page: str) -> list[str]:
    """The files and tests that the page's tables name and that do not exist."""
    found = []
    for quoted in (each for line in tables(page) for each in QUOTED.findall(line)):
        name = quoted.strip()
        if name in FOREIGN:
            continue
        if TEST.fullmatch(name):
            name = name if name.endswith((".py", "/", "*")) else f"{name}*"
        elif not FILE.fullmatch(name):
            continue
        if not exists(name, page):
            found.append(quoted)
    return found


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


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert not exists("tests/unit/test_absent*", "README.md")
    assert not exists("absent.py", "kernels/README.md")
    assert exists("tests/unit/test_documents*", "README.md")
    assert exists("dispatch.py", "kernels/README.md")
