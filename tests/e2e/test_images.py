"""images/*.Dockerfile: what they say of themselves is what the programs in them read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from e2e.cluster import images

from stoker_runtime.settings.parse import parse

FILES = [images.ROOT / "images" / f"{name}.Dockerfile" for name in ("operator", "runtime")]


def variables(text: str) -> dict[str, str]:
    """The variables of the ENV lines of the last stages."""
    joined = text.replace("\\\n", " ")
    lines = re.findall(r"^ENV (.+)$", joined, re.MULTILINE)
    return {name: value for line in lines for name, value in re.findall(r"(\S+?)=(\S+)", line)}


def test_the_server_starts_with_the_variables_of_its_image() -> None:
    """It refuses unknown STOKER_* variables, so the image's own must be known."""
    environment = variables(FILES[1].read_text())
    assert "STOKER_AOT_DIR" in environment
    assert parse(["/model"], environment).engine.model == "/model"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_images_are_built_on_one_base(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STOKER_E2E_LEND", raising=False)
    text = file.read_text()
    bases = re.findall(r"^FROM (docker\.io\S+)", text, re.MULTILINE)
    assert set(bases) == {"docker.io/library/python:${PYTHON}"}
    assert f"ARG PYTHON={images._python()}\n" in text
