"""An API server in memory, by a clock that the test sets: what walks of weeks need of one, and nothing that waits.

Invariants: an object is replaced, never changed, so what was read stays as it was; apply takes back what it set before
and no longer says, unless another writer has set it since; a write of the operator that changes nothing is noted.
Knows nothing of what the objects mean, but for who set a Deployment's `replicas`, which is 1 where nobody does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from itertools import count
from typing import Any

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster, Object
from stoker_operator.cluster.kinds import Kind
from stoker_operator.manifests.identity import FIELD_MANAGER, INSTANCE

SERVED = frozenset({"HTTPRoute"})
_OTHERS = ("wake",)


class Died(BaseException):
    """The operator's process ended between two writes: nothing of the operator's catches this."""


class Store(Cluster):
    """`writes` are the operator's, `idle` those of them that changed nothing, `touched` the services that they were
    about; `version` moves with every change.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        self._clock = clock
        self._objects: dict[str, dict[tuple[str, str], Object]] = {}
        self._applied: dict[str, Mapping[str, Any]] = {}
        self._uids = count(1)
        self.version = 0
        self.writes: list[str] = []
        self.idle: list[str] = []
        self.touched: set[str] = set()
        self._news: dict[str, int] = {}
        self.dies_before: int | None = None
        self.refuses = 0

    def stamp(self) -> str:
        """Now, as Kubernetes writes it."""
        return self._clock().strftime("%Y-%m-%dT%H:%M:%SZ")

    # What the operator asks.

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None."""
        return self.find(kind, name, namespace)

    async def list_all(self, kind: Kind, namespace: str, selector: str = "") -> list[Object]:
        """The objects that carry the labels of `selector`: of a label without a value, any of it."""
        wanted = [part.partition("=") for part in selector.split(",") if part]
        return [item for item in self.of(kind) if all(_chosen(_labels(item), *part) for part in wanted)]

    async def pages(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[tuple[list[Object], str]]:
        """All at once."""
        yield await self.list_all(kind, namespace, selector), str(self.version)

    async def recent(self, kind: Kind) -> list[Object]:
        """What is there."""
        return self.of(kind)

    async def pods_on(self, node: str) -> list[Object]:
        """Every pod of a node, "": those that wait for one."""
        return [pod for pod in self.of(kinds.POD) if pod["spec"].get("nodeName", "") == node]

    async def served(self, wanted: Sequence[Kind]) -> frozenset[str]:
        """Of the kinds that a cluster may lack, those that this one has."""
        return SERVED & {kind.kind for kind in wanted}

    async def apply(
        self, kind: Kind, manifest: Mapping[str, Any], subresource: str = "", manager: str = FIELD_MANAGER
    ) -> Object:
        """Server-side apply with force."""
        meta = manifest["metadata"]
        self._write("apply", kind, meta["name"], bare=bool(subresource))
        live = self.find(kind, meta["name"], meta.get("namespace", ""))
        self.touched |= {service_of(item) for item in (manifest, live) if item is not None}
        if subresource:
            if live is None:
                raise ApiError(404, "NotFound", f"{kind.kind} {meta['name']} does not exist")
            kept = {key: value for key, value in live.get("status", {}).items() if key in _OTHERS}
            return self._changed(live, live | {"status": {**manifest["status"], **kept}}, "status")
        if live is None:
            if "uid" in meta:
                raise ApiError(409, "Conflict", f"{kind.kind} {meta['name']} is gone")
            made = self.add(dict(manifest))
            self._applied[made["metadata"]["uid"] + manager] = manifest
            return made
        key = live["metadata"]["uid"] + manager
        before = self._applied.get(key, {})
        if kind == kinds.DEPLOYMENT and "managedFields" not in live["metadata"]:
            before = {**before, "spec": {name: value for name, value in before["spec"].items() if name != "replicas"}}
        merged = _merge(live, before, manifest)
        self._applied[key] = manifest
        if kind == kinds.DEPLOYMENT:
            merged = _with_replicas(merged, ours="replicas" in manifest["spec"])
        if merged.get("spec") != live.get("spec"):
            number = live["metadata"]["generation"] + 1
            merged = merged | {"metadata": merged["metadata"] | {"generation": number}}
        return self._changed(live, merged, "apply")

    async def create(self, kind: Kind, manifest: Mapping[str, Any]) -> Object:
        """Events alone are created, and nobody reads them here."""
        return dict(manifest)

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Mapping[str, Any]) -> Object:
        """A JSON merge patch: nobody but the operator changes what is the operator's here, so none is needed."""
        raise AssertionError(f"{kind.kind} {name} is restored, and nobody edited it: {patch}")

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, *, foreground: bool = False) -> None:
        """Delete this very object; what it owns follows."""
        self._write("delete", kind, name)
        live = self.find(kind, name, namespace)
        if live is None or live["metadata"]["uid"] != uid:
            return
        self.touched.add(service_of(live))
        if "deletionTimestamp" in live["metadata"]:
            self.idle.append(f"delete {kind.kind} {name}")
        self.remove(live)

    def _write(self, verb: str, kind: Kind, name: str, *, bare: bool = False) -> None:
        if self.dies_before is not None:
            if not self.dies_before:
                raise Died
            self.dies_before -= 1
        if self.refuses:
            self.refuses -= 1
            raise ApiError(503, "ServiceUnavailable", "the API server has too much to do")
        self.writes.append(f"{verb} {kind.kind} {name}{' status' if bare else ''}")

    def _changed(self, live: Object, fresh: Object, verb: str) -> Object:
        if fresh == live:
            self.idle.append(f"{verb} {live['kind']} {live['metadata']['name']}")
            return live
        return self.put(fresh)

    # What everybody else does: none of it counts as the operator's.

    def find(self, kind: Kind, name: str, namespace: str = "ns") -> Object | None:
        """The object of this name, or None."""
        return self._objects.get(kind.kind, {}).get((namespace, name))

    def news_of(self, service: str) -> int:
        """The version at which something of a service changed last; nodes are everybody's."""
        return max(self._news.get(service, 0), self._news.get("", 0))

    def of(self, kind: Kind) -> list[Object]:
        """All objects of a kind."""
        return list(self._objects.get(kind.kind, {}).values())

    def owned_by(self, kind: Kind, owner: Object) -> list[Object]:
        """The objects of a kind that `owner` owns."""
        uid = owner["metadata"]["uid"]
        return [item for item in self.of(kind) if any(each["uid"] == uid for each in owners(item))]

    def everything(self) -> list[Object]:
        """All objects but nodes."""
        return [item for kind, shelf in self._objects.items() if kind != "Node" for item in shelf.values()]

    def add(self, manifest: Mapping[str, Any]) -> Object:
        """Store a new object."""
        number = next(self._uids)
        meta = manifest["metadata"]
        own = {"uid": f"u{number}", "generation": 1, "creationTimestamp": self.stamp()}
        item = {**manifest, "metadata": {**meta, **own}}
        if item["kind"] == "Deployment":
            item = _with_replicas(item, ours="replicas" in manifest["spec"])
        return self.put(item)

    def put(self, item: Object) -> Object:
        """Store what has become of an object."""
        self.version += 1
        meta = {**item["metadata"], "resourceVersion": str(self.version)}
        fresh: Object = {**item, "metadata": meta}
        shelf = self._objects.setdefault(item["kind"], {})
        shelf[meta.get("namespace", ""), meta["name"]] = fresh
        self._news[service_of(fresh)] = self.version
        return fresh

    def patch_spec(self, item: Object, changes: Mapping[str, Any]) -> Object:
        """Somebody changes parts of an object's spec; None takes one out. It is a new generation."""
        spec = {key: value for key, value in {**item["spec"], **changes}.items() if value is not None}
        if spec == item["spec"]:
            return item
        meta = {**item["metadata"], "generation": item["metadata"]["generation"] + 1}
        fresh = {**item, "spec": spec, "metadata": meta}
        if "replicas" in changes:
            meta.pop("managedFields", None)
        return self.put(fresh)

    def say(self, item: Object, **changes: Any) -> Object:
        """Whoever runs an object changes its status."""
        status = {**item.get("status", {}), **changes}
        return item if status == item.get("status", {}) else self.put({**item, "status": status})

    def remove(self, item: Object) -> None:
        """Delete: pods that have a node and volumes are only marked, until nothing holds them any more."""
        held = item["kind"] == "PersistentVolumeClaim" or (item["kind"] == "Pod" and item["spec"].get("nodeName"))
        if not held:
            self.forget(item)
        elif "deletionTimestamp" not in item["metadata"]:
            self.put({**item, "metadata": {**item["metadata"], "deletionTimestamp": self.stamp()}})

    def forget(self, item: Object) -> None:
        """Take an object out."""
        meta = item["metadata"]
        self._objects[item["kind"]].pop((meta.get("namespace", ""), meta["name"]), None)
        self.version += 1
        self._news[service_of(item)] = self.version

    def collect_garbage(self) -> None:
        """What has an owner, and none that is there, goes; so do volumes that are deleted and mounted by no pod."""
        uids = {item["metadata"]["uid"] for item in self.everything()}
        mounted = set()
        for pod in self.of(kinds.POD):
            volumes = (volume.get("persistentVolumeClaim") or {} for volume in pod["spec"].get("volumes") or ())
            mounted |= {claim.get("claimName") for claim in volumes}
        for item in self.everything():
            there = owners(item)
            if there and not any(each["uid"] in uids for each in there) and not is_going(item):
                self.remove(item)
        for claim in self.of(kinds.CLAIM):
            if is_going(claim) and claim["metadata"]["name"] not in mounted:
                self.forget(claim)


