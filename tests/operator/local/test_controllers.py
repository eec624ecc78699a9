"""Workloads as real processes: order, probes, restarts, back-off, drain, Jobs and their retries, GPUs."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from stoker_operator.cluster import kinds
from stoker_operator.local.controllers import Controllers
from stoker_operator.local.process import Machine
from stoker_operator.local.store import LocalCluster
from stoker_operator.observe import rollout

# Serves /ready (while the file `ready` is there) and /health (until the file `sick` is there). After SIGTERM it
# takes `drain` seconds. `crash` ends it with status 7.
SERVER = """
import http.server, os, pathlib, signal, sys, threading, time
here, port, drain = pathlib.Path(sys.argv[1]), int(sys.argv[3]), float(sys.argv[5])
(here / "started").open("a").write(f"{os.getpid()}\\n")
if (here / "crash").exists():
    sys.exit("crash was asked for" if time.sleep(0.1) else 7)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        good = (here / "ready").exists() if self.path == "/ready" else not (here / "sick").exists()
        self.send_response(200 if good else 503); self.end_headers()
    def log_message(self, *a): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
def end(*_):
    time.sleep(drain); (here / "drained").write_text(""); os._exit(0)
signal.signal(signal.SIGTERM, end)
print("serving", flush=True)
server.serve_forever()
"""


class Rig:
    """Controllers over a store, with a loop that keeps them in sync."""

    def __init__(self, folder: Path, gpus: frozenset[int] = frozenset()) -> None:
        self.folder = folder
        self.store = LocalCluster()
        machine = Machine({}, {}, {}, {}, dict(os.environ), (), folder / "logs")
        self.controllers = Controllers(self.store, folder, machine, gpus)
        self.task = asyncio.create_task(self.loop())

    async def loop(self) -> None:
        while True:
            self.controllers.sync()
            await self.store.changed(0.1)

    async def until(self, true: Callable[[], Any], seconds: float = 15) -> None:
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, self.store.of(kinds.POD)
            await asyncio.sleep(0.02)

    @property
    def pods(self) -> list[dict[str, Any]]:
        return self.store.of(kinds.POD)

    @property
    def ready(self) -> list[tuple[str, int]]:
        return [where for pod in self.controllers.pods.values() if (where := pod.address(8000))]

    def container(self, index: int = 0) -> dict[str, Any]:
        return dict(self.pods[index]["status"]["containerStatuses"][0])

    def flag(self, name: str) -> Path:
        return self.folder / name


def runs(pid: str) -> bool:
    """Whether a process is there and no zombie that nobody has reaped yet."""
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.task.cancel()
    made.controllers.kill()
    await made.controllers.shut_down()
    started = made.flag("started").read_text().split() if made.flag("started").exists() else []
    deadline = time.monotonic() + 5
    while left := [pid for pid in started if runs(pid)]:
        # One that was killed is there until the kernel has taken it down.
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.02)


def deployment(rig: Rig, /, *, drain: float = 0, replicas: int = 1, **pod: Any) -> dict[str, Any]:
    arguments = [str(rig.folder), "--port", "8000", "--drain", str(drain)]
    get = {"httpGet": {"path": "/ready", "port": "http"}, "timeoutSeconds": 2}
    container = {
        "name": "engine",
        "command": [sys.executable, "-c", SERVER],
        "args": arguments,
        "ports": [{"name": "http", "containerPort": 8000}],
        "resources": pod.pop("resources", {}),
        "startupProbe": {**get, "periodSeconds": 1, "failureThreshold": pod.pop("startup", 20)},
        "readinessProbe": {**get, "periodSeconds": 0.1, "failureThreshold": 2},
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 0.1,
            "failureThreshold": 2,
            "timeoutSeconds": 2,
        },
    }
    labels = {"app.kubernetes.io/instance": "demo"}
    spec = {"terminationGracePeriodSeconds": 10, "containers": [container], **pod}
    strategy = {"rollingUpdate": {"maxSurge": 0 if container["resources"] else 1}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "demo", "namespace": "default", "labels": labels},
        "spec": {
            "replicas": replicas,
            "strategy": strategy,
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def python(code: str, name: str) -> dict[str, Any]:
    return {"name": name, "command": [sys.executable, "-c", code], "resources": {}}


def job(code: str, backoff: int = 2) -> dict[str, Any]:
    rule = {"action": "FailJob", "onExitCodes": {"containerName": "fetch", "operator": "In", "values": [3]}}
    pod = {"restartPolicy": "Never", "containers": [python(code, "fetch")]}
    labels = {"app.kubernetes.io/instance": "demo"}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "job", "namespace": "default", "labels": labels},
        "spec": {
            "backoffLimit": backoff,
            "podFailurePolicy": {"rules": [rule]},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


async def test_ready_follows_the_probe_and_the_real_port_answers(rig: Rig) -> None:
    rig.store.add(deployment(rig))
    await rig.until(lambda: rig.pods and rig.pods[0]["status"]["phase"] == "Running")
    assert rig.ready == []
    rig.flag("ready").touch()
    await rig.until(lambda: rig.ready)
    host, port = rig.ready[0]
    assert rig.pods[0]["spec"]["containers"][0]["ports"][0]["containerPort"] == port
    answer = await asyncio.to_thread(urllib.request.urlopen, f"http://{host}:{port}/ready", timeout=5)
    assert answer.status == 200
    rig.flag("ready").unlink()
    await rig.until(lambda: not rig.ready)
    assert rig.container()["restartCount"] == 0


async def test_the_rollout_that_the_operator_reads_settles(rig: Rig) -> None:
    rig.flag("ready").touch()
    live = rig.store.add(deployment(rig, replicas=2))
    await rig.until(lambda: len(rig.ready) == 2)
    state = rollout.read(live, rig.store.of(kinds.REPLICA_SET), rig.pods)
    assert state.settled
    assert state.updated_ready == 2


async def test_a_crash_is_restarted_first_at_once_then_with_back_off(rig: Rig) -> None:
    rig.flag("crash").touch()
    rig.store.add(deployment(rig))
    await rig.until(lambda: rig.pods and rig.pods[0]["status"].get("containerStatuses"))
    await rig.until(lambda: rig.container()["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff")
    assert rig.container()["restartCount"] == 2
    assert rig.container()["lastState"]["terminated"]["exitCode"] == 7
    rig.flag("crash").unlink()
    rig.flag("ready").touch()
    await rig.until(lambda: rig.ready)


async def test_a_sick_container_is_restarted(rig: Rig) -> None:
    rig.flag("ready").touch()
    rig.store.add(deployment(rig))
    await rig.until(lambda: rig.ready)
    rig.flag("sick").touch()
    await rig.until(lambda: rig.flag("drained").exists())
    rig.flag("sick").unlink()
    await rig.until(lambda: rig.container()["restartCount"] == 1 and rig.ready)


async def test_a_start_that_takes_too_long_is_ended(rig: Rig) -> None:
    rig.store.add(deployment(rig, startup=1))
    await rig.until(lambda: rig.flag("drained").exists())


async def test_init_containers_run_first_and_a_failing_one_keeps_the_engine_away(rig: Rig) -> None:
    check = f"import pathlib, sys; sys.exit(0 if pathlib.Path({str(rig.flag('sound'))!r}).exists() else 3)"
    rig.flag("ready").touch()
    rig.store.add(deployment(rig, initContainers=[python(check, "verify")]))
    await rig.until(lambda: rig.pods and rig.pods[0]["status"].get("initContainerStatuses"))
    await rig.until(lambda: rig.pods[0]["status"]["initContainerStatuses"][0]["restartCount"] >= 1)
    assert not rig.flag("started").exists()
    rig.flag("sound").touch()
    await rig.until(lambda: rig.ready)


async def test_deletion_takes_the_address_first_and_waits_for_the_drain(rig: Rig) -> None:
    rig.flag("ready").touch()
    live = rig.store.add(deployment(rig, drain=0.5))
    await rig.until(lambda: rig.ready)
    rig.store.remove(live)
    assert rig.ready == []
    await rig.until(lambda: not rig.pods)
    assert rig.flag("drained").exists()
    assert len(rig.flag("started").read_text().split()) == 1  # what was told to end is not restarted


async def test_a_grace_that_is_over_ends_with_sigkill(rig: Rig) -> None:
    rig.flag("ready").touch()
    live = rig.store.add(deployment(rig, drain=60, terminationGracePeriodSeconds=0.3))
    await rig.until(lambda: rig.ready)
    rig.store.remove(live)
    await rig.until(lambda: not rig.pods, seconds=5)
    assert not rig.flag("drained").exists()


async def test_a_new_template_replaces_the_pods_and_keeps_one_ready(rig: Rig) -> None:
    rig.flag("ready").touch()
    live = rig.store.add(deployment(rig))
    await rig.until(lambda: rig.ready)
    before = rig.pods[0]["metadata"]["name"]
    changed = deployment(rig, terminationGracePeriodSeconds=5)
    await rig.store.apply(kinds.DEPLOYMENT, changed)
    lost = 0
    end = time.monotonic() + 15
    while [pod["metadata"]["name"] for pod in rig.pods] in ([before], []) or len(rig.pods) != 1:
        lost += not rig.ready
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    assert lost == 0
    assert rollout.read(live, rig.store.of(kinds.REPLICA_SET), rig.pods).settled


async def test_a_job_completes_with_its_report(rig: Rig) -> None:
    live = rig.store.add(job("print('done')"))
    await rig.until(lambda: live.get("status"))
    assert live["status"]["conditions"][0]["type"] == "Complete"
    assert [pod["status"]["phase"] for pod in rig.pods] == ["Succeeded"]


async def test_a_job_tries_again_until_its_limit_and_keeps_the_last_words(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker_operator.local.controllers._JOB_BACK_OFF_SECONDS", 0.05)
    live = rig.store.add(job("import sys; print('no luck', file=sys.stderr); sys.exit(1)"))
    await rig.until(lambda: live.get("status"))
    assert live["status"]["conditions"][0]["type"] == "Failed"
    assert len(rig.pods) == 3
    assert rig.container()["state"]["terminated"]["message"] == "no luck"


async def test_a_final_exit_status_ends_a_job_at_once(rig: Rig) -> None:
    live = rig.store.add(job("import sys; sys.exit(3)"))
    await rig.until(lambda: live.get("status"))
    assert live["status"]["conditions"][0]["type"] == "Failed"
    assert len(rig.pods) == 1


async def test_what_a_container_leaves_behind_ends_with_it(rig: Rig) -> None:
    child = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); open(sys.argv[1], 'a').write(f'{p.pid}\\n')"
    work = job(child)
    work["spec"]["template"]["spec"]["containers"][0]["args"] = [str(rig.flag("started"))]
    live = rig.store.add(work)
    await rig.until(lambda: live.get("status"))


async def test_a_command_that_cannot_start_says_so(rig: Rig) -> None:
    work = job("")
    work["spec"]["template"]["spec"]["containers"][0]["command"] = ["/no/such/binary"]
    rig.store.add(work)
    await rig.until(lambda: rig.pods and rig.pods[0]["status"].get("containerStatuses"))
    waiting = rig.container()["state"]["waiting"]
    assert waiting["reason"] == "CreateContainerError"
    assert "/no/such/binary" in waiting["message"]


async def test_gpus_are_dealt_once_and_missing_ones_are_said(tmp_path: Path) -> None:
    rig = Rig(tmp_path, frozenset({0}))
    rig.flag("ready").touch()
    rig.store.add(deployment(rig, replicas=2, resources={"limits": {"nvidia.com/gpu": "1"}}))
    await rig.until(lambda: rig.ready)
    waiting = [pod for pod in rig.pods if pod["status"]["conditions"][0]["status"] == "False"]
    assert waiting[0]["status"]["conditions"][0]["message"] == "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."
    rig.task.cancel()
    await rig.controllers.shut_down()


async def test_a_claim_of_ones_own_is_a_folder_that_is_there(rig: Rig, service: Any) -> None:
    built = service(model={"uri": "pvc://weights/llama"})
    rig.controllers.take_claim(built)
    assert rig.store.of(kinds.CLAIM) == []
    (rig.folder / "volumes" / "default" / "weights").mkdir(parents=True)
    rig.controllers.take_claim(built)
    rig.controllers.take_claim(built)
    [claim] = rig.store.of(kinds.CLAIM)
    assert claim["metadata"]["name"] == "weights"
    rig.controllers.take_claim(service())  # a cache is made when it is asked for
    assert len(rig.store.of(kinds.CLAIM)) == 1
