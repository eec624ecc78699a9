"""e2e/cluster/binaries.py: the Go that is chosen is new enough for every pinned module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from e2e.cluster import binaries

MODULES = sorted((binaries.HERE / "tools").glob("*/go.mod"))


def number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


@pytest.mark.parametrize("file", MODULES, ids=lambda file: file.parent.name)
def test_no_module_asks_for_a_newer_go(file: Path) -> None:
    """The Go that builds them may not fetch another (GOTOOLCHAIN=local)."""
    found = re.search(r"^go (\S+)$", file.read_text(), re.MULTILINE)
    assert found is not None
    assert number(found[1]) <= binaries.GO_AT_LEAST
    assert number(found[1]) <= number(binaries.GO_REQUIREMENT.partition("==")[2])


def test_each_binary_has_a_module() -> None:
    assert {binary.part for binary in binaries.BINARIES.values()} == {file.parent.name for file in MODULES}
