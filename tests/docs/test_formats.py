"""The table of quantization formats: every test that it names is there, and every format of the code has a row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from tests.docs.test_documents import ROOT, anchors

from stoker_kernels.quant import BLOCK_FORMATS
from stoker_runtime.config import ISQ_KINDS, QUANTIZATIONS, QUANTIZED_EMBEDDINGS, QUANTIZED_HEADS
from stoker_runtime.models.quantization.quantized_checkpoint import METHODS

PAGE, HEADING = "docs/features.md", "## Quantization formats"
UNNAMED = ("auto", "none")
"""Values that name no format."""


def rows(text: str) -> list[list[str]]:
    """The cells of the table's rows, without its head."""
    lines = text.partition(HEADING)[2].split("\n## ")[0].split("\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


ROWS = rows((ROOT / PAGE).read_text(encoding="utf-8"))


def names_in(file: Path) -> set[str]:
    """The names of a module's tests."""
    body = ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []
    return {each.name for each in body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")}


def missing(row: list[str]) -> list[str]:
    """Of a row's tests, those that are not there; all of it where it names none."""
    names = re.findall(r"`([^`]+)`", row[-1])
    apart = [name.partition("::") for name in names]
    return [file + cut + test for file, cut, test in apart if test not in names_in(ROOT / file)] if names else row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:30])
def test_every_test_that_a_row_names_is_there(row: list[str]) -> None:
    assert len(row) == 5
    assert missing(row) == []


def test_a_test_that_is_not_there_is_noticed() -> None:
    file = Path(__file__).relative_to(ROOT).as_posix()
    assert missing(["", f"`{file}::test_a_test_that_is_not_there_is_noticed`"]) == []
    for name in (f"{file}::test_of_nothing", f"{file}::missing", "tests/docs/test_nothing.py::test_x", file):
        assert missing(["", f"`{name}`"])
    assert missing(["", "nothing"])


def test_every_format_has_a_row() -> None:
    named = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[1])}
    wanted = {*METHODS, *QUANTIZATIONS} - set(UNNAMED)
    wanted |= {f"--isq {kind}" for kind in ISQ_KINDS if kind not in UNNAMED}
    wanted |= {f"--quantize-head {kind}" for kind in QUANTIZED_HEADS if kind not in UNNAMED}
    wanted |= {f"--quantize-embedding {kind}" for kind in QUANTIZED_EMBEDDINGS if kind not in UNNAMED}
    assert wanted - named == set()
    in_blocks = [set(re.findall(r"\w+", row[0])) for row in ROWS if "gguf" in row[1]]
    assert set(BLOCK_FORMATS) - set.union(*in_blocks) == set()


def test_the_readme_leads_there() -> None:
    assert f"({PAGE}#quantization-formats)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "quantization-formats" in anchors(ROOT / PAGE)
