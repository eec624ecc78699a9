"""The table of faults in e2e/README.md has a row for each fault that a scenario records, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.scenarios.faults import test_operator_killed, test_pod_faults, test_spec_faults

SCENARIOS = Path(test_pod_faults.__file__).parent
README = SCENARIOS.parents[1] / "README.md"
# What a record says with other words filled in.
FILLED = {
    "operator killed when {}": list(test_operator_killed.FIRST),
    "operator killed in an update when {}": list(test_operator_killed.UPDATE),
    "{}": list(test_spec_faults.PLACELESS),
    "{} ({})": ["engine process killed (SIGKILL)", "engine hung (SIGSTOP)"],
}


def recorded() -> Iterator[str]:
    """The first argument of every `Fault(…)`, `{}` for what is filled in."""
    for file in sorted(SCENARIOS.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Fault":
                name = node.args[0]
                parts = name.values if isinstance(name, ast.JoinedStr) else [name]
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts)


def expected() -> set[str]:
    found = set()
    for name in recorded():
        filled = FILLED.get(name, [name])
        found.update(name.replace("{}", each) if name.count("{}") == 1 else each for each in filled)
    return found


def test_every_fault_has_its_row() -> None:
    section = README.read_text().partition("## Faults")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \| .+ \| \d+ s, .+ \|$", section, re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == expected()


@pytest.mark.parametrize("name", FILLED)
def test_the_names_that_are_filled_are_still_recorded(name: str) -> None:
    assert name in set(recorded())
