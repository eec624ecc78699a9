"""The table of accounts: several processes at once, more owners than slots in reach, slots that change hands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker_runtime.api.limits import ledger as module
from stoker_runtime.api.limits.ledger import Ledger
from stoker_runtime.errors import CapacityError

ROUNDS, OWNERS = 400, ("", "name:q", "key:w")
ADDS = f"""
import sys
from stoker_runtime.api.limits.ledger import Ledger
ledger = Ledger(sys.argv[1])
for _ in range({ROUNDS}):
    for at, owner in enumerate({OWNERS!r}):
        with ledger.account(owner, 0.0) as account:
            account[0] += 1
            account[1] += at
"""


def test_processes_count_together(tmp_path: Path) -> None:
    path = str(tmp_path / "accounts")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    others = [subprocess.Popen([sys.executable, "-c", ADDS, path], env=environment) for _ in range(3)]
    assert [other.wait(120) for other in others] == [0, 0, 0]
    found = Ledger(path)
    for at, owner in enumerate(OWNERS):
        with found.account(owner, 0.0) as account:
            assert list(account) == [3 * ROUNDS, 3 * ROUNDS * at]
    assert (Path(path).stat().st_mode & 0o777) == 0o600


def test_slots_change_hands_once_they_are_full_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small a table that all owners are after the same slots."""
    monkeypatch.setattr(module, "SLOTS", 8)
    monkeypatch.setattr(module, "REACH", 8)
    ledger = Ledger()
    for at in range(8):
        with ledger.account(f"name:{at}", 10.0) as account:
            account[0], account[1] = 20.0 + at, 15.0
    with pytest.raises(CapacityError), ledger.account("name:late", 19.0):
        pass
    for at in reversed(range(8)):
        with ledger.account(f"name:{at}", 19.0) as account:
            assert list(account) == [20.0 + at, 15.0]
    with ledger.account("name:late", 20.5) as account:
        assert list(account) == [0.0, 0.0], "the slot of name:0, which is full again"
        account[0] = 99.0
    for at in range(1, 8):
        with ledger.account(f"name:{at}", 20.5) as account:
            assert account[0] == 20.0 + at
    with ledger.account("name:late", 20.5) as account:
        assert account[0] == 99.0
