"""One reconcile, on one screen: spec → observe → plan → apply → status, each step the folder of its name.

Invariants: level-triggered: nothing is decided from the event that caused it; run twice in the same
situation, it writes nothing the second time; one service is never reconciled twice at once (the queue sees
to it).
Knows nothing of kopf, queues or leadership.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from stoker_operator import metrics
from stoker_operator.apply.children import Done, carry_out
from stoker_operator.apply.events import Telling
from stoker_operator.apply.status import differs, write_status
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.kinds import ENDPOINT_SLICE
from stoker_operator.cluster.ports import Ports, PortsTaken
from stoker_operator.cluster.queue import Key
from stoker_operator.cluster.turns import Turns
from stoker_operator.manifests import as_served
from stoker_operator.manifests.activation import PORTS, slice_addresses, slice_name, slice_port
from stoker_operator.observe.activators import Activators
from stoker_operator.observe.comparison import Comparisons
from stoker_operator.observe.gpu import LargestGpus
from stoker_operator.observe.observe import counters, gpu_to_get, idle, load, observe, observe_pods, room_for
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.observe.snapshot import Observed
from stoker_operator.plan.actions import Action, Apply, Finding
from stoker_operator.plan.fit import asks_gpu, remembered_gpu
from stoker_operator.plan.plan import Plan, make_plan
from stoker_operator.settings import Settings
from stoker_operator.spec.service import InferenceService, SpecError, parse, remembered_model
from stoker_operator.status import status

# What was just written may be what something else waits for; its event need not come back to us.
FOLLOW_UP_SECONDS = 0.5
# Children of which nothing but what they hold is asked: what the answer to a write says of them is all there is to see.
_PASSIVE = frozenset(
    each.kind
    for each in (kinds.SERVICE_ACCOUNT, kinds.SERVICE, kinds.DISRUPTION_BUDGET, kinds.NETWORK_POLICY, kinds.INGRESS)
)


class ApplyFailed(Exception):
    """The API server refused a part of the plan; the status says which, and the queue tries again."""


async def _nobody(_: Key) -> None:
    """Where one reconciler has no queue, nobody is waiting in it."""


@dataclass(frozen=True, slots=True)
class Reconciler:
    """Everything a reconcile needs that outlives it."""

    cluster: Cluster
    pods: PodClient
    settings: Settings
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    metrics_api: Callable[[], str] = lambda: ""
    unmounted: Callable[[], Mapping[str, str]] = dict
    turns: Turns = field(default_factory=lambda: Turns(0))
    comparisons: Comparisons = field(default_factory=Comparisons)
    activators: Activators | None = None
    gpus: LargestGpus = field(default_factory=LargestGpus)
    ports: Ports = field(default_factory=lambda: Ports(PORTS))
    wake: Callable[[Key], Awaitable[None]] = _nobody

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Bring one service nearer to its spec. Returns seconds until it is to be looked at again, None = no hurry.

        Raises ApiError when the API server cannot be read, ApplyFailed when it refused a write.
        """
        if namespace in self.settings.exclude_namespaces:
            return None
        started = time.monotonic()
        raw = await self.cluster.get(kinds.INFERENCE_SERVICE, namespace, name)
        if raw is None or "deletionTimestamp" in raw["metadata"]:
            self.ports.forget((namespace, name))
            self.comparisons.forget((namespace, name))
            await self._next(self.turns.forget((namespace, name)))
        if raw is None:
            return None
        now = self.clock()
        if "deletionTimestamp" in raw["metadata"]:
            # Its children carry owner references: nothing is left to do, and nothing may be made anew.
            await self._refuse(raw, Finding("Deleting", "The service is being deleted, and its children with it."), now)
            return None

        # 1. spec
        try:
            service = as_served(parse(raw, tolerate_unknown=_serves(raw)))
        except SpecError as error:
            await self._next(self.turns.forget((namespace, name)))
            await self._refuse(raw, Finding("SpecInvalid", f"{error}.", stalled=True), now)
            return None
        # 2. observe
        observed = await observe(self.cluster, self.pods, service, self._without())
        observed = replace(observed, metrics_api=self.metrics_api(), unmounted=self.unmounted())
        observed = await self._with_nodes(service, self._with_activator(service, observed))
        observed = await self._with_gpu(service, observed)
        # 3. plan
        plan = make_plan(service, observed, self.settings, now)
        for _ in range(3):  # whether a change waits decides whether it asks for a GPU
            if plan.asks_more:
                observed = await self._look_closer(service, observed, plan)
                plan = make_plan(service, observed, self.settings, now)
        await self._note_turn((namespace, name), plan)
        async with Telling(self.cluster, raw) as telling:
            # 4. apply
            done = await carry_out(self.cluster, raw, plan.actions, telling, first=not observed.begun)
            # 5. status
            if done.failures:
                await self._refuse(raw, Finding("ApplyFailed", f"{'; '.join(done.failures)}."), now)
                raise ApplyFailed("; ".join(done.failures))
            told = await write_status(self.cluster, raw, status.from_plan(service, observed, plan, now), telling)
        again = plan.requeue_after
        if plan.actions or told is not None:
            settled = self._settled(service, observed, plan, done, told or raw, now)
            again = FOLLOW_UP_SECONDS if settled is None else settled.requeue_after
            if settled is not None:
                await self._note_turn((namespace, name), settled)
        metrics.RECONCILE_SECONDS.observe(time.monotonic() - started)
        return again

    def _settled(
        self,
        service: InferenceService,
        observed: Observed,
        plan: Plan,
        done: Done,
        raw: Mapping[str, Any],
        now: datetime,
    ) -> Plan | None:
        """The plan of a second look, made of what the API server answered to the writes of the first one: where it has
        nothing to do, nobody need look. None where it has, or where the cluster may show more than the answers.
        """
        names = [_child(action) for action in plan.actions]
        if set(names) != done.applied.keys() or not {kind for kind, _ in names} <= _PASSIVE:
            return None
        again = as_served(parse(raw, tolerate_unknown=_serves(raw)))
        if replace(again, status={}) != replace(service, status={}):
            return None
        seen = observed.once_written(done.applied)
        second = make_plan(again, seen, self.settings, now)
        if second.actions or second.asks_more:
            return None
        return None if differs(again.status, status.from_plan(again, seen, second, now)) else second

    def _without(self) -> frozenset[str]:
        """The kinds that nobody has a right to: with no activator, nothing leads to it."""
        off = () if self.activators is not None else (ENDPOINT_SLICE.kind,)
        return frozenset((*self.settings.without, *off))

    def _with_activator(self, service: InferenceService, observed: Observed) -> Observed:
        """Who would hold this service's requests, and at which port; before the first look, as the slice says."""
        scaling = service.autoscaling
        if self.activators is None or scaling is None or scaling.scale_to_zero is None:
            return observed
        live = observed.children.get((ENDPOINT_SLICE.kind, slice_name(service)))
        port = slice_port(live) if live is not None else 0
        if not port:
            with contextlib.suppress(PortsTaken):
                port = self.ports.of((service.namespace, service.name), self.activators.ports())
        known = self.activators.addresses
        return replace(observed, port=port, activators=slice_addresses(live or {}) if known is None else known)

    async def _with_nodes(self, service: InferenceService, observed: Observed) -> Observed:
        """The nodes, where copies are kept on them. They are not our business where single namespaces are watched."""
        if service.cache.mode != "Node" or self.settings.namespaces:
            return observed
        return replace(observed, nodes=tuple(await self.cluster.recent(kinds.NODE)))

    async def _with_gpu(self, service: InferenceService, observed: Observed) -> Observed:
        """The largest GPU, where the plan is known to ask for it: a new generation of a model that was published."""
        published = remembered_model(service.status) is not None
        if not published or not asks_gpu(service) or remembered_gpu(service) is not None or self.settings.namespaces:
            return observed
        return replace(observed, gpu=await gpu_to_get(self.cluster, service, self.gpus))

    async def _look_closer(self, service: InferenceService, observed: Observed, plan: Plan) -> Observed:
        """What only some plans depend on. Nodes are none of our business where single namespaces are watched."""
        if plan.sleep.asks_idle:
            observed = replace(observed, idle=await idle(self.pods, observed))
        if plan.asks_load:
            observed = replace(observed, load=await load(self.pods, observed))
        if plan.canary.mark:
            observed = await self._compare(service, observed, plan.canary.mark)
        if plan.asks_turn:
            key = (service.namespace, service.name)
            observed = replace(observed, turn=self.turns.ask(key), ahead=self.turns.held)
        if plan.asks_gpu and not self.settings.namespaces:
            observed = replace(observed, gpu=await gpu_to_get(self.cluster, service, self.gpus))
        if plan.asks_room is not None and not self.settings.namespaces:
            observed = replace(observed, room=await room_for(self.cluster, observed, plan.asks_room))
        return observed

    async def _compare(self, service: InferenceService, observed: Observed, mark: str) -> Observed:
        """How the canary's pods and the stable ones did since this comparison began."""
        key, now = (service.namespace, service.name), self.clock()
        found = self.comparisons.fresh(key, mark, now)
        if found is None:
            sides = (observed.engine_pods, observed.canary.pods)
            stable, canary = await asyncio.gather(*(counters(self.pods, side) for side in sides))
            found = self.comparisons.note(key, mark, now, stable, canary)
        return replace(observed, canary=replace(observed.canary, comparison=found))

    async def _note_turn(self, key: Key, plan: Plan) -> None:
        """Who rolls out has a turn, asked or not; who had one and was rolled back keeps it, and stops the next ones."""
        if plan.rolling and (not plan.troubled or self.turns.holds(key)):
            self.turns.take(key)
        elif not plan.actions and not (plan.failed and not plan.alone and self.turns.holds(key)):
            await self._next(self.turns.leave(key))

    async def _next(self, key: Key | None) -> None:
        if key is not None:
            await self.wake(key)

    async def _refuse(self, raw: dict[str, Any], finding: Finding, now: datetime) -> None:
        meta = raw["metadata"]
        place = (meta["namespace"], meta["name"], meta["uid"])
        state = await observe_pods(self.cluster, self.pods, *place, self._without())
        found = status.refused(raw.get("status") or {}, int(meta.get("generation", 1)), finding, state, now)
        async with Telling(self.cluster, raw) as telling:
            await write_status(self.cluster, raw, found, telling)


def _child(action: Action) -> tuple[str, str]:
    """Kind and name of the child that an action applies; ("", "") of any other action."""
    if not isinstance(action, Apply):
        return "", ""
    return str(action.manifest["kind"]), str(action.manifest["metadata"]["name"])


def _serves(raw: Mapping[str, Any]) -> bool:
    """Whether a revision of it was rolled out: what serves goes on when a newer CRD brings fields unknown here."""
    return bool(((raw.get("status") or {}).get("revisions") or {}).get("rolledOut"))
