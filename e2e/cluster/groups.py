"""LeaderWorkerSet as its publisher has it: definitions, webhooks, and the controller as a process of this machine.

    1. a certificate for the webhooks      3. the definitions
    2. the webhooks' configurations        4. the controller

Invariants: what is the publisher's comes out of its Go module and stays as it is, but for the webhooks' address: the
API server runs on this machine too, and asks the controller there, not by a Service. `remove` takes all away.
Knows nothing of Stoker.
"""

from __future__ import annotations

import base64
import json
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml
from e2e.cluster.apiserver import free_ports, self_signed
from e2e.cluster.binaries import ensure
from e2e.cluster.crds import definitions
from e2e.cluster.node import run, succeeds
from e2e.cluster.processes import Processes, StartError

CRDS = ("crd/leaderworkersets.leaderworkerset.x-k8s.io", "crd/disaggregatedsets.disaggregatedset.x-k8s.io")
BINARY = "lws"
_HOST = "127.0.0.1"
# The last one that the controller begins to serve.
_LAST = "/validate-disaggregatedset-x-k8s-io-v1-disaggregatedset"
_READY_SECONDS = 120.0
Object = dict[str, Any]


class Publisher:
    """Brings LeaderWorkerSet to a cluster whose API server is a process of this machine, and takes it away again.

    Making one builds the controller, which takes minutes for the first time. Raises BuildError.
    """

    def __init__(self, folder: Path, kubeconfig: Path, processes: Processes) -> None:
        self._folder, self._kubeconfig, self._processes = folder, kubeconfig, processes
        self._binaries = ensure([BINARY, "kubectl"])

    def install(self) -> None:
        """Return once the controller serves its webhooks. Raises StartError."""
        (port,) = free_ports(1)
        url, certificate = f"https://{_HOST}:{port}", self_signed(self._folder, BINARY, f"IP:{_HOST}")
        self._kubectl("create", "-f", "-", text=webhooks(url, certificate.read_bytes()))
        for file in (*definitions("groups"), *definitions("groups-beside")):
            # To apply it, kubectl would write all of it into an annotation, which may not be as large.
            self._kubectl("create", "-f", str(file))
        self._await_established()
        config = self._folder / "config.json"
        config.write_text(json.dumps(configuration(port, self._folder)))
        command = [str(self._binaries[BINARY]), f"--config={config}", f"--kubeconfig={self._kubeconfig}"]
        self._processes.start(BINARY, command)
        self._processes.wait(BINARY, lambda: _serves(f"{url}{_LAST}", certificate), _READY_SECONDS)

    def remove(self) -> None:
        """Take away what `install` brought, however far it came. Raises StartError."""
        # First of all: nothing is written that the webhooks of nobody are to judge.
        self._kubectl("delete", "-f", "-", "--ignore-not-found", text=webhooks("", b""))
        self._processes.stop(BINARY)
        self._kubectl("delete", "--ignore-not-found", "--timeout=60s", *CRDS)

    def _await_established(self) -> None:
        """The controller looks for its kinds when it starts, and again after ten seconds."""
        deadline = time.monotonic() + _READY_SECONDS
        # It fails at once while a definition has no conditions at all.
        while not succeeds(self._command("wait", "--for=condition=Established", "--timeout=10s", *CRDS)):
            if time.monotonic() > deadline:
                raise StartError(f"{' and '.join(CRDS)} are not established after {_READY_SECONDS:.0f} s")
            time.sleep(0.1)

    def _kubectl(self, *arguments: str, text: str | None = None) -> None:
        run(self._command(*arguments), text)

    def _command(self, *arguments: str) -> list[str]:
        return [str(self._binaries["kubectl"]), f"--kubeconfig={self._kubeconfig}", *arguments]


def configuration(port: int, keys: Path) -> Object:
    """The controller's own: its webhooks on this machine alone, and nothing else listens."""
    return {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "webhook": {"host": _HOST, "port": port, "certDir": str(keys)},
        "internalCertManagement": {"enable": False},
        "leaderElection": {"leaderElect": False},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": "0"},
    }


def webhooks(url: str, authority: bytes) -> str:
    """What has the API server ask the controller at `url`: the publisher's, with its own changes to it (JSON Patch)."""
    plain, *patches = definitions("groups-webhooks")
    made = list(yaml.safe_load_all(plain.read_text()))
    for item, patch in zip(made, patches, strict=True):
        for change in yaml.safe_load(patch.read_text()):
            item["webhooks"][int(change["path"].removeprefix("/webhooks/"))] = change["value"]
        item["metadata"]["name"] = f"{BINARY}-{item['metadata']['name']}"
        for each in item["webhooks"]:
            path = each["clientConfig"]["service"]["path"]
            each["clientConfig"] = {"url": f"{url}{path}", "caBundle": base64.b64encode(authority).decode()}
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": made})


def _serves(url: str, authority: Path) -> bool:
    """Whether there is a webhook at that address, which finds fault with a question that is none."""
    try:
        with urllib.request.urlopen(url, timeout=2, context=ssl.create_default_context(cafile=str(authority))):
            return True
    except urllib.error.HTTPError as error:
        return error.code != 404
    except OSError:
        return False