def owners(item: Object) -> list[Object]:
    """An object's owner references."""
    return item["metadata"].get("ownerReferences") or []


def service_of(item: Mapping[str, Any]) -> str:
    """The service that an object is, or whose label it carries; "" of nodes and of volumes, which services share."""
    meta = item["metadata"]
    return str(meta["name"] if item["kind"] == kinds.INFERENCE_SERVICE.kind else _labels(item).get(INSTANCE, ""))


def is_going(item: Object) -> bool:
    """Whether somebody deleted it."""
    return "deletionTimestamp" in item["metadata"]


def _labels(item: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = item["metadata"].get("labels") or {}
    return found


def _chosen(labels: Mapping[str, str], key: str, has_value: str, value: str) -> bool:
    return labels.get(key) == value if has_value else key in labels


def _with_replicas(item: Object, *, ours: bool) -> Object:
    """A Deployment with its number of pods, and with who set it."""
    fields = [{"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}]
    spec = {"replicas": 1, **item["spec"]}
    meta = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    return {**item, "spec": spec, "metadata": {**meta, "managedFields": fields} if ours else meta}


def _merge(live: Mapping[str, Any], before: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What apply makes of a live object: `wanted`, without what only `before` said, and with what others said."""
    found = {
        key: value
        for key, value in live.items()
        if key in wanted or key not in before or (isinstance(value, Mapping) or value != before[key])
    }
    for key, value in wanted.items():
        known, earlier = live.get(key), before.get(key)
        if isinstance(value, Mapping) and isinstance(known, Mapping):
            found[key] = _merge(known, earlier if isinstance(earlier, Mapping) else {}, value)
        else:
            found[key] = value
    return found
