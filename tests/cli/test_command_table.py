"""The `stoker` command: its table, its version, and how it ends."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType

import pytest

import stoker_cli


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker_cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in stoker_cli.COMMANDS)


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert stoker_cli.main(["srve"]) == 2
    assert "unknown command 'srve'; did you mean 'serve'?" in capsys.readouterr().err


def test_a_source_tree_has_a_version_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert stoker_cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "stoker 0+source, not installed\n"


def command(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """Put a subcommand `broken` into the table that raises `error`."""
    module = ModuleType("broken_command")

    def run(arguments: list[str]) -> int:
        raise error

    module.main = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "broken_command", module)
    monkeypatch.setitem(stoker_cli.COMMANDS, "broken", stoker_cli.Command("broken_command:main", "runtime", "breaks"))


def test_ctrl_c_is_a_status_and_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, KeyboardInterrupt())
    assert stoker_cli.main(["broken"]) == 130


def test_a_missing_package_names_the_extra(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, ModuleNotFoundError("No module named 'uvloop'", name="uvloop"))
    assert stoker_cli.main(["broken"]) == 1
    assert "'uvloop' is missing; install it with: pip install 'stoker[runtime]'" in capsys.readouterr().err
