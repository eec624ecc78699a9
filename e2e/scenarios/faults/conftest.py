"""One table for all faults of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from e2e.cluster.binaries import Say
from e2e.scenarios.faults.record import TABLE, Record


@pytest.fixture(scope="session")
def record(say: Say) -> Iterator[Record]:
    """The table; shown at the end."""
    yield Record()
    say(f"\n{TABLE.read_text()}")
