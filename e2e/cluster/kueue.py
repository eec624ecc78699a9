"""Kueue as its publisher has it: all of its manifests, put together by kubectl, and its manager as a pod.

Invariants: what is the publisher's comes out of its Go module and stays as it is, but for the image, which no registry
here serves: it is made of the manager alone and put on the node. `remove` takes all away.
Knows nothing of Stoker.
"""

from __future__ import annotations

import json
import time
from typing import Any

import yaml
from e2e.cluster.binaries import ensure
from e2e.cluster.crds import definitions
from e2e.cluster.image_tar import write_image
from e2e.cluster.keda import listed
from e2e.cluster.node import Node
from e2e.cluster.processes import StartError

CRD = ("crd", "clusterqueues.kueue.x-k8s.io")
BINARY, NAMESPACE, MANAGER = "kueue", "kueue-system", "deployment/kueue-controller-manager"
_IMAGE = "stoker.local/kueue:1"
_READY_SECONDS = 240.0
# What the manager judges itself, so that an answer shows that it is asked.
_QUESTION = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "ResourceFlavor", "metadata": {"name": "question"}}
Object = dict[str, Any]


class Publisher:
    """Brings Kueue to a node of this machine, and takes it away again.

    Making one builds the manager, which takes many minutes for the first time. Raises BuildError.
    """

    def __init__(self, node: Node) -> None:
        self._node, self._binary = node, ensure([BINARY])[BINARY]

    def install(self) -> None:
        """Return once the manager answers the API server. Raises StartError."""
        archive = self._node.layout.cache / f"{BINARY}.tar"
        write_image(archive, _IMAGE, {"User": "65532:65532"}, {"manager": self._binary})
        self._node.import_image(archive)
        # To apply them, kubectl would write each into an annotation, which may not be as large.
        self._node.kubectl("create", "-f", "-", text=listed(self._manifests()))
        self._node.kubectl("-n", NAMESPACE, "rollout", "status", MANAGER, f"--timeout={_READY_SECONDS:.0f}s")
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                self._node.kubectl("create", "--dry-run=server", "-f", "-", text=json.dumps(_QUESTION))
                return
            except StartError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.5)

    def remove(self) -> None:
        """Take away what `install` brought, however far it came. Raises StartError."""
        # First of all: nothing is written that the webhooks of nobody are to judge.
        made = sorted(self._manifests(), key=lambda item: not item["kind"].endswith("WebhookConfiguration"))
        self._node.kubectl("delete", "-f", "-", "--ignore-not-found", "--timeout=120s", text=listed(made))

    def _manifests(self) -> list[Object]:
        (folder,) = definitions("kueue")
        made: list[Object] = list(yaml.safe_load_all(self._node.kubectl("kustomize", str(folder))))
        for item in made:
            if item["kind"] == "Deployment":
                (manager,) = item["spec"]["template"]["spec"]["containers"]
                manager |= {"image": _IMAGE, "imagePullPolicy": "Never"}
        return made
