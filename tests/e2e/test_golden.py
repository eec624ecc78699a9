"""e2e/scenarios/golden.py: what differs between runs is no difference; what a user would notice is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from e2e.scenarios import golden

ROOT = Path(golden.__file__).resolve().parents[2]
FIRST = """NAME      READY   REV       CACHE   AGE
smollm2   True    4111a16   100%    16s
Message: pod smollm2-8678f9bdf7-mnpqx of revision 8678f9bdf7 waits
"""


def test_hashes_and_ages_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_UPDATE_GOLDEN", "1")
    golden.check(tmp_path / "text", FIRST)
    monkeypatch.delenv("STOKER_UPDATE_GOLDEN")
    other = FIRST.replace("8678f9bdf7", "75b474d976").replace("mnpqx", "abcde").replace("16s", "2m3s")
    golden.check(tmp_path / "text", other.replace("4111a16", "c0ffee1"))
    with pytest.raises(AssertionError, match="False"):
        golden.check(tmp_path / "text", FIRST.replace("True", "False"))


def test_the_readmes_terminal_session_is_the_one_that_is_run() -> None:
    """The README has its beginning, every command and its output but for ages and hashes: the scenario `install` fails
    when they change.
    """
    [session] = re.findall(r"^```console\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    kept = ROOT / "e2e" / "scenarios" / "install" / "golden" / "session.txt"
    shown = golden.normalized(session)
    assert shown.count("$ ") >= 3
    assert kept.read_text().startswith(shown)
