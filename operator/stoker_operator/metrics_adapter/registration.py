"""The leader's part of the custom metrics API: its certificate in the release's Secret, and the APIService that leads
the API server's clients here.

The Secret comes with the chart, empty; what fills it is made here, so that rendering the chart again changes nothing.
The APIService is made here too, once there is something behind it: one without a backend keeps Kubernetes from
deleting any namespace. It belongs to a cluster-wide object of the release and goes with it.
Invariants: a version of this API that somebody else registered is never taken over, and where the mode is Auto ours
gives way to it; what is to be trusted is told to the API server before anybody serves with it.
Knows nothing of metrics.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from stoker_operator import metrics
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import API_SERVICE, CLUSTER_ROLE, POD, SECRET, SERVICE
from stoker_operator.metrics_adapter.certificate import BUNDLE, CERTIFICATE, KEY, Pair, from_files, is_due, issue
from stoker_operator.metrics_adapter.documents import GROUP, VERSION
from stoker_operator.observe.rollout import is_ready, is_terminating
from stoker_operator.settings import Settings

log = logging.getLogger("stoker.operator")
NAME = f"{VERSION}.{GROUP}"
CHECK_SECONDS = 30.0
FIRST_SECONDS = 1.0
LEAVE_SECONDS = 5.0
Object = Mapping[str, Any]


async def read_pair(cluster: Cluster, settings: Settings) -> Pair | None:
    """The pair in the release's Secret; None while there is none. Raises ApiError."""
    secret = await cluster.get(SECRET, settings.lease_namespace, settings.metrics_adapter_secret)
    files = (secret or {}).get("data") or {}
    return from_files({name: base64.b64decode(text) for name, text in files.items()})


