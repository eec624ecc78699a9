"""API keys from flags and a file that changes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from stoker_runtime.api.http.keys import KeyRing
from stoker_runtime.errors import ConfigError


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 10
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_no_keys_means_open() -> None:
    assert KeyRing(()).allows({})
    assert not KeyRing(("a",)).allows({})


def test_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    file.write_text("# team\nsk-one\n\n sk-two \n")
    ring = KeyRing(("sk-flag",), str(file), Clock())
    assert all(ring.allows(bearer(key)) for key in ("sk-flag", "sk-one", "sk-two"))
    assert not any(ring.allows(bearer(key)) for key in ("# team", ""))
    file.write_text("sk-three\n")
    assert [ring.allows(bearer(key)) for key in ("sk-flag", "sk-one", "sk-three")] == [True, False, True]
    assert "read 1 API keys" in caplog.text
    assert "sk-" not in caplog.text


def test_a_link_that_is_swapped_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes renews a mounted secret."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"sk-{name}\n")
    link = tmp_path / "keys"
    link.symlink_to("a")
    ring = KeyRing((), str(link), Clock())
    assert ring.allows(bearer("sk-a"))
    (tmp_path / "new").symlink_to("b")
    (tmp_path / "new").replace(link)
    assert ring.allows(bearer("sk-b"))
    assert not ring.allows(bearer("sk-a"))


@pytest.mark.parametrize("change", ["remove", "empty"])
def test_a_file_that_cannot_be_used_leaves_the_old_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-one\n")
    ring = KeyRing((), str(file), Clock())
    if change == "remove":
        file.unlink()
    else:
        file.write_text("# nothing\n")
    assert ring.allows(bearer("sk-one"))
    assert not ring.allows(bearer(""))
    assert caplog.text.count("stay valid") == 1


def test_a_file_without_keys_is_no_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        KeyRing((), str(tmp_path / "keys"))


def test_what_is_wrong_with_the_file_is_known_without_a_request_and_until_it_is_mended(tmp_path: Path) -> None:
    """As where a Secret's key is emptied: the server goes on with what it knew, and says so on /ready."""
    file = tmp_path / "keys"
    file.write_text("sk-old\n")
    ring = KeyRing((), str(file), Clock())
    assert ring.problem() == ""
    file.write_text("")
    assert str(file) in ring.problem()
    assert "stay valid" in ring.problem()
    assert ring.allows(bearer("sk-old"))
    file.write_text("sk-newer-one\n")
    assert ring.problem() == ""
    assert KeyRing(("a",)).problem() == ""
