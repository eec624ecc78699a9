"""settings.py: flags over variables over defaults, and refusals that name the key."""

from __future__ import annotations

import pytest

from stoker_operator.settings import Settings, SettingsError, from_arguments


def test_a_flag_beats_a_variable_beats_the_default() -> None:
    environment = {"STOKER_WORKERS": "7", "STOKER_CACHE_SIZE": "9Gi", "STOKER_IDENTITY": "me"}
    chosen = from_arguments(["--workers", "8", "--namespaces", "a, b"], environment)
    assert (chosen.workers, chosen.cache_size, chosen.namespaces) == (8, "9Gi", ("a", "b"))
    assert chosen.resync_seconds == Settings().resync_seconds


def test_true_and_false() -> None:
    assert from_arguments(["--fixed-user=false"], {}).fixed_user is False
    assert from_arguments([], {"STOKER_FIXED_USER": "true"}).fixed_user is True


def test_all_namespaces_but_some_are_not_some() -> None:
    assert from_arguments(["--exclude-namespaces=a,b"], {}).exclude_namespaces == ("a", "b")
    with pytest.raises(SettingsError, match="exclude_namespaces"):
        from_arguments(["--exclude-namespaces=a", "--namespaces=b"], {})


def test_the_identity_is_never_empty() -> None:
    assert from_arguments([], {}).identity


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("workers", "many"),
        ("workers", "0"),
        ("lease-seconds", "1"),
        ("cache-size", "big"),
        ("log-level", "loud"),
        ("hub-endpoint", "hub.example"),
        ("runtime-image", ""),
        ("http-port", "70000"),
        ("without", "Pod"),
        ("fixed-user", "maybe"),
        ("metrics-adapter-mode", "Sometimes"),
        ("metrics-adapter-issuer", "me"),
        ("metrics-adapter-port", "6443"),
    ],
)
def test_a_bad_value_names_its_key(key: str, value: str) -> None:
    with pytest.raises(SettingsError, match=key.replace("-", "_")):
        from_arguments([f"--{key}={value}"], {})


def test_an_unknown_flag_stops_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        from_arguments(["--wrokers", "1"], {})
    assert caught.value.code == 2
    assert "--wrokers" in capsys.readouterr().err