class Registration:
    """Keeps the certificate, and the APIService once `serving` is set. `state` says in words where the API stands, ""
    before the first look.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        serving: asyncio.Event,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._cluster = cluster
        self._settings = settings
        self._serving = serving
        self._clock = clock
        self.state = ""

    @property
    def host(self) -> str:
        """The name by which the API server calls on us."""
        return f"{self._settings.metrics_adapter_service}.{self._settings.lease_namespace}.svc"

    async def keep(self) -> None:
        """Keep both as they are to be, until cancelled."""
        while True:
            try:
                await self.once()
            except ApiError as error:
                self._say(f"it is not registered: {error}")
            await asyncio.sleep(CHECK_SECONDS if self._serving.is_set() else FIRST_SECONDS)

    async def once(self) -> bool:
        """Look once and change what is to be changed; whether ours is registered then. Raises ApiError."""
        pair = await self._pair()
        ours, others = self._sorted(await self._cluster.list_all(API_SERVICE, ""))
        taken = [item for item in others if item["metadata"]["name"] == NAME]
        before = taken or (others if self._settings.metrics_adapter_mode == "Auto" else [])
        registered = not before and pair is not None and self._serving.is_set()
        if before:
            if ours is not None:
                await self._cluster.delete(API_SERVICE, "", NAME, ours["metadata"]["uid"])
            self._say(_given_way(before))
        elif pair is None:
            self._say(f"Secret {self._settings.metrics_adapter_secret} holds no tls.crt and tls.key yet")
        elif registered:
            await self._register(ours, pair.bundle)
            self._say(f"{NAME} is registered")
        metrics.METRICS_API.set(registered)
        return registered

    async def leave(self) -> None:
        """Take the registration back where no other replica would answer for it; never raises."""
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                ours, _ = self._sorted(await self._cluster.list_all(API_SERVICE, ""))
                if ours is not None and not await self._others_serve():
                    await self._cluster.delete(API_SERVICE, "", NAME, ours["metadata"]["uid"])
                    log.info("custom metrics API: %s is taken back: no replica is left to answer", NAME)
        except (ApiError, TimeoutError) as error:
            log.warning("custom metrics API: %s stays registered: %s", NAME, error or "no answer in time")

    async def _pair(self) -> Pair | None:
        """The pair to serve with; a new one where that is ours to make and it is time."""
        pair, now = await read_pair(self._cluster, self._settings), self._clock()
        if self._settings.metrics_adapter_issuer != "operator" or (pair and not is_due(pair, self.host, now)):
            return pair
        fresh = issue(self.host, now, pair)
        ours, _ = self._sorted(await self._cluster.list_all(API_SERVICE, ""))
        if ours is not None:
            await self._register(ours, fresh.bundle)
        files = {CERTIFICATE: fresh.certificate, KEY: fresh.key, BUNDLE: fresh.bundle}
        secret = {
            "apiVersion": SECRET.api_version,
            "kind": SECRET.kind,
            "metadata": {"name": self._settings.metrics_adapter_secret, "namespace": self._settings.lease_namespace},
            "data": {name: base64.b64encode(text).decode() for name, text in files.items()},
        }
        await self._cluster.apply(SECRET, secret)
        log.info("custom metrics API: a new certificate for %s", self.host)
        return fresh

    def _sorted(self, live: list[dict[str, Any]]) -> tuple[Object | None, list[Object]]:
        """(ours, those of others) among the APIServices of this API."""
        backend = (self._settings.lease_namespace, self._settings.metrics_adapter_service)
        ours: Object | None = None
        others: list[Object] = []
        for item in live:
            if item["spec"].get("group") != GROUP or "deletionTimestamp" in item["metadata"]:
                continue
            service = item["spec"].get("service") or {}
            if item["metadata"]["name"] == NAME and (service.get("namespace"), service.get("name")) == backend:
                ours = item
            else:
                others.append(item)
        return ours, others

    async def _register(self, live: Object | None, bundle: bytes) -> None:
        settings = self._settings
        name, namespace = settings.metrics_adapter_service, settings.lease_namespace
        service = await self._cluster.get(SERVICE, namespace, name)
        if service is None:
            raise ApiError(404, "NotFound", f"Service {namespace}/{name}, to which {NAME} is to lead")
        backend = {"name": name, "namespace": namespace, "port": service["spec"]["ports"][0]["port"]}
        spec = {
            "group": GROUP,
            "version": VERSION,
            "groupPriorityMinimum": 100,
            "versionPriority": 200,
            "service": backend,
            "caBundle": base64.b64encode(bundle).decode(),
        }
        if live is not None and all(live["spec"].get(key) == value for key, value in spec.items()):
            return
        owner = await self._cluster.get(CLUSTER_ROLE, "", settings.metrics_adapter_owner)
        if owner is None:
            raise ApiError(404, "NotFound", f"ClusterRole {settings.metrics_adapter_owner}, which is to own {NAME}")
        reference = {key: owner[key] for key in ("apiVersion", "kind")} | {
            key: owner["metadata"][key] for key in ("name", "uid")
        }
        meta = {"name": NAME, "ownerReferences": [reference], "labels": {"app.kubernetes.io/managed-by": "stoker"}}
        manifest = {"apiVersion": API_SERVICE.api_version, "kind": API_SERVICE.kind, "metadata": meta, "spec": spec}
        await self._cluster.apply(API_SERVICE, manifest)

    async def _others_serve(self) -> bool:
        """Whether another replica is behind the Service."""
        namespace = self._settings.lease_namespace
        service = await self._cluster.get(SERVICE, namespace, self._settings.metrics_adapter_service)
        labels = ((service or {}).get("spec") or {}).get("selector") or {}
        if not labels:
            return False
        selector = ",".join(f"{key}={value}" for key, value in labels.items())
        pods = await self._cluster.list_all(POD, namespace, selector)
        return any(
            pod["metadata"]["name"] != self._settings.identity and is_ready(pod) and not is_terminating(pod)
            for pod in pods
        )

    def _say(self, state: str) -> None:
        if state != self.state:
            log.info("custom metrics API: %s", state)
        self.state = state


def _given_way(others: list[Object]) -> str:
    who = []
    for item in others:
        service = item["spec"].get("service") or {}
        behind = f" (Service {service.get('namespace')}/{service.get('name')})" if service else ""
        who.append(f"{item['metadata']['name']}{behind}")
    return f"it stays off, since another adapter serves {', '.join(who)}"
