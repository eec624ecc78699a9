"""The control plane that services are counted on: real etcd, kube-apiserver and controllers, without the throttles that
would be measured in their place.

Invariants: all that was started ends with the block.
Knows nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from e2e.cluster import apiserver
from e2e.cluster.binaries import ensure
from e2e.scale.services import NAMESPACES

ROOT = Path(__file__).resolve().parents[2]
# Go's collector may take what thousands of pods need, and works the less; the tests' control planes have a gibibyte.
_MEMORY, _GROWTH_PERCENT = "6GiB", "800"
_QUICK = ("--kube-api-qps=500", "--kube-api-burst=1000", "--concurrent-job-syncs=20")


@contextlib.contextmanager
def control_plane(controllers: Sequence[str], keep: Path | None = None) -> Iterator[tuple[apiserver.Running, Path]]:
    """Start one with these controllers, the CRD and the namespaces; also gives a folder for logs: `keep`, or one that
    goes with the block.
    """
    os.environ.setdefault("GOMEMLIMIT", _MEMORY)
    os.environ.setdefault("GOGC", _GROWTH_PERCENT)
    # Else whoever is told to end (`timeout`, a build server) leaves all of it behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        running = apiserver.start(folder / "control-plane", controllers=controllers, controller_flags=_QUICK)
        try:
            _furnish(running.kubeconfig)
            yield running, folder
        finally:
            running.stop()


def _furnish(kubeconfig: Path) -> None:
    kubectl = str(ensure(["kubectl"])["kubectl"])

    def run(*arguments: str, check: bool = True) -> bool:
        environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
        return not subprocess.run([kubectl, *arguments], env=environment, check=check, capture_output=True).returncode

    run("apply", "-f", str(ROOT / "crds" / "stoker.dev_inferenceservices.yaml"))
    # `kubectl wait` fails at once while an object has no conditions at all.
    while not run("wait", "--for=condition=Established", "crd/inferenceservices.stoker.dev", check=False):
        time.sleep(0.1)
    for number in range(NAMESPACES):
        # There already, where the state of an earlier run was kept.
        if not run("get", "namespace", f"scale-{number}", check=False):
            run("create", "namespace", f"scale-{number}")
