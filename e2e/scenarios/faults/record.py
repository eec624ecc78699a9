"""The table of faults: what was done, what the user saw, how long recovery took. Written as Markdown."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.layout import HERE
from e2e.scenarios import golden

TABLE = HERE / "run" / "faults.md"
_HEAD = "| fault | what the user sees | recovery |\n|---|---|---|\n"


@dataclass(frozen=True)
class Fault:
    """One line. `seen` is the reason and the message of a condition, or what else showed it. `by` is who acts."""

    name: str
    seen: str
    seconds: float
    by: str = "by itself"


class Record:
    """Collects lines; each is written at once, so that a run that fails later still leaves them."""

    def __init__(self, path: Path = TABLE) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_HEAD)

    def add(self, fault: Fault) -> None:
        """Append one line."""
        seen = golden.normalized(fault.seen).strip().replace("|", "\\|").replace("\n", " ")
        with open(self._path, "a") as stream:
            stream.write(f"| {fault.name} | {seen} | {fault.seconds:.0f} s, {fault.by} |\n")
