"""What nodes must have alike, how a secret is read, and where nodes listen."""

from __future__ import annotations

import dataclasses
import json
import random
import secrets
import shutil
import socket
from pathlib import Path

import pytest

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.nodes import SECRET_VARIABLE, NodeSettings
from stoker_runtime.ranks.nodes.network import interface_of, listen
from stoker_runtime.ranks.nodes.secret import read_secret
from stoker_runtime.ranks.nodes.terms import OWN, difference, fingerprint, terms_of


def model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"hidden_size": random.randrange(1000)}))
    for at in range(2):
        (folder / f"model-{at}.safetensors").write_bytes(bytes(random.randrange(1, 5000)))
    (folder / "README.md").write_text("of no account")
    return folder


def test_a_model_is_the_same_wherever_it_lies_and_another_with_other_files(tmp_path: Path) -> None:
    first = model(tmp_path / "a")
    found = fingerprint(str(first))
    other = tmp_path / "elsewhere"
    shutil.copytree(first, other)
    (other / "README.md").write_text("another one")
    assert fingerprint(str(other)) == found
    with (other / "model-1.safetensors").open("ab") as file:
        file.write(b"x")
    assert fingerprint(str(other)) != found
    shutil.copy(first / "model-1.safetensors", other)
    assert fingerprint(str(other)) == found
    (other / "config.json").write_text("{}")
    assert fingerprint(str(other)) != found
    assert fingerprint(f"shape:{first}") == found
    assert fingerprint("shape:tiny") == "shape:tiny"
    (tmp_path / "one.gguf").write_bytes(b"abc")
    assert fingerprint(str(tmp_path / "one.gguf")).startswith("3 bytes")


def test_every_setting_is_compared_but_for_those_of_a_node() -> None:
    config = EngineConfig("shape:tiny")
    mine = terms_of(config)
    assert difference(mine, dict(mine)) == ""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name == "model" or isinstance(value, tuple):
            continue
        changed = not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else "other"
        theirs = terms_of(dataclasses.replace(config, **{field.name: changed}))
        found = difference(mine, theirs)
        assert (f"--{field.name.replace('_', '-')}" in found) is (field.name not in OWN), field.name


def test_a_secret_comes_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known, filed = secrets.token_hex(16), secrets.token_hex(16)
    file = tmp_path / "secret"
    file.write_text(f"{filed}\n")
    settings = NodeSettings(nnodes=2, master_addr="there")
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"set {SECRET_VARIABLE}, or give --node-secret-file"):
        read_secret(settings)
    monkeypatch.setenv(SECRET_VARIABLE, known)
    assert read_secret(settings) == known.encode()
    assert read_secret(dataclasses.replace(settings, node_secret_file=str(file))) == filed.encode()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(dataclasses.replace(settings, node_secret_file=str(tmp_path / "none")))
    monkeypatch.setenv(SECRET_VARIABLE, known[:15])
    with pytest.raises(ConfigError, match="at least 16") as error:
        read_secret(settings)
    assert known[:15] not in error.value.message
    with pytest.raises(ConfigError, match="master_addr is needed"):
        read_secret(NodeSettings(nnodes=2))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"nnodes": 0}, "nnodes is 0"),
        ({"nnodes": 3, "tensor_parallel_size": 4}, "does not divide the 4 ranks"),
        ({"nnodes": 2, "node_rank": 2, "tensor_parallel_size": 2}, "node_rank is 2 of 2"),
        ({"node_rank": 1}, "node_rank is 1 of 1"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "master_port": 70_000}, "master_port is 70000"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "data_parallel_size": 2}, "several engines are on one machine"),
        ({"nnodes": 2, "tensor_parallel_size": 2, "node_join_seconds": 0}, "node_join_seconds is 0"),
    ],
)
def test_what_cannot_be_spread_is_refused(settings: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineConfig("m", **settings).validate()


def test_a_leader_listens_where_it_is_said_and_a_port_that_is_taken_is_named() -> None:
    with listen("127.0.0.1", 0) as here:
        port = here.getsockname()[1]
        assert here.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            listen("127.0.0.1", port)
        with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
            listen("192.0.2.1", 0)
    with listen("a-name", 0) as everywhere, socket.create_connection(("127.0.0.1", everywhere.getsockname()[1])):
        pass


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("127.9.8.7") == interface_of("::ffff:127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has the loopback alone")
        own = asking.getsockname()[0]
    assert interface_of(own) in {name for _, name in socket.if_nameindex()} - {"lo"}
    assert interface_of(f"::ffff:{own}") == interface_of(own)
