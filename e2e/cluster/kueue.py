"""Kueue as its publisher has it: all of its manifests, put together by kubectl, and its manager as a pod.

Invariants: what is the publisher's comes out of its Go module and stays as it is, but for the image, which no registry
here serves: it is made of the manager alone and put on the node. `remove` takes all away.
Knows nothing of Stoker.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml
from e2e.cluster.binaries import ensure
from e2e.cluster.crds import definitions
from e2e.cluster.image_tar import write_image
from e2e.cluster.node import Node, run, succeeds
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

    def __init__(self, node: Node, kubeconfig: Path) -> None:
        self._node, self._kubeconfig = node, kubeconfig
        self._binaries = ensure([BINARY, "kubectl"])

    def install(self) -> None:
        """Return once the manager answers the API server. Raises StartError."""
        archive = self._node.layout.cache / f"{BINARY}.tar"
        write_image(archive, _IMAGE, {"User": "65532:65532"}, {"manager": self._binaries[BINARY]})
        self._node.import_image(archive)
        # To apply them, kubectl would write each into an annotation, which may not be as large.
        self._kubectl("create", "-f", "-", text=self._manifests())
        self._kubectl("-n", NAMESPACE, "rollout", "status", MANAGER, f"--timeout={_READY_SECONDS:.0f}s")
        deadline = time.monotonic() + _READY_SECONDS
        while not succeeds(self._command("create", "--dry-run=server", "-f", "-"), json.dumps(_QUESTION)):
            if time.monotonic() > deadline:
                raise StartError(f"Kueue's webhooks do not answer after {_READY_SECONDS:.0f} s")
            time.sleep(0.5)

    def remove(self) -> None:
        """Take away what `install` brought, however far it came. Raises StartError."""
        made = list(yaml.safe_load_all(self._manifests()))
        # First of all: nothing is written that the webhooks of nobody are to judge.
        made.sort(key=lambda item: not item["kind"].endswith("WebhookConfiguration"))
        listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": made})
        self._kubectl("delete", "-f", "-", "--ignore-not-found", "--timeout=120s", text=listed)

    def _manifests(self) -> str:
        (folder,) = definitions("kueue")
        made = list(yaml.safe_load_all(run([str(self._binaries["kubectl"]), "kustomize", str(folder)])))
        for item in made:
            if item["kind"] == "Deployment":
                (manager,) = item["spec"]["template"]["spec"]["containers"]
                manager |= {"image": _IMAGE, "imagePullPolicy": "Never"}
        return yaml.safe_dump_all(made)

    def _kubectl(self, *arguments: str, text: str | None = None) -> None:
        run(self._command(*arguments), text)

    def _command(self, *arguments: str) -> list[str]:
        return [str(self._binaries["kubectl"]), f"--kubeconfig={self._kubeconfig}", *arguments]
