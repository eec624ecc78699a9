"""The kubelet's part in `stoker up`: one pod's life as processes.

    init containers, one after the other → the container → startup probe → readiness and liveness
    → restart with back-off, or the end → on deletion: readiness off, SIGTERM, grace, SIGKILL

Invariants: the pod's `status` in the store is always what is true of its processes; a pod that is deleted is taken out
of the store only when the last process is gone. preStop's sleep is left out: it waits until every node has heard that
the address is withdrawn, and here the one proxy knows at once.
Knows nothing of what the containers do.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from stoker_operator.cluster.api import Object
from stoker_operator.local.container import Container, ask
from stoker_operator.local.process import LOOPBACK, Machine, ReferenceMissing, map_container
from stoker_operator.local.store import LocalCluster, timestamp

_FIRST_BACK_OFF = 1.0
_LONGEST_BACK_OFF = 30.0
_MISSING_POLL_SECONDS = 1.0
_DEFAULT_GRACE_SECONDS = 30.0


class LocalPod:
    """Runs one pod object of the store."""

    def __init__(self, store: LocalCluster, pod: Object, machine: Machine) -> None:
        self.object = pod
        self.name: str = pod["metadata"]["name"]
        self._store = store
        self._machine = replace(machine, logs=machine.logs / self.name)
        self._spec: Mapping[str, Any] = copy.deepcopy(pod["spec"])
        self._init: list[Container] = []
        self._main: list[Container] = []
        self._ending = False
        self._ports_by_name = {
            port["name"]: port["containerPort"] for item in self._spec["containers"] for port in item.get("ports", ())
        }
        _show_real_ports(pod, machine.ports)
        pod["status"] = {"phase": "Pending", "podIP": LOOPBACK, "conditions": [_condition({}, "PodScheduled", True)]}

    @property
    def log_tail(self) -> str:
        """The end of what the containers said last."""
        texts = [container.tail() for container in (*self._init, *self._main)]
        return next((text for text in reversed(texts) if text), "")

    def address(self, port: int) -> tuple[str, int] | None:
        """Where the pod serves the manifest's `port`, while it is ready."""
        ready = bool(self._main) and all(container.ready for container in self._main)
        going = "deletionTimestamp" in self.object["metadata"]
        return (LOOPBACK, self._machine.ports[port]) if ready and not going and port in self._machine.ports else None

    async def run(self) -> None:
        """Live until the pod is finished or this task is cancelled; then see that nothing runs any more."""
        try:
            if not await self._initialize():
                return
            containers = await self._create(self._spec["containers"], self._main)
            results = await asyncio.gather(*(self._keep_running(item, manifest) for item, manifest in containers))
            self.object["status"]["phase"] = "Failed" if any(results) else "Succeeded"
            self._report()
        except OSError:
            # A command that cannot be started: the status says so, and starting it again would not help.
            return
        finally:
            self.kill()
            await asyncio.gather(*(container.reaped() for container in (*self._init, *self._main)))

    async def shut_down(self) -> None:
        """End the containers with the manifest's grace. The caller cancels `run` afterwards."""
        self._ending = True
        for container in self._main:
            container.ready = False
        self._report()
        grace = float(self._spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS))
        await asyncio.gather(*(container.end(grace) for container in (*self._init, *self._main)))

    def kill(self) -> None:
        """End the containers at once."""
        for container in (*self._init, *self._main):
            container.kill()

    async def _initialize(self) -> bool:
        """Run the init containers in their order; False when one failed and the pod is not to be restarted."""
        for container, manifest in await self._create(self._spec.get("initContainers", ()), self._init):
            while code := await self._once(container, manifest):
                if self._ending or self._spec.get("restartPolicy", "Always") == "Never":
                    self.object["status"]["phase"] = "Failed"
                    self._report()
                    return False
                await self._back_off(container, code)
        return True

    async def _create(
        self, manifests: Sequence[Mapping[str, Any]], into: list[Container]
    ) -> list[tuple[Container, Mapping[str, Any]]]:
        """Containers for manifests; waits, and says so in the status, while a Secret or ConfigMap is missing."""
        created: list[tuple[Container, Mapping[str, Any]]] = []
        for manifest in manifests:
            mapped = None
            while mapped is None:
                try:
                    mapped = map_container(manifest, self._machine)
                except ReferenceMissing as missing:
                    self._waiting(manifest, "CreateContainerConfigError", str(missing))
                    await asyncio.sleep(_MISSING_POLL_SECONDS)
            self._machine.logs.mkdir(parents=True, exist_ok=True)
            created.append((Container(mapped, manifest, self._machine.logs / f"{mapped.name}.log"), manifest))
        into[:] = [container for container, _ in created]
        self._report()
        return created

    async def _keep_running(self, container: Container, manifest: Mapping[str, Any]) -> int:
        """Run, and restart as the pod's policy says; returns the exit status when it is not restarted."""
        while True:
            code = await self._once(container, manifest)
            if self._ending or self._spec.get("restartPolicy", "Always") == "Never":
                return code
            await self._back_off(container, code)

    async def _once(self, container: Container, manifest: Mapping[str, Any]) -> int:
        """One run of one container to its end."""
        try:
            await container.start()
        except OSError as error:
            self._waiting(
                manifest, "CreateContainerError", f"{error.filename or manifest.get('command')}: {error.strerror}"
            )
            raise
        self.object["status"]["phase"] = "Running" if container in self._main else "Pending"
        self._report()
        probes = asyncio.create_task(self._probe(container, manifest))
        try:
            return await container.wait()
        finally:
            probes.cancel()
            await asyncio.gather(probes, return_exceptions=True)
            self._report()

    async def _probe(self, container: Container, manifest: Mapping[str, Any]) -> None:
        """Startup first; then readiness and liveness until the container ends."""
        startup = manifest.get("startupProbe")
        if startup and not await container.succeeds_once(startup, self._machine.ports, self._ports_by_name):
            await container.end(_DEFAULT_GRACE_SECONDS)
            return
        if container in self._init:
            return
        if "readinessProbe" not in manifest:
            container.ready = True
            self._report()
        watched = [
            self._watch(container, manifest[kind], kind)
            for kind in ("readinessProbe", "livenessProbe")
            if kind in manifest
        ]
        await asyncio.gather(*watched)

    async def _watch(self, container: Container, probe: Mapping[str, Any], kind: str) -> None:
        failures = 0
        while True:
            good = await ask(probe, self._machine.ports, self._ports_by_name)
            failures = 0 if good else failures + 1
            if kind == "readinessProbe" and (good or failures >= int(probe.get("failureThreshold", 3))):
                going = "deletionTimestamp" in self.object["metadata"]
                if container.ready != (good and not going):
                    container.ready = good and not going
                    self._report()
            elif kind == "livenessProbe" and failures >= int(probe.get("failureThreshold", 3)):
                await container.end(float(self._spec.get("terminationGracePeriodSeconds", _DEFAULT_GRACE_SECONDS)))
                return
            await asyncio.sleep(float(probe.get("periodSeconds", 10)))

    async def _back_off(self, container: Container, code: int) -> None:
        """Before the next run: none the first time, then longer each time, in Kubernetes' words."""
        container.last_state = container.state
        container.restarts += 1
        if container.restarts == 1:
            return
        seconds = min(_FIRST_BACK_OFF * 2.0 ** (container.restarts - 2), _LONGEST_BACK_OFF)
        text = f"back-off {seconds:.0f}s restarting failed container={container.name}, which ended with {code}"
        container.state = {"waiting": {"reason": "CrashLoopBackOff", "message": text}}
        self._report()
        await asyncio.sleep(seconds)

    def _waiting(self, manifest: Mapping[str, Any], reason: str, message: str) -> None:
        state = {"waiting": {"reason": reason, "message": message}}
        entry = {"name": manifest["name"], "ready": False, "restartCount": 0, "state": state}
        self.object["status"]["containerStatuses"] = [entry]
        self._store.touch()

    def _report(self) -> None:
        """Bring the pod's status in line with its containers."""
        status = self.object["status"]
        status["initContainerStatuses"] = [container.status() for container in self._init]
        if self._main:
            status["containerStatuses"] = [container.status() for container in self._main]
        ready = bool(self._main) and all(container.ready for container in self._main)
        before = {item["type"]: item for item in status.get("conditions", ())}
        status["conditions"] = [_condition(before, "PodScheduled", True), _condition(before, "Ready", ready)]
        self._store.touch()


def _show_real_ports(pod: Object, ports: Mapping[int, int]) -> None:
    """Pods share one address here, so each has ports of its own; the operator reads them from the pod."""
    for container in pod["spec"]["containers"]:
        for port in container.get("ports", ()):
            port["containerPort"] = ports[port["containerPort"]]


def _condition(before: Mapping[str, dict[str, str]], kind: str, value: bool) -> dict[str, str]:
    """A condition, with the time since when it holds."""
    there = before.get(kind)
    if there is not None and there["status"] == str(value):
        return there
    return {"type": kind, "status": str(value), "lastTransitionTime": timestamp()}
