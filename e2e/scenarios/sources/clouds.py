"""Stand-ins for Google's and Azure's stores and for ModelScope in a pod of the hub's image, and keys for them.

Their sources (`e2e/stores`, `e2e/modelscope`) come by a ConfigMap, and who may ask by a Secret of another namespace
than the services'.

Invariants: each run has keys of its own; whoever is not let in gets nothing.
Knows nothing of services.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from e2e.scenarios.kube import Kube

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [f"e2e/stores/{name}.py" for name in ("__main__", "server", "signatures")] + ["e2e/modelscope/server.py"]
BUCKET, PREFIX = "weights", "team/smollm2"
PORT, OTHER_PORT = 9000, 9001
# What a fetch with another key ends with: ModelScope says of a private repository that there is none.
REFUSED = {"gs": "TokenRejected", "az": "TokenRejected", "modelscope": "ModelNotFound"}


@dataclass(frozen=True)
class ServiceAccount:
    """One of Google's: its address, and the key that it signs with."""

    address: str = field(default_factory=lambda: f"reader-{secrets.token_hex(3)}@models.iam.gserviceaccount.com")
    key: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))

    @property
    def pem(self) -> str:
        """The private key."""
        form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        return self.key.private_bytes(*form).decode()

    @property
    def document(self) -> str:
        """What Google's console gives for it."""
        about = {"type": "service_account", "private_key_id": "1", "client_email": self.address}
        return json.dumps({**about, "private_key": self.pem})


def _account() -> tuple[str, str]:
    return f"acct{secrets.token_hex(3)}", base64.b64encode(secrets.token_bytes(64)).decode()


@dataclass(frozen=True)
class Keys:
    """What opens the stand-ins; another one of these opens nothing."""

    google: ServiceAccount = field(default_factory=ServiceAccount)
    azure: tuple[str, str] = field(default_factory=_account)
    modelscope: str = field(default_factory=lambda: secrets.token_urlsafe(24))

    def secret(self, scheme: str) -> tuple[dict[str, str], list[str]]:
        """(what a Secret holds for a scheme, the parts of it that nobody may read)."""
        if scheme == "gs":
            lines = [line for line in self.google.pem.splitlines()[1:-1] if len(line) > 40]
            return {"GOOGLE_SERVICE_ACCOUNT_KEY": self.google.document}, lines
        if scheme == "az":
            name, key = self.azure
            return {"AZURE_STORAGE_ACCOUNT_NAME": name, "AZURE_STORAGE_ACCOUNT_KEY": key}, [key]
        return {"token": self.modelscope}, [self.modelscope]

    def told(self, storage: str) -> str:
        """What the stand-ins are told of them. `storage`: another name of the server of ModelScope."""
        public = self.google.key.public_key().public_numbers()
        # As text: what reads JSON may have no integers of this size.
        signers = {self.google.address: [str(public.n), str(public.e)]}
        place = {"bucket": BUCKET, "prefix": PREFIX, "storage": storage}
        return json.dumps({**place, "signers": signers, "account": self.azure, "token": self.modelscope})


def uri_and_endpoint(scheme: str, keys: Keys, host: str, ports: tuple[int, int] = (PORT, OTHER_PORT)) -> dict[str, str]:
    """Where a model lies, as spec.model has it."""
    if scheme == "modelscope":
        return {"uri": f"modelscope://{PREFIX}", "endpoint": f"http://{host}:{ports[1]}"}
    path = f"/{keys.azure[0]}" if scheme == "az" else ""
    return {"uri": f"{scheme}://{BUCKET}/{PREFIX}", "endpoint": f"http://{host}:{ports[0]}{path}"}


@contextmanager
def running(kube: Kube, image: str, keys: Keys) -> Iterator[str]:
    """The stand-ins as a Deployment and a Service over the image's /models; yields their host for pods."""
    name, inside = "clouds", f"clouds.{kube.namespace}.svc"
    labels = {"app": name}
    files = {path: f"source-{at}" for at, path in enumerate(SOURCES)}
    sources = {key: (ROOT / path).read_text() for path, key in files.items()}
    items = [{"key": key, "path": path} for path, key in files.items()]
    reference = {"secretKeyRef": {"name": name, "key": "stores"}}
    container = {
        "name": name,
        "image": image,
        "workingDir": "/sources",
        "command": ["python", "-B", "-m", "e2e.stores", "/models", "0.0.0.0", str(PORT), str(OTHER_PORT)],
        "env": [{"name": "STORES", "valueFrom": reference}],
        "securityContext": {
            "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
        },
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": [{"name": "sources", "mountPath": "/sources", "readOnly": True}],
    }  # fmt: skip
    pod = {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "sources", "configMap": {"name": name, "items": items}}],
    }
    head = {"metadata": {"name": name, "labels": labels}}
    spec = {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": pod}}
    ports = [{"name": f"p{port}", "port": port} for port in (PORT, OTHER_PORT)]
    told = keys.told(f"http://{inside}:{OTHER_PORT}")
    kube.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "data": sources} | head,
        {"apiVersion": "v1", "kind": "Secret", "stringData": {"stores": told}} | head,
        {"apiVersion": "apps/v1", "kind": "Deployment", "spec": spec} | head,
        {"apiVersion": "v1", "kind": "Service", "spec": {"selector": labels, "ports": ports}} | head,
    )
    kube.kubectl("rollout", "status", f"deployment/{name}", "--timeout=120s")
    kube.wait_reached(name)
    # Not the name that large files are sent to: another origin.
    yield f"{inside}.cluster.local"
