"""API keys from flags and a file that changes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from stoker_runtime.api.http.keys import Allowance, KeyRing
from stoker_runtime.errors import AuthenticationError, CapacityError, ConfigError


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 10
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def allows(ring: KeyRing, headers: dict[str, str]) -> bool:
    try:
        ring.owner(headers)
    except AuthenticationError:
        return False
    return True


def test_no_keys_means_open() -> None:
    assert allows(KeyRing(()), {})
    assert not allows(KeyRing(("a",)), {})


def test_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "keys"
    file.write_text("# team\nsk-one\n\n sk-two \n")
    ring = KeyRing(("sk-flag",), str(file), Clock())
    assert all(allows(ring, bearer(key)) for key in ("sk-flag", "sk-one", "sk-two"))
    assert not any(allows(ring, bearer(key)) for key in ("# team", ""))
    file.write_text("sk-three\n")
    assert [allows(ring, bearer(key)) for key in ("sk-flag", "sk-one", "sk-three")] == [True, False, True]
    assert "read 1 API keys" in caplog.text
    assert "sk-" not in caplog.text


def test_a_link_that_is_swapped_is_a_change(tmp_path: Path) -> None:
    """As Kubernetes renews a mounted secret."""
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"sk-{name}\n")
    link = tmp_path / "keys"
    link.symlink_to("a")
    ring = KeyRing((), str(link), Clock())
    assert allows(ring, bearer("sk-a"))
    (tmp_path / "new").symlink_to("b")
    (tmp_path / "new").replace(link)
    assert allows(ring, bearer("sk-b"))
    assert not allows(ring, bearer("sk-a"))


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
    assert allows(ring, bearer("sk-one"))
    assert not allows(ring, bearer(""))
    assert caplog.text.count("stay valid") == 1


def test_a_file_without_keys_is_no_start(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        KeyRing((), str(tmp_path / "keys"))


def test_names_own(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-old name=team-q\nsk-new name=team-q\nsk-other name=team-r\nsk-plain\n")
    ring = KeyRing(("sk-flag",), str(file), Clock())
    owners = {key: ring.owner(bearer(key)) for key in ("sk-old", "sk-new", "sk-other", "sk-plain", "sk-flag")}
    assert owners["sk-old"] == owners["sk-new"] == "name:team-q"
    assert len(set(owners.values())) == 4
    assert all("sk-" not in owner for owner in owners.values())
    assert KeyRing(("sk-plain",)).owner(bearer("sk-plain")) == owners["sk-plain"], "whichever way a key is given"
    assert KeyRing(()).owner({}) == ""


@pytest.mark.parametrize(
    ("written", "ends"),
    [("2031-03-04", 1930348800.0), ("2031-03-04T05:06:07Z", 1930367167.0), ("2031-03-04T05:06:07+02:00", 1930359967.0)],
)
def test_keys_expire(tmp_path: Path, written: str, ends: float) -> None:
    file = tmp_path / "keys"
    file.write_text(f"sk-one expires={written}\nsk-two\n")
    now = ends - 1
    ring = KeyRing((), str(file), Clock(), lambda: now)
    assert allows(ring, bearer("sk-one"))
    now = ends
    with pytest.raises(AuthenticationError, match="has expired") as caught:
        ring.owner(bearer("sk-one"))
    assert caught.value.code == "expired_api_key"
    assert allows(ring, bearer("sk-two"))


def test_quota_of_a_name(tmp_path: Path) -> None:
    """It is the name's, so a second key is no second quota; it begins anew with its period."""
    file = tmp_path / "keys"
    file.write_text("sk-a name=q quota=5/m\nsk-b name=q quota=5/m\nsk-c\n")
    now = 1000.0
    ring = KeyRing((), str(file), lambda: now)
    for key in ("sk-a", "sk-b", "sk-a", "sk-a", "sk-b"):
        assert ring.spend(bearer(key)) == "name:q"
        now += 7
    with pytest.raises(CapacityError, match="5 requests in 60 seconds") as caught:
        ring.spend(bearer("sk-b"))
    assert (caught.value.status, caught.value.code, caught.value.retry_after) == (429, "quota_exceeded", 25.0)
    assert ring.owner(bearer("sk-a")) == "name:q", "looking costs nothing"
    assert ring.spend(bearer("sk-c"))
    now = 1060.0
    assert ring.spend(bearer("sk-a")) == "name:q"


def test_processes_share_a_quota(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a quota=7/h\n")
    rings = [KeyRing((), str(file), processes=3) for _ in range(3)]
    allowed = 0
    for ring in rings:
        for _ in range(7):
            try:
                ring.spend(bearer("sk-a"))
                allowed += 1
            except CapacityError:
                break
    assert allowed == 9, "each rounds its part up"


def test_allowances_are_the_names_and_change_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-a name=q rpm=7\nsk-b name=q rpm=7\nsk-c tpm=0\n")
    ring = KeyRing(("sk-flag",), str(file), Clock())
    owners = {key: ring.owner(bearer(key)) for key in ("sk-b", "sk-c", "sk-flag")}
    assert [ring.allowance(owner) for owner in owners.values()] == [Allowance(7, None), Allowance(None, 0), Allowance()]
    assert ring.allowance("") == Allowance()
    file.write_text("sk-b name=q tpm=31\n")
    assert ring.allowance("name:q") == Allowance(None, 31)
    assert ring.allowance(owners["sk-c"]) == Allowance(), "its key is gone"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("sk-secret nam=x", "Did you mean name="),
        ("sk-secret name=", "each once"),
        ("sk-secret name=a name=b", "each once"),
        ("sk-secret words", "behind a key may stand"),
        ("sk-secret expires=soon", "must be a date"),
        ("sk-secret quota=0/h", "requests a minute, hour or day"),
        ("sk-secret quota=5/w", "requests a minute, hour or day"),
        ("sk-secret\nsk-secret name=x", "stands there twice"),
        ("sk-secret rpm=-3", "rpm is '-3'; it must be a number of requests a minute"),
        ("sk-secret tpm=9k", "number of tokens a minute"),
        ("sk-secret name=q tpm=90\nsk-secret-2 name=q", "write the same at each"),
    ],
)
def test_lines_that_cannot_be_read(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "keys").write_text(f"# keys\n{line}\n")
    with pytest.raises(ConfigError, match=says) as caught:
        KeyRing((), str(tmp_path / "keys"))
    assert "sk-secret" not in caught.value.message
    assert f"line {1 + len(line.splitlines())}" in caught.value.message


def test_what_is_wrong_with_the_file_is_known_without_a_request_and_until_it_is_mended(tmp_path: Path) -> None:
    """As where a Secret's key is emptied: the server goes on with what it knew, and says so on /ready."""
    file = tmp_path / "keys"
    file.write_text("sk-old\n")
    ring = KeyRing((), str(file), Clock())
    assert ring.problem() == ""
    file.write_text("")
    assert str(file) in ring.problem()
    assert "stay valid" in ring.problem()
    assert allows(ring, bearer("sk-old"))
    file.write_text("sk-newer-one\n")
    assert ring.problem() == ""
    assert KeyRing(("a",)).problem() == ""
