"""What docker's builds get of this machine's pip."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e.cluster import docker


def test_settings_of_pips_files_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pip.conf"
    file.write_text("[global]\ncert = /etc/authorities.crt\nindex-url = https://index.example/simple\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    assert docker._pip_settings()["cert"] == "/etc/authorities.crt"
    assert docker._pip_settings()["index-url"] == "https://index.example/simple"
    assert docker._pip_settings().get("trusted-host", "") == ""
