"""A driver of devices for dynamic resource allocation: Kubernetes' own, as a process of this machine.

A device of it is an environment variable of the containers that claim it. Invariants: `stop` leaves no device on the
node. Knows nothing of Stoker.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from e2e.cluster.binaries import ensure
from e2e.cluster.layout import NODE_NAME
from e2e.cluster.node import Node, run, succeeds
from e2e.cluster.processes import StartError

BINARY, DRIVER, CLASS = "dra-test-driver", "test-driver.cdi.k8s.io", "stoker-e2e"
_READY_SECONDS = 60.0
Object = dict[str, Any]


class Driver:
    """Gives a node of this machine devices. Making one builds the driver. Raises BuildError."""

    def __init__(self, node: Node, kubeconfig: Path) -> None:
        self._node, self._kubeconfig = node, kubeconfig
        self._binaries = ensure([BINARY, "kubectl"])

    def start(self, count: int) -> None:
        """Return once the scheduler can give `count` devices away, by the class CLASS. Raises StartError."""
        layout = self._node.layout
        kubelet = layout.data / "kubelet"
        (kubelet / "plugins" / DRIVER).mkdir(parents=True, exist_ok=True)  # it makes the folder above alone
        command = [str(self._binaries[BINARY]), f"--kubeconfig={self._kubeconfig}", "kubelet-plugin"]
        command += [f"--node-name={NODE_NAME}", f"--num-devices={count}", f"--cdi-dir={layout.devices}"]
        command += [f"--plugin-registration-path={kubelet / 'plugins_registry'}", f"--datadir={kubelet / 'plugins'}"]
        run(self._kubectl("create", "-f", "-"), json.dumps(device_class()))
        self._node.processes.start(BINARY, command)
        published = self._kubectl("get", "resourceslices", "--field-selector", f"spec.driver={DRIVER}", "-o", "name")
        self._node.processes.wait(BINARY, lambda: bool(run(published).strip()), _READY_SECONDS)

    def stop(self) -> None:
        """End the driver and forget its devices. Raises StartError."""
        self._node.processes.stop(BINARY)
        for kind in (["resourceslices", "--field-selector", f"spec.driver={DRIVER}"], ["deviceclass", CLASS]):
            if not succeeds(self._kubectl("delete", *kind, "--ignore-not-found", "--timeout=60s")):
                raise StartError(f"{kind[0]} of {DRIVER} cannot be deleted")

    def _kubectl(self, *arguments: str) -> list[str]:
        return [str(self._binaries["kubectl"]), f"--kubeconfig={self._kubeconfig}", *arguments]


def device_class() -> Object:
    """All devices of the driver."""
    selector = {"cel": {"expression": f"device.driver == {json.dumps(DRIVER)}"}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": CLASS},
        "spec": {"selectors": [selector]},
    }
