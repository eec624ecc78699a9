"""mirror.py beside a plain Cluster on random histories: both give the same, and who reads is told of what he sees."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Cluster
from stoker_operator.cluster.kinds import Kind
from stoker_operator.manifests.identity import OURS
from stoker_operator.observe.mirror import Mirror

Object = dict[str, Any]
NAMES = ("elm", "oak", "fir", "ash")
KINDS = (kinds.CLAIM, kinds.SERVICE, kinds.REPLICA_SET, kinds.DISRUPTION_BUDGET, kinds.POD)
UNREAD = {"ReplicaSet": ("status",), "PodDisruptionBudget": ("status",)}
INSTANCE = "app.kubernetes.io/instance"
# (name, services by annotation, by owner, by label, a value in the spec, one in the status, whose field it is)
SAYS = st.tuples(
    st.sampled_from(NAMES),
    st.frozensets(st.sampled_from(NAMES), max_size=2),
    st.frozensets(st.sampled_from(NAMES), max_size=2),
    st.sampled_from(("", *NAMES)),
    st.integers(0, 2),
    st.integers(0, 1),
    st.integers(0, 2),
)
STEPS = st.lists(st.one_of(SAYS, st.tuples(st.sampled_from(NAMES))), max_size=25)


def item(kind: Kind, says: Any, version: int) -> Object:
    """An object of ours."""
    name, users, owners, label, spec, status, field = says
    labels = {"app.kubernetes.io/managed-by": "stoker"} | ({INSTANCE: label} if label else {})
    meta: Object = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "resourceVersion": str(version)}
    meta |= {"labels": labels, "managedFields": [{"manager": f"m{field}"}]}
    meta["annotations"] = {f"user.stoker.dev/{user}": f"uid-{user} 0" for user in sorted(users)}
    meta["ownerReferences"] = [{"kind": "InferenceService", "name": name, "uid": "u"} for name in sorted(owners)]
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": meta,
            "spec": {"a": spec, "template": {"c": status}}, "status": {"b": status}}  # fmt: skip


class Plain(Cluster):
    """Answers from what it holds, as an API server does."""

    def __init__(self) -> None:
        super().__init__(None, 1)
        self.there: dict[str, Object] = {}
        self.events: asyncio.Queue[tuple[str, Object]] = asyncio.Queue()
        self.taken: asyncio.Queue[None] = asyncio.Queue()

    async def list_all(self, kind: Kind, namespace: str, selector: str = "") -> list[Object]:
        wanted = dict(part.split("=") for part in selector.split(","))
        found = [copy.deepcopy(self.there[name]) for name in sorted(self.there)]
        return [each for each in found if wanted.items() <= each["metadata"]["labels"].items()]

    async def pages(self, kind: Kind, namespace: str, selector: str) -> AsyncIterator[tuple[list[Object], str]]:
        yield await self.list_all(kind, namespace, OURS), "1"

    async def watch(self, kind: Kind, namespace: str, selector: str, since: str) -> AsyncIterator[tuple[str, Object]]:
        while True:
            yield await self.events.get()
            self.taken.put_nowait(None)


class Beside(Mirror):
    """A mirror of the same."""

    def __init__(self, plain: Plain) -> None:
        self.told: list[str] = []
        super().__init__(plain, (), self.note)
        self.pages, self.watch = plain.pages, plain.watch  # type: ignore[method-assign]

    async def note(self, meta: Mapping[str, Any]) -> None:
        self.told.append(meta["name"])


def seen(kind: Kind, each: Object | None) -> Any:
    """What a reader can see of an object, but for its version."""
    if each is None:
        return None
    meta = {key: value for key, value in each["metadata"].items() if key != "resourceVersion"}
    if kind is not kinds.CLAIM:
        meta.pop("managedFields", None)
    found = {key: value for key, value in each.items() if key not in UNREAD.get(kind.kind, ())} | {"metadata": meta}
    return found | {"spec": {"a": each["spec"]["a"]}} if kind is kinds.REPLICA_SET else found


async def walk(kind: Kind, steps: list[Any]) -> None:
    plain = Plain()
    mirror, versions = Beside(plain), {}
    await mirror.concerning(kind, "ns", NAMES[0])
    try:
        for version, step in enumerate(steps, start=2):
            before = plain.there.pop(step[0], None)
            if len(step) == 1 and before is None:
                continue
            told = len(mirror.told)
            earlier = await mirror.by_name(kind, "ns")
            if len(step) == 1:
                gone = before | {"metadata": before["metadata"] | {"resourceVersion": str(version)}}
                plain.events.put_nowait(("DELETED", gone))
            else:
                plain.there[step[0]] = item(kind, step, version)
                versions[step[0]] = str(version)
                plain.events.put_nowait(("MODIFIED", plain.there[step[0]]))
            await plain.taken.get()
            changed = seen(kind, before) != seen(kind, plain.there.get(step[0]))
            assert mirror.told[told:] == [step[0]] * changed, "told of what nobody sees, or not of what somebody does"
            assert (seen(kind, dict(earlier[step[0]])) if step[0] in earlier else None) == seen(kind, before)
            for service in NAMES:
                expected = [seen(kind, each) for each in await plain.concerning(kind, "ns", service)]
                assert [seen(kind, each) for each in await mirror.concerning(kind, "ns", service)] == expected
                selector = f"{OURS},{INSTANCE}={service}"
                labelled = (await plain.together((kind,), "ns", selector))[kind]
                found = (await mirror.together((kind,), "ns", selector))[kind]
                assert [seen(kind, each) for each in found] == [seen(kind, each) for each in labelled]
            by_name, wanted = await mirror.by_name(kind, "ns"), await plain.by_name(kind, "ns")
            assert {name: seen(kind, by_name[name]) for name in by_name} == {
                name: seen(kind, each) for name, each in wanted.items()
            }
            assert all(by_name[name]["metadata"]["resourceVersion"] == versions[name] for name in wanted)
    finally:
        await mirror.stop()


@given(st.sampled_from(KINDS), STEPS)
@settings(max_examples=150, deadline=None)
def test_a_mirror_gives_what_the_api_server_would(kind: Kind, steps: list[Any]) -> None:
    asyncio.run(walk(kind, steps))
