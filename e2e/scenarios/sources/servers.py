"""A real object store and a real registry in the cluster: versitygw, which speaks S3, and crane's registry.

Each is a static binary in an image of its own, imported into the node. Weights get there by the protocols themselves.

Invariants: what runs is what Go built from the pinned modules; pods are restricted, like everything else.
Knows nothing of services.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.binaries import ensure
from e2e.cluster.image_tar import write_image
from e2e.cluster.node import Node
from e2e.scenarios.kube import Kube
from obstore.store import S3Store


@contextmanager
def server(
    kube: Kube, node: Node, name: str, command: list[str], port: int, folders: Sequence[str] = ()
) -> Iterator[str]:
    """Run a binary as a Deployment behind a Service, with empty `folders`; yields the address for this machine and for
    pods.
    """
    binary, *arguments = command
    image = f"docker.io/stoker/e2e-{name}:1"
    archive = node.layout.cache / f"{name}.tar"
    path = ensure([binary])[binary]
    write_image(archive, image, {"Entrypoint": [f"/{binary}"], "WorkingDir": "/tmp"}, {f"/{binary}": path})
    node.import_image(archive)
    archive.unlink()
    labels = {"app": name}
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "args": arguments,
        "securityContext": security,
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1},
        "volumeMounts": [{"name": f"v{at}", "mountPath": folder} for at, folder in enumerate(folders)],
    }
    pod = {
        "securityContext": {
            "runAsNonRoot": True, "runAsUser": 65532, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"},
        },
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": f"v{at}", "emptyDir": {"sizeLimit": "1Gi"}} for at, _ in enumerate(folders)],
    }  # fmt: skip
    head = {"metadata": {"name": name, "labels": labels}}
    template = {"metadata": {"labels": labels}, "spec": pod}
    spec = {"selector": {"matchLabels": labels}, "template": template}
    ports = [{"port": port}]
    kube.apply(
        {"apiVersion": "apps/v1", "kind": "Deployment", "spec": spec} | head,
        {"apiVersion": "v1", "kind": "Service", "spec": {"selector": labels, "ports": ports}} | head,
    )
    kube.kubectl("rollout", "status", f"deployment/{name}", "--timeout=120s")
    kube.wait_reached(name)
    yield kube.address(name)


def fill_bucket(endpoint: str, keys: tuple[str, str], bucket: str, files: Mapping[str, Path]) -> None:
    """Upload files to a bucket, by the object store's own protocol."""
    access, secret = keys
    store = S3Store(
        bucket, endpoint=endpoint, region="us-east-1", access_key_id=access, secret_access_key=secret,
        client_options={"allow_http": True},
    )  # fmt: skip
    for name, path in files.items():
        store.put(name, path)
