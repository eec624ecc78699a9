"""A registry of this machine that mirrors images of the node, and a volume that a file was carried to.

Invariants: a mirrored image has a label of its own, and so another content than the one it was made of: the kubelet
would ask for the credentials of that one, once it had pulled the same content from a registry.
Knows nothing of what the images and the file are.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from e2e.cluster.binaries import ensure
from e2e.cluster.layout import Layout
from e2e.cluster.node import Node
from e2e.cluster.node import run as command
from e2e.scenarios.kube import CommandFailed, Kube
from e2e.scenarios.newcomer.test_newcomer import registry


@contextmanager
def mirrored(node: Node, names: Sequence[str]) -> Iterator[str]:
    """Images, as a registry has them below what this yields."""
    crane = str(ensure(["crane"])["crane"])
    Layout().cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=Layout().cache) as kept, registry(Path(kept)) as address:
        there = f"{address}/mirror"
        for name in names:
            archive = Path(kept) / "image.tar"
            node.ctr("images", "export", "--platform=linux/amd64", str(archive), f"docker.io/{name}")
            command([crane, "push", "--insecure", str(archive), f"{there}/{name}"])
            archive.unlink()
            command([crane, "mutate", "--insecure", "--label=stoker.mirrored=true", f"--tag={there}/{name}",
                     f"{there}/{name}"])  # fmt: skip
        yield there


def carry(kube: Kube, image: str, file: Path, claim: str) -> None:
    """Make a volume and put a file onto it, by a pod that is gone then. Raises CommandFailed."""
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "carrier",
        "image": image,
        "command": ["python", "-c", "import signal; signal.pause()"],
        "securityContext": security,
        "volumeMounts": [{"name": "volume", "mountPath": "/volume"}],
    }
    pod: dict[str, Any] = {
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": claim}}],
    }  # fmt: skip
    size = f"{file.stat().st_size // 2**20 + 64}Mi"
    asked = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    kube.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": claim}, "spec": asked},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "carrier"}, "spec": pod},
    )
    kube.wait("condition=Ready", "pod/carrier")
    write = f"import shutil, sys; shutil.copyfileobj(sys.stdin.buffer, open('/volume/{file.name}', 'wb'))"
    words = [kube.kubectl_path, f"--namespace={kube.namespace}", "exec", "-i", "carrier", "--", "python", "-c", write]
    with file.open("rb") as stream:
        done = subprocess.run(words, stdin=stream, env=os.environ | {"KUBECONFIG": str(kube.kubeconfig)},
                              capture_output=True, text=True, timeout=300)  # fmt: skip
    if done.returncode:
        raise CommandFailed(f"the file was not carried: {done.stderr[-2000:]}")
    kube.kubectl("delete", "pod", "carrier", "--timeout=120s")
