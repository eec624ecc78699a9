"""Scenario: an image of a registry with a model in it, which the node pulls and pods mount (cache.mode: Image)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import images
from e2e.cluster.backend import Given
from e2e.cluster.binaries import ensure
from e2e.cluster.layout import NODE_ADDRESS, Layout
from e2e.cluster.node import run as command
from e2e.registry.push import push
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube
from e2e.scenarios.newcomer.test_newcomer import registry

REPOSITORY = "models/smollm2"
SAID_SECONDS = 120


@dataclass(frozen=True)
class Pushed:
    """A registry with an image: its address for the node and for pods, and the image's digest."""

    address: str
    inside: str
    digest: str
    layout: Path


@pytest.fixture(scope="module")
def pushed(given: Given, installed: Kube) -> Iterator[Pushed]:
    """An image as docs/weights.md makes one, in a registry on this machine."""
    if given.node is None:
        pytest.skip("needs the node of this machine, which can pull from a registry on it")
    crane = str(ensure(["crane"])["crane"])
    Layout().cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=Layout().cache) as kept, registry(Path(kept) / "r", "") as address:
        layout = Path(kept) / "image"
        fetch = [sys.executable, "-m", "stoker_cli", "fetch", f"file://{images.model_file()}"]
        subprocess.run([*fetch, f"--dest={kept}/models", f"--image={layout}"], check=True, timeout=300)
        command([crane, "push", "--insecure", str(layout), f"{address}/{REPOSITORY}:v1"])
        digest = command([crane, "digest", "--insecure", f"{address}/{REPOSITORY}:v1"]).strip()
        yield Pushed(address, f"http://{NODE_ADDRESS}:{address.rpartition(':')[2]}", digest, layout)


def mounted(name: str, pushed: Pushed, tag: str = "v1", **model: Any) -> dict[str, Any]:
    """A service that mounts the image; its Job asks by the address that pods reach."""
    made = stoker.service(name)
    uri = f"oci://{pushed.address}/{REPOSITORY}:{tag}"
    made["spec"] |= {"model": {"uri": uri, "endpoint": pushed.inside, **model}, "cache": {"mode": "Image"}}
    return made


def volume(pod: Mapping[str, Any]) -> dict[str, Any]:
    return next(dict(item["image"]) for item in pod["spec"]["volumes"] if item["name"] == "models")


def test_pods_mount_the_image_and_keep_to_its_digest(place: Kube, pushed: Pushed) -> None:
    place.apply(mounted("mounted", pushed))
    stoker.wait_ready(place, "mounted")
    status = place.get("infsvc", "mounted")["status"]
    assert (status["model"]["digest"], status["cache"]["mode"]) == (pushed.digest, "Image")
    assert status["model"]["bytes"] == images.model_file().stat().st_size
    assert place.items("pvc") == [], "no volume was made"
    assert stoker.ask(stoker.url(place, "mounted"), "mounted", tokens=4)["usage"]["completion_tokens"] == 4
    (pod,) = stoker.engine_pods(place, "mounted")
    assert volume(pod)["reference"] == f"{pushed.address}/{REPOSITORY}@{pushed.digest}"
    name = pod["metadata"]["name"]
    written = ["python", "-c", "open('/models/x', 'w')"]
    refused = subprocess.run(
        [place.kubectl_path, f"--kubeconfig={place.kubeconfig}", f"--namespace={place.namespace}", "exec", name, "--",
         *written], capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "Read-only file system" in refused.stderr
    # The tag moves on; a pod that comes anew has what the others have.
    push(f"http://{pushed.address}", REPOSITORY, "v1", {"config.json": b"{}"})
    place.kubectl("delete", "pod", name)
    stoker.wait_ready(place, "mounted")
    (pod,) = stoker.engine_pods(place, "mounted")
    assert volume(pod)["reference"].endswith(pushed.digest)
    assert stoker.ask(stoker.url(place, "mounted"), "mounted")["usage"]["completion_tokens"] == 1


def test_what_cannot_be_pulled_or_mounted_is_said_and_heals(place: Kube, pushed: Pushed) -> None:
    push(f"http://{pushed.address}", REPOSITORY, "files", {"config.json": b"{}"})
    place.apply(mounted("refused", pushed, "files"))
    ready = stoker.wait_reason(place, "refused", "BadRequest", SAID_SECONDS)
    assert "is an artifact of files and no image" in ready["message"]
    # The Job reaches the registry, and nodes do not: nobody listens there.
    nowhere = Pushed("localhost:1", pushed.inside, pushed.digest, pushed.layout)
    crane = str(ensure(["crane"])["crane"])
    command([crane, "push", "--insecure", str(pushed.layout), f"{pushed.address}/{REPOSITORY}:v2"])
    place.apply(mounted("refused", nowhere, "v2"))
    ready = stoker.wait_reason(place, "refused", "ImagePullFailed", SAID_SECONDS)
    assert f"localhost:1/{REPOSITORY}@{pushed.digest}" in ready["message"]
    assert "spec.model.uri" in ready["message"]
    place.apply(mounted("refused", pushed, "v2"))
    stoker.wait_ready(place, "refused")
    assert stoker.ask(stoker.url(place, "refused"), "refused")["usage"]["completion_tokens"] == 1
