"""Commands of the system are found where only root's PATH leads, and what cannot be had is named."""

from __future__ import annotations

import os
import shutil

import pytest
from e2e.cluster import debian


def test_roots_folders_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    debian.ensure_commands(["mount"], lambda text: None)
    assert os.environ["PATH"].split(":")[:2] == ["/usr/bin", "/bin"]
    assert "/usr/sbin" in os.environ["PATH"].split(":")
    before = os.environ["PATH"]
    debian.ensure_commands(["mount"], lambda text: None)
    assert os.environ["PATH"] == before


def test_a_command_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(debian.MissingCommand, match="apt-get install nftables runc"):
        debian.ensure_commands(["runc", "nft"], lambda text: None)
