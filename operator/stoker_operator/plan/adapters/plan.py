"""Plans a model's adapters: each is fetched to the model's volume by Jobs of its own, listed once it is published, and
served by the pods that follow the list.

Invariants: pure. What an adapter does keeps no pod and no other adapter from anything: whatever is wrong with one is
said of it alone. An adapter stays listed as it was until what replaces it is published; one that the spec no longer
names is not listed from the next reconcile on.
Knows nothing of how an engine serves adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stoker_operator import manifests
from stoker_operator.observe.rollout import is_ready, is_terminating, template_hash
from stoker_operator.observe.snapshot import AdapterReport, Observed
from stoker_operator.plan.actions import Action, Condition, Delete, ensure
from stoker_operator.plan.adapters.fetches import fetches
from stoker_operator.plan.cache import CachePlan
from stoker_operator.plan.endpoint import not_given
from stoker_operator.plan.wording import counted, listed, sentence
from stoker_operator.settings import Settings
from stoker_operator.spec.adapters import Adapter
from stoker_operator.spec.service import FetchedModel, InferenceService

Object = Mapping[str, Any]
# Kubelets bring a list within a minute or two; a pod tries what it refused again by itself.
LOADING_SECONDS, SLOWEST_SECONDS = 5.0, 60.0
_RANK = "raise --max-lora-rank"


@dataclass(frozen=True, slots=True)
class AdapterState:
    """One adapter, as the status tells it: `pods` serve it. `published` is what is on the volume of its source."""

    name: str
    state: str
    message: str
    reason: str = ""
    pods: int = 0
    source: str = ""
    attempt: int = 0
    published: FetchedModel | None = None

    @property
    def bad(self) -> bool:
        """Whether it waits for more than time."""
        return self.state in ("FetchFailed", "Refused")


@dataclass(frozen=True, slots=True)
class AdaptersPlan:
    """What to do for the adapters. `workload` is what pods need before they start, `sources` what Jobs may fetch."""

    listing: tuple[Action, ...] = ()
    fetching: tuple[Action, ...] = ()
    states: tuple[AdapterState, ...] = ()
    sources: frozenset[str] = frozenset()
    condition: Condition | None = None
    requeue_after: float | None = None


def plan_adapters(
    service: InferenceService, observed: Observed, settings: Settings, now: datetime, cache: CachePlan
) -> AdaptersPlan:
    """Decide the next step of every adapter."""
    adapters = service.model.adapters
    if adapters is None:
        return AdaptersPlan()
    if "AdapterList" in observed.without:
        text = not_given("lists of adapters", "adapters")
        return AdaptersPlan(condition=Condition("AdaptersReady", "False", "FeatureOff", text))
    live = observed.children.get(("ConfigMap", manifests.list_name(service)))
    plans = fetches(service, observed, settings, now, cache)
    before = manifests.read_list(live)
    entries = [_entry(adapter, plans[adapter.name], before) for adapter in adapters]
    found = [entry for entry in entries if entry is not None]
    states = tuple(_state(service, observed, adapter, plans[adapter.name]) for adapter in adapters)
    waits = [plan.requeue_after for plan in plans.values() if plan.requeue_after is not None]
    condition = _condition(states, observed)
    if condition.status != "True":
        waits.append(_patience(service, now))
    return AdaptersPlan(
        listing=tuple(ensure(live, manifests.adapter_list(service, found), _why(found))),
        fetching=tuple(action for plan in plans.values() for action in plan.actions),
        states=states,
        sources=frozenset(plan.source for plan in plans.values() if plan.source),
        condition=condition,
        requeue_after=min(waits, default=None),
    )


def list_left(service: InferenceService, observed: Observed) -> list[Action]:
    """The end of the list of a service that has no adapters any more, once no pod follows it."""
    live = observed.children.get(("ConfigMap", manifests.list_name(service)))
    if live is None or service.model.adapters is not None or "deletionTimestamp" in live["metadata"]:
        return []
    meta = live["metadata"]
    return [Delete("ConfigMap", meta["name"], meta["uid"], "the spec speaks of no adapters any more")]


def _why(listed_now: Sequence[manifests.Listed]) -> str:
    names = [each.name for each in listed_now]
    return (
        f"it names {listed(names, 'and')}, which pods then serve" if names else "it names the adapters that pods serve"
    )


def _entry(adapter: Adapter, plan: CachePlan, before: Mapping[str, manifests.Listed]) -> manifests.Listed | None:
    """What the list says of an adapter: what is published, else what it said before."""
    known = plan.model or plan.resolved
    return manifests.listed_as(adapter, known) if known is not None else before.get(adapter.name)


def _state(service: InferenceService, observed: Observed, adapter: Adapter, plan: CachePlan) -> AdapterState:
    """Where an adapter stands: on its way to the volume, then on its way into the pods."""
    base = AdapterState(adapter.name, "Waiting", "", source=plan.source, attempt=plan.attempt)
    if plan.model is None:
        base = replace(base, published=plan.resolved)
        if plan.finding is None:
            return replace(base, message="It is fetched after the model and the adapters before it.")
        fetching = plan.finding.reason in ("Fetching", "CacheCorrupt")
        state = "Fetching" if fetching else "FetchFailed"
        return replace(base, state=state, message=plan.finding.message, reason=plan.finding.reason)
    base = replace(base, published=plan.model)
    said = _said(observed, adapter.name, plan.model.digest)
    serving = sum(each.state == "loaded" for each in said.values() if each is not None)
    refused = {pod: each for pod, each in said.items() if each is not None and each.state == "refused"}
    if refused:
        pod, report = next(iter(sorted(refused.items())))
        text = f"Pod {pod} does not serve it: {sentence(report.message)}{_advice(report)}"
        return replace(base, state="Refused", pods=serving, message=text, reason="AdapterRefused")
    if said and serving == len(said):
        text = f"{counted(serving, 'pod')} {'serves' if serving == 1 else 'serve'} it."
        return replace(base, state="Loaded", pods=serving, message=text)
    text = (
        f"It is published; {serving} of {counted(len(said), 'ready pod')} {'serves' if serving == 1 else 'serve'} it."
    )
    if not said:
        text = "It is published; no pod is ready."
    return replace(base, state="Loading", pods=serving, message=text)


def _said(observed: Observed, name: str, digest: str) -> dict[str, AdapterReport | None]:
    """What each ready pod of the current revision says of an adapter as it is published; None: nothing yet."""
    current = observed.rollout.current
    found: dict[str, AdapterReport | None] = {}
    for pod in observed.engine_pods:
        if is_ready(pod) and not is_terminating(pod) and template_hash(pod) == current:
            reports = observed.adapters.get(pod["metadata"]["name"], ())
            found[pod["metadata"]["name"]] = next((r for r in reports if (r.name, r.digest) == (name, digest)), None)
    return found


def _advice(report: AdapterReport) -> str:
    if _RANK not in report.message:
        return ""
    return " That is spec.runtime.args [--max-lora-rank, RANK]: new pods, with more memory for each adapter."


def _condition(states: Sequence[AdapterState], observed: Observed) -> Condition:
    """AdaptersReady: what is wrong first, then what is on its way."""
    bad = [state for state in states if state.bad]
    moving = [state for state in states if state.state != "Loaded"]
    if bad:
        more = f" {counted(len(bad) - 1, 'more adapter')} with trouble." if len(bad) > 1 else ""
        return Condition("AdaptersReady", "False", bad[0].reason, f"Adapter {bad[0].name}: {bad[0].message}{more}")
    if moving:
        waiting = "AdaptersLoading" if all(state.state == "Loading" for state in moving) else "AdaptersFetching"
        status = "Unknown" if waiting == "AdaptersLoading" and not observed.rollout.ready else "False"
        text = f"Adapter {moving[0].name}: {moving[0].message}"
        return Condition("AdaptersReady", status, waiting, text)
    text = f"{counted(len(states), 'adapter')} served by every pod." if states else "No adapter is asked for."
    return Condition("AdaptersReady", "True", "AdaptersServed", text)


def _patience(service: InferenceService, now: datetime) -> float:
    """Seconds until pods are asked again: often at first, rarely of what stands still."""
    for item in service.status.get("conditions") or ():
        if item["type"] == "AdaptersReady" and item["status"] != "True":
            age = (now - datetime.fromisoformat(item["lastTransitionTime"])).total_seconds()
            return min(max(age / 20, LOADING_SECONDS), SLOWEST_SECONDS)
    return LOADING_SECONDS
