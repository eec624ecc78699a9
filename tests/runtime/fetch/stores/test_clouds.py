"""The stand-ins for clouds that a scenario runs in a pod, as a process here: Google's service accounts, Azure's keys
and ModelScope's token, each wrong first and then right.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.scenarios.sources import clouds
from tests.runtime.fetch.test_cli import environment

MODEL = "tiny.gguf"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def keys() -> clouds.Keys:
    return clouds.Keys()


@pytest.fixture
def ports(keys: clouds.Keys, tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Where they listen. They see the sources that the scenario gives its pod, and no others."""
    for path in clouds.SOURCES:
        (tmp_path / "sources" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(clouds.ROOT / path, tmp_path / "sources" / path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / MODEL).write_bytes(b"GGUF" + os.urandom(300_000))
    found = free_port(), free_port()
    told = {"STORES": keys.told(f"http://localhost:{found[1]}"), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-B", "-m", "e2e.stores", str(tmp_path / "models"), "127.0.0.1", *map(str, found)]
    running = subprocess.Popen(command, env=told, cwd=tmp_path / "sources")
    try:
        for port in found:
            answers(running, port)
        yield found
    finally:
        running.kill()
        running.wait()


def answers(running: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + 60
    while running.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise AssertionError("the stand-ins do not answer")


@pytest.mark.parametrize("scheme", ["gs", "az", "modelscope"])
def test_a_wrong_key_is_refused_and_the_right_one_lets_in(
    keys: clouds.Keys, ports: tuple[int, int], tmp_path: Path, scheme: str
) -> None:
    others = clouds.Keys(azure=(keys.azure[0], clouds.Keys().azure[1]))
    source = clouds.uri_and_endpoint(scheme, keys, "127.0.0.1", ports)
    command = [sys.executable, "-m", "stoker_cli", "fetch", "--uri", source["uri"], "--dest", str(tmp_path / "got")]
    command += ["--endpoint", source["endpoint"]]

    def fetch(given: clouds.Keys) -> tuple[int, str]:
        variables, hidden = given.secret(scheme)
        if scheme == "modelscope":
            variables = {"MODELSCOPE_API_TOKEN": variables["token"]}
        done = subprocess.run(command, capture_output=True, text=True, env=environment(**variables), timeout=120)
        said = done.stdout + done.stderr
        assert not [secret for secret in hidden if secret in said]
        return done.returncode, said

    status, said = fetch(others)
    assert (status, clouds.REFUSED[scheme] in said) == (3, True), said
    status, said = fetch(keys)
    assert status == 0, said
    [got] = (tmp_path / "got").rglob(MODEL)
    assert got.read_bytes() == (tmp_path / "models" / MODEL).read_bytes()
