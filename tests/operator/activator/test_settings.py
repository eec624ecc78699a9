"""settings.py: flags and variables of the activator, and what is refused."""

from __future__ import annotations

import pytest

from stoker_operator.activator.main import main
from stoker_operator.activator.settings import from_arguments
from stoker_operator.settings import SettingsError


def test_flags_win_over_variables() -> None:
    chosen = from_arguments(["--namespaces=a, b", "--held-mib=99"], {"STOKER_HELD_MIB": "70", "STOKER_HTTP_PORT": "81"})
    assert (chosen.namespaces, chosen.held_mib, chosen.http_port) == (("a", "b"), 99, 81)


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--held-mib=63", "held_mib is 63; it must be between 64"),
        ("--body-mib=0", "body_mib is 0"),
        ("--heartbeat-seconds=0", "heartbeat_seconds is 0"),
        ("--log-level=loud", "log_level is 'loud'"),
    ],
)
def test_a_bad_value_is_named(argument: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SettingsError, match=words):
        from_arguments([argument], {})
    assert main([argument]) == 2
    assert words in capsys.readouterr().err
