"""One table for all faults of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from e2e.scenarios.faults.record import TABLE, Record


@pytest.fixture(scope="session")
def record() -> Iterator[Record]:
    """The table; shown at the end."""
    yield Record()
    if sys.__stderr__:
        sys.__stderr__.write(f"\n{TABLE.read_text()}")
