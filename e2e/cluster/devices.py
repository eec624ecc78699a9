"""A driver of devices for dynamic resource allocation: Kubernetes' own, as a process of this machine.

A device of it is an environment variable of the containers that claim it. Invariants: `stop` leaves no device on the
node. Knows nothing of Stoker.
"""

from __future__ import annotations

import json
from typing import Any

from e2e.cluster.binaries import ensure
from e2e.cluster.layout import NODE_NAME
from e2e.cluster.node import Node

BINARY, DRIVER, CLASS = "dra-test-driver", "test-driver.cdi.k8s.io", "stoker-e2e"
_PUBLISHED = ("resourceslices", "--field-selector", f"spec.driver={DRIVER}")
_READY_SECONDS = 60.0
Object = dict[str, Any]


class Driver:
    """Gives a node of this machine devices. Making one builds the driver. Raises BuildError."""

    def __init__(self, node: Node) -> None:
        self._node, self._binary = node, ensure([BINARY])[BINARY]

    def start(self, count: int) -> None:
        """Return once the scheduler can give `count` devices away, by the class CLASS. Raises StartError."""
        layout = self._node.layout
        kubelet = layout.data / "kubelet"
        (kubelet / "plugins" / DRIVER).mkdir(parents=True, exist_ok=True)  # it makes the folder above alone
        command = [str(self._binary), f"--kubeconfig={layout.kubeconfig()}", "kubelet-plugin"]
        command += [f"--node-name={NODE_NAME}", f"--num-devices={count}", f"--cdi-dir={layout.devices}"]
        command += [f"--plugin-registration-path={kubelet / 'plugins_registry'}", f"--datadir={kubelet / 'plugins'}"]
        self._node.kubectl("create", "-f", "-", text=json.dumps(device_class()))
        self._node.processes.start(BINARY, command)
        published = ("get", *_PUBLISHED, "-o", "name")
        self._node.processes.wait(BINARY, lambda: bool(self._node.kubectl(*published).strip()), _READY_SECONDS)

    def stop(self) -> None:
        """End the driver and forget its devices. Raises StartError."""
        self._node.processes.stop(BINARY)
        for found in (_PUBLISHED, ("deviceclass", CLASS)):
            self._node.kubectl("delete", *found, "--ignore-not-found", "--timeout=60s")


def device_class() -> Object:
    """All devices of the driver."""
    selector = {"cel": {"expression": f"device.driver == {json.dumps(DRIVER)}"}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": CLASS},
        "spec": {"selectors": [selector]},
    }
