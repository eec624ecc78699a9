"""The operator as processes, with the chart's own rights: it works by watching, one leads, another takes over."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster

pytestmark = pytest.mark.apiserver
ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def restricted(namespace: str, control_plane: Path, kubectl: Callable[..., str], tmp_path: Path) -> Path:
    """A kubeconfig of the operator's own service account, with what the chart grants for one namespace and no more."""
    from e2e.cluster.binaries import ensure

    command = [str(ensure(["helm"])["helm"]), "template", "stoker", str(ROOT / "charts" / "stoker")]
    command += ["--namespace", namespace, "--set", f"watchNamespaces={{{namespace}}}", "--set", "crds.install=false"]
    command += ["--set", "image.repository=r/o,runtime.image=r/e:1"]
    rendered = subprocess.run([*command, "-s", "templates/rbac.yaml"], capture_output=True, text=True, check=True)
    kubectl("apply", "-f", "-", stdin=rendered.stdout)
    config = yaml.safe_load(control_plane.read_text())
    config["users"][0]["user"] = {"token": kubectl("create", "token", "stoker").strip()}
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture
def start(namespace: str, restricted: Path, operator_command: list[str], tmp_path: Path) -> Iterator[Start]:
    """Start one replica of the operator under a name, with flags that win over those here; ended, and its log checked
    for refusals, after the test.
    """
    running: list[subprocess.Popen[bytes]] = []

    def run(name: str, *flags: str) -> subprocess.Popen[bytes]:
        command = [*operator_command, "--identity", name, "--lease-name=stoker", f"--lease-namespace={namespace}"]
        command += [f"--namespaces={namespace}", "--lease-seconds=3", "--http-port=0", "--http-host=127.0.0.1"]
        command += flags
        environment = os.environ | {"KUBECONFIG": str(restricted), "PYTHONWARNINGS": "ignore"}
        with (tmp_path / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT)
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.wait(10)
    logs = "\n".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert "orbidden" not in logs, logs
    assert "Traceback" not in logs, logs


@pytest.fixture
def holder(cluster: Cluster, namespace: str) -> Callable[[], Any]:
    async def read() -> str:
        lease = await cluster.get(kinds.LEASE, namespace, "stoker")
        return str(lease["spec"]["holderIdentity"]) if lease else ""

    return read


async def test_two_operators_one_leads_and_the_other_takes_over(
    start: Start,
    holder: Callable[[], Any],
    create: Callable[..., Any],
    cluster: Cluster,
    namespace: str,
    kubectl: Callable[..., str],
    eventually: Callable[..., Any],
) -> None:
    operators = {name: start(name) for name in ("one", "two")}
    leader = await eventually(holder)
    [follower] = operators.keys() - {leader}
    await create("first", placement={"schedulerName": "nobody"})
    await eventually(lambda: cluster.list_all(kinds.JOB, namespace))
    kubectl("delete", "service", "first-metrics")  # a watch brings it back: no resync is due for minutes
    await eventually(lambda: cluster.get(kinds.SERVICE, namespace, "first-metrics"))

    operators[leader].kill()
    killed = time.monotonic()
    await create("second", placement={"schedulerName": "nobody"})

    async def taken_over() -> bool:
        return bool(await holder() == follower)

    await eventually(taken_over)
    await eventually(lambda: cluster.get(kinds.SERVICE, namespace, "second-metrics"))
    assert time.monotonic() - killed < 15
    assert operators[follower].poll() is None


async def test_a_stopped_operator_gives_its_lease_up(
    start: Start, holder: Callable[[], Any], cluster: Cluster, namespace: str, eventually: Callable[..., Any]
) -> None:
    operator = start("one")
    await eventually(holder)
    operator.send_signal(signal.SIGTERM)
    assert operator.wait(10) == 0
    assert await holder() == ""


async def test_an_operator_that_lost_its_lease_ends(
    start: Start, holder: Callable[[], Any], cluster: Cluster, namespace: str, eventually: Callable[..., Any]
) -> None:
    operator = start("one")
    await eventually(holder)
    lease = await cluster.get(kinds.LEASE, namespace, "stoker")
    assert lease is not None
    usurped = lease["spec"] | {"holderIdentity": "two", "renewTime": "2099-01-01T00:00:00.000000Z"}
    manifest = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": usurped}
    meta = {"name": "stoker", "namespace": namespace}
    await cluster.apply(kinds.LEASE, manifest | {"metadata": meta})
    assert operator.wait(15) == 1
