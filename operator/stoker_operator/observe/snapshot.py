"""What one reconcile saw: plain, immutable data that a plan is made from.

Invariants: nothing here changes after it was observed.
Knows nothing of how it was observed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stoker_operator.manifests import LEADER_WORKER_SET, group_name
from stoker_operator.observe.capacity import Room
from stoker_operator.observe.comparison import Comparison
from stoker_operator.observe.gpu import Gpu
from stoker_operator.observe.rollout import Rollout
from stoker_operator.spec.service import InferenceService

Object = Mapping[str, Any]
_CLAIM = "PersistentVolumeClaim"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a prefetch is. Bytes and seconds; total and eta are 0 while unknown."""

    phase: str
    bytes_done: int
    bytes_total: int
    eta_seconds: int


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of asking `pod`, of revision `template_hash`, for one token. `error` is "" when it answered."""

    pod: str
    template_hash: str
    error: str


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What a pod says of one adapter of its list: `state` is loaded, loading or refused, `digest` the list's.

    `reason` and `message` say why it is refused.
    """

    name: str
    digest: str
    state: str
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Idle:
    """For how many seconds every pod has had no request; 0 where one has, or does not say: then `why` tells which."""

    seconds: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class Beside:
    """A canary's pods, its Deployment's rollout, what came of asking one, how far its prefetch is, and how it compares
    with the stable pods (None = nobody looked).
    """

    pods: tuple[Object, ...] = ()
    rollout: Rollout = field(default_factory=Rollout)
    answer: Answer | None = None
    progress: Progress | None = None
    comparison: Comparison | None = None


class Children(Mapping[tuple[str, str], Object]):
    """The objects that a service owns, and the caches of its whole namespace, which it may come to use, by kind and
    name. Who goes through all looks at the keys first: a namespace has hundreds of caches, and each is read when it is
    asked for.
    """

    def __init__(self, own: Mapping[tuple[str, str], Object], caches: Mapping[str, Object]) -> None:
        self._own, self._caches = own, caches

    def __getitem__(self, key: tuple[str, str]) -> Object:
        if key in self._own or key[0] != _CLAIM:
            return self._own[key]
        return self._caches[key[1]]

    def __contains__(self, key: object) -> bool:
        return key in self._own or (isinstance(key, tuple) and key[0] == _CLAIM and key[1] in self._caches)

    def __iter__(self) -> Iterator[tuple[str, str]]:
        yield from self._own
        yield from (key for name in self._caches if (key := (_CLAIM, name)) not in self._own)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def but(self, others: Mapping[tuple[str, str], Object]) -> Children:
        """The same with `others`, in the places of those of their names."""
        return Children({**self._own, **others}, self._caches)


def workload_of(children: Mapping[tuple[str, str], Object], service: InferenceService) -> Object | None:
    """As Observed.workload."""
    keys = [(LEADER_WORKER_SET[1], group_name(service)), ("Deployment", service.name)]
    keys = keys if service.resources.spans_nodes else keys[::-1]
    return next((children[key] for key in keys if key in children), None)


@dataclass(frozen=True, slots=True)
class Observed:
    """The cluster as one reconcile sees it. `claims` are the caches that name this service, as its own or as a user.

    `revisions` are the ControllerRevisions; `room` says where one more pod of the wanted template could go, `load` how
    many requests the ready pods have, running and queued, and `gpu` which is the largest that a pod may get: None =
    nobody looked. `served` names the optional kinds that this API server knows, `without` those that the operator was
    not given; `metrics_api` says in words where the built-in adapter stands, "" = it is off; `turn`
    whether a new default may reach this service now (None = nobody looked), `ahead` the services that it reaches now.
    `fill_pods` bring copies to nodes; `nodes` are the cluster's, where copies are kept on them (None = nobody looked).
    `idle` says how long the pods have had no request (None = nobody looked); `activators` are the addresses of the
    activator's pods, and `port` is the one at which they answer for this service, 0 = it has none.
    `silent` are the pods that are said to be ready and do not answer, `warnings` what others say is wrong; `unmounted`
    is why pods, by uid, could not have their keys mounted anew. `adapters` is what ready pods say of theirs, by the
    pod's name; one that follows no list is not there. `engine_pods` are those that answer, `worker_pods` the others of
    their groups, where a replica spans nodes.
    """

    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    claims: tuple[Object, ...] = ()
    engine_pods: tuple[Object, ...] = ()
    fetch_pods: tuple[Object, ...] = ()
    verify_pods: tuple[Object, ...] = ()
    lookup_pods: tuple[Object, ...] = ()
    fill_pods: tuple[Object, ...] = ()
    jobs: tuple[Object, ...] = ()
    rollout: Rollout = field(default_factory=Rollout)
    revisions: tuple[Object, ...] = ()
    room: Room | None = None
    load: int | None = None
    idle: Idle | None = None
    activators: tuple[str, ...] = ()
    port: int = 0
    gpu: Gpu | None = None
    served: frozenset[str] = frozenset()
    without: frozenset[str] = frozenset()
    metrics_api: str = ""
    nodes: tuple[Object, ...] | None = None
    turn: bool | None = None
    ahead: tuple[str, ...] = ()
    progress: Progress | None = None
    answer: Answer | None = None
    silent: frozenset[str] = frozenset()
    warnings: Mapping[str, str] = field(default_factory=dict)
    unmounted: Mapping[str, str] = field(default_factory=dict)
    adapters: Mapping[str, tuple[AdapterReport, ...]] = field(default_factory=dict)
    canary: Beside = field(default_factory=Beside)
    worker_pods: tuple[Object, ...] = ()

    @property
    def serving_pods(self) -> tuple[Object, ...]:
        """All pods that the replicas are made of."""
        return (*self.engine_pods, *self.worker_pods)

    def workload(self, service: InferenceService) -> Object | None:
        """What runs the pods: of the kind that the spec asks for; while there is none of it, of the other."""
        return workload_of(self.children, service)

    def child(self, manifest: Mapping[str, Any]) -> Object | None:
        """The live object that a manifest stands for."""
        return self.children.get((manifest["kind"], manifest["metadata"]["name"]))

    def as_canary(self) -> Observed:
        """The same cluster with the canary's pods in the place of the stable ones."""
        other = self.canary
        return replace(
            self, engine_pods=other.pods, rollout=other.rollout, answer=other.answer, progress=other.progress
        )

    def of_kinds(self, *kinds: str) -> Iterator[tuple[str, str, Object]]:
        """(kind, name, object) of every child of these kinds."""
        return ((*key, self.children[key]) for key in self.children if key[0] in kinds)

    def once_written(self, children: Mapping[tuple[str, str], Object]) -> Observed:
        """The same cluster with these objects, as the API server answered when they were written."""
        known = self.children
        return replace(self, children=known.but(children) if isinstance(known, Children) else {**known, **children})

    @property
    def begun(self) -> bool:
        """Whether anything of the service is there: volumes apart, which may be others' too."""
        return any(kind != _CLAIM for kind, _ in self.children)
