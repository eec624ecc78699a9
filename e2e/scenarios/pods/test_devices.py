"""GPUs by claim: each pod has a device of its own, given by a real driver and a real kubelet."""

from __future__ import annotations

from collections.abc import Callable

from e2e.cluster.devices import CLASS
from e2e.scenarios import stoker
from e2e.scenarios.kube import Kube, eventually
from e2e.scenarios.streams import streaming

DEVICES = 2
ENVIRONMENT = "import os; print([name for name in os.environ if name.startswith('claim_')])"


def devices(kube: Kube) -> list[str]:
    """The devices that claims were given."""
    found = [claim.get("status", {}).get("allocation") for claim in kube.items("resourceclaims")]
    return sorted(each["device"] for given in found if given for each in given["devices"]["results"])


def refused(kube: Kube) -> str:
    """Why a pod found no device, once the scheduler has looked for one."""
    said = str(stoker.wait_reason(kube, "model", "Unschedulable")["message"])
    return said if "allocate" in said else ""


def test_each_pod_has_a_device_of_its_own(place: Kube, hub: stoker.Hub, give_devices: Callable[[int], None]) -> None:
    one = {"name": "gpu", "exactly": {"deviceClassName": CLASS}}
    template = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": {"name": "one-gpu"}}
    manifest = stoker.service("model", replicas=DEVICES + 1)
    del manifest["spec"]["resources"]["gpus"]
    manifest["spec"]["resources"]["claims"] = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]

    # First what is missing is said, a thing at a time.
    place.apply(manifest)
    said = stoker.wait_reason(place, "model", "Unschedulable")["message"]
    assert "one-gpu" in said, said
    place.apply(template | {"spec": {"spec": {"devices": {"requests": [one]}}}})
    give_devices(DEVICES)
    eventually("all devices are given", lambda: len(devices(place)) == DEVICES, 240)
    assert len(set(devices(place))) == DEVICES
    said = eventually("who got none is told so", lambda: refused(place), 120)
    assert "resources.claims" in said, said
    place.kubectl("scale", "infsvc/model", f"--replicas={DEVICES}")
    stoker.wait_ready(place, "model")
    for pod in stoker.engine_pods(place, "model"):
        assert "claim_" in place.run_in(pod["metadata"]["name"], ENVIRONMENT)

    # No device is free for a pod more, so a rollout goes in place.
    with streaming(stoker.url(place, "model"), "model", clients=4) as streams:
        streams.wait_running(4)
        place.merge("infsvc", "model", {"spec": {"runtime": {"args": ["--log-level", "warning"]}}})
        stoker.wait_ready(place, "model", 400)
    assert place.get("deployment", "model")["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
    place.kubectl("delete", "infsvc", "model", "--timeout=180s")
    eventually("no claim is left", lambda: not place.items("resourceclaims"), 120)
