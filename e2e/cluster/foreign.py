"""A cluster of the user's, named by KUBECONFIG: what it must provide, and a clear word where it does not.

    the API server answers          the images of STOKER_E2E_IMAGES can be pulled, or are on its nodes
    a StorageClass is the default   one pod of each image is let run under the restricted profile

Invariants: what is tried is in a namespace of its own, which is gone afterwards; nothing else is changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from e2e.cluster.binaries import Say, ensure, to_stderr
from e2e.cluster.images import Images
from e2e.cluster.processes import StartError

NAMESPACE = "stoker-e2e-check"
_PULL_SECONDS = 600.0
_REFUSED = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName")
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"


def kubeconfig() -> Path | None:
    """The file that KUBECONFIG names. Raises StartError when it names none or several."""
    given = os.environ.get("KUBECONFIG", "")
    if not given:
        return None
    if os.pathsep in given or not Path(given).is_file():
        raise StartError(f"KUBECONFIG={given} is not one file; make one: kubectl config view --flatten --minify > FILE")
    return Path(given)


def images() -> Images:
    """The images of STOKER_E2E_IMAGES. Raises StartError when it does not name three."""
    names = [name for name in os.environ.get("STOKER_E2E_IMAGES", "").split(",") if name]
    if len(names) != 3:
        raise StartError(
            "with KUBECONFIG, name three images that the cluster's nodes have or can pull: STOKER_E2E_IMAGES=OPERATOR,"
            "RUNTIME,HUB (built from images/*.Dockerfile and e2e/cluster/hub.Dockerfile; see e2e/README.md)"
        )
    operator, runtime, hub = names
    return Images(operator, runtime, hub, {})


def check(config: Path, named: Images, say: Say = to_stderr) -> None:
    """See whether the cluster can run the scenarios. Raises StartError that names what it lacks."""
    kubectl = [str(ensure(["kubectl"], say)["kubectl"]), f"--kubeconfig={config}"]
    _ask(kubectl, "get", "--raw", "/readyz", "--request-timeout=30s")
    classes = json.loads(_ask(kubectl, "get", "storageclasses", "-o", "json"))["items"]
    if not any((item["metadata"].get("annotations") or {}).get(_DEFAULT_CLASS) == "true" for item in classes):
        raise StartError("the cluster has no default StorageClass; models are kept on volumes of it")
    try:
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        place = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
        _ask(kubectl, "apply", "-f", "-", text=json.dumps(place))
        # A controller makes it, and no pod is admitted before.
        _ask(kubectl, "-n", NAMESPACE, "wait", "--for=create", "serviceaccount/default", "--timeout=60s")
        _ask(kubectl, "apply", "-f", "-", text=json.dumps(_pod(named.all)))
        _wait_pulled(kubectl, named.all)
    finally:
        _ask(kubectl, "delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s")


def refused(pod: dict[str, Any]) -> str:
    """The image of a pod that cannot be had, and why; empty when none is refused."""
    for status in pod.get("status", {}).get("containerStatuses", ()):
        waiting = status.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _REFUSED:
            return f"{status['image']} ({waiting.get('message') or waiting['reason']})"
    return ""


def pulled(pod: dict[str, Any]) -> int:
    """How many containers of a pod have their image."""
    return sum(bool(status.get("imageID")) for status in pod.get("status", {}).get("containerStatuses", ()))


def _wait_pulled(kubectl: list[str], names: list[str]) -> None:
    deadline = time.monotonic() + _PULL_SECONDS
    while True:
        pod = json.loads(_ask(kubectl, "-n", NAMESPACE, "get", "pod", "images", "-o", "json"))
        if pulled(pod) == len(names):
            return
        if problem := refused(pod):
            raise StartError(
                f"the cluster's nodes cannot have the image {problem}. Push it to a registry they reach and name it in "
                "STOKER_E2E_IMAGES, or load it into every node (ctr -n k8s.io images import, kind load, minikube load)"
            )
        if time.monotonic() > deadline:
            status = json.dumps(pod.get("status", {}).get("conditions", []))
            raise StartError(f"the images {', '.join(names)} are not on a node after {_PULL_SECONDS:.0f} s: {status}")
        time.sleep(1)


def _pod(names: list[str]) -> dict[str, Any]:
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    containers = [
        {"name": f"image-{number}", "image": name, "command": ["sleep", "1000"], "securityContext": security}
        for number, name in enumerate(names)
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "images", "namespace": NAMESPACE},
        "spec": {
            "containers": containers,
            "automountServiceAccountToken": False,
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": 65532,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        },
    }


def _ask(kubectl: list[str], *arguments: str, text: str | None = None) -> str:
    done = subprocess.run([*kubectl, *arguments], input=text, capture_output=True, text=True)
    if done.returncode:
        raise StartError(f"the cluster of KUBECONFIG: kubectl {' '.join(arguments)}: {done.stderr.strip()[-1000:]}")
    return done.stdout
