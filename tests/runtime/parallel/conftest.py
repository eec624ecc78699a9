"""What ranks read of files, counted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker_runtime.checkpoint import read_entry


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Called, how many bytes of tensors were read since it was last. Between runs of a small matrix gaps are left out,
    as they are where rows are wide.
    """
    counting, fill = threading.Lock(), read_entry.fill
    read = 0

    def counted(descriptor: int, path: Path, offset: int, view: memoryview) -> None:
        nonlocal read
        with counting:
            read += len(view)
        fill(descriptor, path, offset, view)

    def since() -> int:
        nonlocal read
        with counting:
            found, read = read, 0
        return found

    monkeypatch.setattr(read_entry, "fill", counted)
    monkeypatch.setattr(read_entry, "SMALL_GAP", 0)
    return since
