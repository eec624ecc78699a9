"""Scenario: docs/deploy.md as a newcomer types it, from images that are not built to an answer that streams.

Every `sh` block of the page is run, in order, in one shell. Three things are this machine's: builds are told its
network and base image, the registry's port may be another, and the hub is the one in the cluster, for which the page
names the value.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e.cluster import images
from e2e.cluster.apiserver import end, spawn
from e2e.cluster.backend import Given
from e2e.cluster.binaries import ensure
from e2e.cluster.docker import Docker
from e2e.cluster.layout import Layout
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "deploy.md"
WRITTEN = "localhost:5000"
# Images of their own: the kubelet would ask for the credentials of those that other scenarios imported, once it had
# pulled one of the same content from a registry.
OTHER = "--label=stoker.newcomer=true"


def blocks() -> list[str]:
    """The commands of the page."""
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def registry(folder: Path, listens: str = "127.0.0.1") -> Iterator[str]:
    """A registry on this machine that keeps nothing; its address for nodes. `listens` "" = for pods, too."""
    folder.mkdir(exist_ok=True)
    port = next(port for port in range(5000, 5100) if free(port))
    command = [str(ensure(["crane"])["crane"]), "registry", "serve", f"--address={listens}:{port}", f"--disk={folder}"]
    log = Layout().logs / "registry.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    process = spawn(command, log)
    try:
        eventually("the registry listens", lambda: not free(port), 30, every=0.1)
        yield f"localhost:{port}"
    finally:
        end(process)


def command(folder: Path, name: str, real: str, besides: Mapping[str, list[str]]) -> None:
    """Put `name` into a folder: what is called with all the words of a key is given that key's flags besides."""
    cases = "".join(
        f'if [[ " $* " == *{shlex.quote(key)}* ]]; then set -- "$@" {shlex.join(flags)}; fi\n'
        for key, flags in besides.items()
    )
    if name == "docker":  # flags come before the context
        cases = cases.replace('set -- "$@"', "shift; set -- build").replace("; fi", ' "$@"; fi')
    file = folder / name
    file.write_text(f'#!/bin/bash\n{cases}exec {shlex.quote(real)} "$@"\n')
    file.chmod(0o755)


@pytest.fixture
def demo(kube: Kube) -> Iterator[Kube]:
    with stoker.namespace(kube, "newcomer") as made:
        try:
            yield made
        finally:
            stoker.uninstall(kube)


def test_the_page_is_followed_to_a_streamed_answer(demo: Kube, given: Given, hub: stoker.Hub, tmp_path: Path) -> None:
    if given.node is None:
        pytest.skip("needs a node of this machine, which can pull from a registry on it")
    tools = tmp_path / "bin"
    tools.mkdir()
    config = tmp_path / "kubeconfig"
    config.write_bytes(demo.kubeconfig.read_bytes())
    config.chmod(0o600)
    docker = Docker()
    with tempfile.TemporaryDirectory(dir=Layout().cache) as kept, registry(Path(kept)) as address, docker.running():
        client, environment = docker.shell()
        flags = images.build_flags(docker, bool(given.images.lent))
        command(tools, "docker", client, {f"images/{name}": [*value, OTHER] for name, value in flags.items()})
        command(tools, "helm", demo.helm_path, {" install ": [f"--set=hub.endpoint={hub.endpoint}"]})
        command(tools, "kubectl", demo.kubectl_path, {})
        environment |= {"KUBECONFIG": str(config), "PATH": f"{tools}:{os.environ['PATH']}"}
        typed = "\n".join(blocks()).replace(WRITTEN, address)
        script = f"set -ex\nkubectl config set-context --current --namespace={demo.namespace}\n{typed}\n"
        script = f"trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{script}"
        done = subprocess.run(
            ["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600
        )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    check(done.stdout, done.stderr, address)
    assert demo.find("infsvc", "smollm2") is None
    eventually("nothing is left of the service", lambda: not demo.items("pods,jobs,deployments,services"), 120)


def check(output: str, typed: str, address: str) -> None:
    """The answer came word by word; the images came from the registry."""
    chunks = [json.loads(line[6:]) for line in output.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert "data: [DONE]" in output
    assert len(chunks) > 3, "the answer came in one piece"
    assert "Paris" in text, text
    assert re.search(r"^smollm2 +True +True +Serving ", output, re.MULTILINE), output
    for image in ("stoker-operator", "stoker-runtime"):
        assert f"docker push {address}/{image}" in typed
