"""keys.py: the keys of a file that somebody else brings up to date."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker_operator.gateway.keys import Keys, KeysError


def test_keys_are_those_of_the_file_as_it_is_now(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    keys = Keys(str(file))
    with pytest.raises(KeysError, match=str(file)):
        keys.read()
    file.write_text("# of the team\nsk-a\n\n  sk-b \nsk-a\n")
    assert keys.read() == ("sk-a", "sk-b")
    file.unlink()
    assert keys.read() == ("sk-a", "sk-b")
    file.write_text("# nobody\n")
    assert keys.read() == ()
