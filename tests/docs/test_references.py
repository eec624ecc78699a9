"""docs/reference says what the code says now, and the guide to troubleshooting knows every reason."""

from __future__ import annotations

import re

import pytest
from docs.generate import reasons
from docs.generate.__main__ import PAGES, REFERENCE

from stoker_runtime.fetch.errors import FetchError


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


def test_there_is_no_other_page() -> None:
    assert {page.name for page in REFERENCE.iterdir()} == set(PAGES)


def test_every_cell_of_a_table_is_one() -> None:
    for page in REFERENCE.iterdir():
        for block in re.findall(r"(?:^\|.*\n)+", page.read_text(encoding="utf-8"), re.MULTILINE):
            columns = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(columns) == 1, (page.name, block.splitlines()[0])


def test_reasons_are_found_where_the_code_words_them() -> None:
    """In a plain call, behind a choice, behind a name, through a function that wraps, by a keyword."""
    found = {(each.condition, each.reason) for each in reasons.found()}
    assert {
        ("Ready", "SpecInvalid"),
        ("Ready", "OutOfMemory"),
        ("Ready", "CrashLoop"),
        ("AutoscalingActive", "SeriesMissing"),
        ("Fits", "TooLarge"),
    } <= found


def test_the_guide_has_a_row_for_each_reason_of_ready() -> None:
    guide = (REFERENCE.parent / "operate.md").read_text(encoding="utf-8").partition("## Troubleshooting")[2]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", guide.partition("\n## ")[0], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    fetched = {each.__name__ for each in FetchError.__subclasses__()} - {"NotPublished"}
    wanted = {each.reason for each in reasons.found() if each.condition == reasons.READY} | fetched
    assert set(named) == wanted
    assert len(named) == len(set(named))
