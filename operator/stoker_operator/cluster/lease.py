"""Leadership by a coordination.k8s.io Lease: one replica works, the others wait.

Invariants: timestamps are UTC with microseconds, as the API wants them; whether a lease has expired is
judged by how long *this* process saw it unchanged, so clocks need not agree; a leader that cannot renew
within the lease's duration stops leading before another may start; one that fell silent is replaced within a seventh of
that duration more; a lease is released on an orderly exit, so fail-over then takes a fifteenth.
Knows nothing of what the leader does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime
from typing import Any

from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.kinds import LEASE

log = logging.getLogger("stoker.operator")


class Lease:
    """One candidate for one Lease. `seconds` is the lease's duration; it is renewed three times in that
    time.
    """

    def __init__(self, cluster: Cluster, namespace: str, name: str, identity: str, seconds: float) -> None:
        self._cluster = cluster
        self._namespace, self._name, self._identity = namespace, name, identity
        self._seconds = seconds
        self._period = seconds / 3
        self._seen: tuple[Any, Any] = (None, None)
        self._seen_at = 0.0

    async def acquire(self) -> None:
        """Wait until this candidate leads."""
        waited = False
        while not await self._try():
            if not waited:
                log.info("waiting for lease %s/%s", self._namespace, self._name)
                waited = True
            await asyncio.sleep(self._period / 5)
        log.info("leading: %s holds lease %s/%s", self._identity, self._namespace, self._name)

    async def hold(self) -> None:
        """Renew until it fails for two thirds of the lease's duration; returns when leadership must be
        given up.
        """
        renewed = time.monotonic()
        while time.monotonic() - renewed < self._period * 2:
            await asyncio.sleep(self._period / 2)
            if await self._try():
                renewed = time.monotonic()
            elif self._seen[0] not in (self._identity, None):
                break
        log.error("lost lease %s/%s", self._namespace, self._name)

    async def release(self) -> None:
        """Give the lease up, if it is held, so that another need not wait for it to expire."""
        try:
            live = await self._cluster.get(LEASE, self._namespace, self._name)
            if live and live["spec"].get("holderIdentity") == self._identity:
                spec = live["spec"] | {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _now()}
                await self._cluster.replace(LEASE, live | {"spec": spec})
        except ApiError as error:
            log.warning("lease %s/%s was not released: %s", self._namespace, self._name, error)

    async def _try(self) -> bool:
        """Take or renew the lease if that is allowed; False when another has it or the API server does not
        answer.
        """
        try:
            async with asyncio.timeout(self._period):
                live = await self._cluster.get(LEASE, self._namespace, self._name)
            if live is None:
                await self._cluster.create(LEASE, self._manifest())
                return True
            spec = live.get("spec") or {}
            holder = spec.get("holderIdentity") or ""
            if holder not in ("", self._identity) and not self._expired(holder, spec):
                return False
            async with asyncio.timeout(self._period):
                await self._cluster.replace(LEASE, live | {"spec": self._spec(spec, holder)})
        except (ApiError, TimeoutError) as error:
            if not isinstance(error, ApiError) or error.status != 409:
                log.warning("lease %s/%s: %s", self._namespace, self._name, error or "no answer in time")
            return False
        self._seen = (self._identity, None)
        return True

    def _expired(self, holder: str, spec: dict[str, Any]) -> bool:
        seen = (holder, spec.get("renewTime"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        return time.monotonic() - self._seen_at > float(spec.get("leaseDurationSeconds") or self._seconds)

    def _manifest(self) -> dict[str, Any]:
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": self._spec({}, ""),
        }

    def _spec(self, before: dict[str, Any], holder: str) -> dict[str, Any]:
        mine = holder == self._identity
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._seconds),
            "acquireTime": before.get("acquireTime") if mine else _now(),
            "renewTime": _now(),
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (0 if mine else 1),
        }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
