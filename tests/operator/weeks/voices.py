"""What pods of a walk of weeks answer when the operator asks them: ready, metrics, a completion, adapters, progress.

Invariants: a pod whose node hangs answers nothing; counters grow with the time in which there was traffic. An engine
told `--seed` 5, 12, 19 … fails a third of its requests, one told 6, 13, 20 … is three times as slow.
Knows nothing of how the operator decides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from tests.operator.weeks.machines import Machines, seed_of
from tests.operator.weeks.store import Store, service_of

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Object
from stoker_operator.observe.pod_http import Address, PodClient
from stoker_operator.observe.snapshot import AdapterReport, Progress

PER_SECOND = 0.5


@dataclass
class Traffic:
    """Requests come, or none do."""

    clock: Callable[[], datetime]
    busy: bool = False
    since: datetime | None = None
    _total: timedelta = field(default_factory=timedelta)

    def turn(self, busy: bool) -> None:
        """From now on."""
        now = self.clock()
        self._total, self.busy, self.since = self.total(), busy, now

    def total(self) -> timedelta:
        """For how long there was traffic in all."""
        return self._total + (self.clock() - self.since if self.busy and self.since is not None else timedelta())


class Voices(PodClient):
    """In the place of HTTP."""

    def __init__(
        self, store: Store, machines: Machines, traffic: Callable[[str], Traffic], clock: Callable[[], datetime]
    ) -> None:
        self._store, self._machines, self._traffic, self._clock = store, machines, traffic, clock
        self._begun: dict[str, tuple[timedelta, datetime]] = {}

    def _pod(self, address: Address) -> Object | None:
        pod = self._machines.at(address.ip)
        return pod if pod is not None and self._machines.answers(pod) else None

    async def words(self, addresses: Sequence[Address]) -> list[str | None]:
        return ["" if self._pod(address) is not None else None for address in addresses]

    async def complete(self, address: Address, model: str) -> str:
        return "" if self._pod(address) is not None else "no answer"

    async def progress(self, address: Address) -> Progress | None:
        return Progress("download", 10**7, 10**8, 9)

    async def adapters(self, address: Address) -> tuple[AdapterReport, ...] | None:
        """All of the list, as it is."""
        pod = self._pod(address)
        found = self._store.find(kinds.CONFIG_MAP, f"{service_of(pod)}-adapters") if pod is not None else None
        if found is None:
            return None
        listed = json.loads(found["data"]["adapters.json"])["adapters"]
        return tuple(AdapterReport(each["name"], each["digest"], "loaded") for each in listed)

    async def page(self, address: Address, path: str) -> str:
        pod = self._pod(address)
        if pod is None:
            return ""
        traffic, now = self._traffic(service_of(pod)), self._clock()
        uid, total = pod["metadata"]["uid"], traffic.total()
        before, begun = self._begun.setdefault(uid, (total, now))
        asked = (total - before).total_seconds() * PER_SECOND
        quiet = now - max(traffic.since or begun, begun)
        idle = 0.0 if traffic.busy else quiet.total_seconds()
        failed = asked / 3 if seed_of(pod) % 7 == 5 else 0.0
        slow = 3.0 if seed_of(pod) % 7 == 6 else 1.0
        lines = [
            f"vllm:num_requests_running {int(traffic.busy)}",
            "vllm:num_requests_waiting 0",
            f"stoker:idle_seconds {idle}",
            f'vllm:request_success_total{{finished_reason="stop"}} {asked - failed}',
            f'vllm:request_success_total{{finished_reason="error"}} {failed}',
            f"vllm:time_to_first_token_seconds_sum {asked * 0.2 * slow}",
            f"vllm:time_to_first_token_seconds_count {asked}",
            f"vllm:inter_token_latency_seconds_sum {asked * 10 * 0.02 * slow}",
            f"vllm:inter_token_latency_seconds_count {asked * 10}",
        ]
        return "\n".join(lines) + "\n"
