"""Scenario: a release whose operator runs on two kinds of processors, published to a registry and found there.

The image for linux/arm64 is built and run by an emulator in this machine's kernel. The others are those that all
scenarios run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import images
from e2e.cluster.backend import Given
from e2e.cluster.binaries import Say, ensure
from e2e.cluster.docker import Docker
from e2e.cluster.emulator import MACHINE, emulated
from e2e.cluster.layout import Layout
from e2e.scenarios.newcomer.test_newcomer import registry

# What an ELF file's header calls the processors.
PROCESSORS = {"amd64": 62, "arm64": 183}
PYTHON = "/opt/stoker/bin/python"


def processor(root: Path) -> int:
    """The processor of the Python in an image's files."""
    with tarfile.open(root) as files:
        (program, *_) = [
            each for each in files if each.isfile() and Path(each.name).name.startswith("python3.") and each.mode & 1
        ]
        opened = files.extractfile(program)
        assert opened is not None
        return int.from_bytes(opened.read(20)[18:], "little")


def test_the_operator_is_published_for_two_kinds_of_processors(given: Given, tmp_path: Path, say: Say) -> None:
    docker = Docker()
    if given.node is None or os.geteuid() != 0 or docker.there():
        pytest.skip("needs a node on this machine, without a Docker of its own, and an emulator in its kernel")
    archives, crane = tmp_path / "archives", str(ensure(["crane"])["crane"])
    archives.mkdir()
    with docker.running():
        docker.save([given.images.operator], archives / "operator-amd64.tar")
        docker.save([given.images.runtime], archives / "runtime.tar")
    layout = Layout()
    other = Docker(replace(layout, docker_run=Path("/run/stoker-arm"), cache=layout.cache / "arm"))
    began = time.monotonic()
    with emulated(say), other.running():
        images.ensure_base(other, "arm64")
        name = images.build_operator(other, "arm64")
        say(f"the operator for arm64 was built in {time.monotonic() - began:.0f} s by an emulator")
        machine = other.try_container(name, "-c", "import platform; print(platform.machine())", entrypoint=PYTHON)
        assert machine.strip() == MACHINE
        assert images.version() in other.try_container(name, "--version")
        assert "--lease-seconds" in other.try_container(name, "operator", "--help"), "all that it imports is there"
        other.save([name], archives / "operator-arm64.tar")

    with registry(tmp_path / "registry") as address:

        def asked(*words: str) -> str:
            return subprocess.run([crane, *words, "--insecure"], capture_output=True, text=True, check=True).stdout

        flags = [f"--registry={address}/acme", "--plain-http", f"--archives={archives}"]
        done = subprocess.run(
            [sys.executable, "-m", "images.release", *flags], cwd=images.ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"helm install stoker oci://{address}/acme/charts/stoker ")
        operator = f"{address}/acme/operator"
        index: dict[str, Any] = json.loads(asked("manifest", f"{operator}:{images.version()}"))
        singles = {each["platform"]["architecture"]: each["digest"] for each in index["manifests"]}
        assert set(singles) == set(PROCESSORS)
        for architecture, digest in singles.items():
            root = tmp_path / f"{architecture}.tar"
            asked("export", f"--platform=linux/{architecture}", f"{operator}:{images.version()}", str(root))
            assert processor(root) == PROCESSORS[architecture]
            about = json.loads(asked("manifest", f"{operator}:{digest.replace(':', '-')}.sbom"))
            parts = json.loads(asked("blob", f"{operator}@{about['layers'][0]['digest']}"))["components"]
            said = [part["purl"] for part in parts]
            assert any(purl.startswith("pkg:pypi/kopf@") for purl in said)
            assert any(purl.startswith("pkg:deb/debian/") for purl in said)
