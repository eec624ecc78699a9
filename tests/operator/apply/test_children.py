"""children.py: events are written beside the actions, each once, and not by a replica that was told to end."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from typing import Any, cast

import pytest

from stoker_operator.apply.children import carry_out
from stoker_operator.apply.events import Telling
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.plan.actions import Action, Apply, Delete

Object = dict[str, Any]
SERVICE = {
    "apiVersion": "stoker.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "demo", "namespace": "ns", "uid": "u"},
}


async def carried_out(slow: Slow, *actions: Action) -> list[str]:
    cluster = cast(Cluster, slow)
    async with Telling(cluster, SERVICE) as telling:
        done = await carry_out(cluster, SERVICE, actions, telling, first=False)
        slow.log.append("carried out")
    return done.failures


class Slow:
    """A cluster whose writes take `seconds`; `done` is what was written, in order, and `log` says what began and ended
    when.
    """

    def __init__(self, seconds: float, refused: frozenset[str] = frozenset()) -> None:
        self.seconds, self.refused = seconds, refused
        self.log: list[str] = []
        self.done: list[str] = []

    async def _write(self, what: str) -> None:
        self.log.append(f"begin {what}")
        await asyncio.sleep(self.seconds)
        if what in self.refused:
            raise ApiError(403, "Forbidden", "not yours")
        self.done.append(what)
        self.log.append(f"end {what}")

    async def apply(self, kind: Any, manifest: Mapping[str, Any]) -> Object:
        await self._write(manifest["metadata"]["name"])
        return dict(manifest)

    async def delete(self, kind: Any, namespace: str, name: str, uid: str, *, foreground: bool) -> None:
        await self._write(name)

    async def create(self, kind: Any, event: Mapping[str, Any]) -> Object:
        await self._write(f"event: {event['message']}")
        return dict(event)


def action(name: str, **more: Any) -> Apply:
    manifest = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": "ns", "labels": {}}}
    return Apply(manifest, f"why {name}", create=False, **more)


async def test_actions_keep_their_order_and_each_has_its_event() -> None:
    source = random.Random(17)
    names = [f"child-{source.randrange(10**6)}" for _ in range(6)]
    actions: list[Action] = [action(name) for name in names[:-1]]
    actions += [Delete("Service", names[-1], "uid", "of no use"), action("quiet", quiet=True)]
    slow = Slow(0.01)
    assert await carried_out(slow, *actions) == []
    events = [what for what in slow.done if what.startswith("event")]
    assert [what for what in slow.done if not what.startswith("event")] == [*names, "quiet"]
    assert sorted(events) == sorted(
        [*(f"event: Updated Service {name}: why {name}." for name in names[:-1]),
         f"event: Deleted Service {names[-1]}: of no use."]
    )  # fmt: skip


async def test_an_event_does_not_hold_up_the_next_action() -> None:
    slow = Slow(0.02)
    await carried_out(slow, action("a"), action("b"))
    told = "event: Updated Service a: why a."
    assert slow.log.index("begin b") < slow.log.index(f"end {told}")
    assert told in slow.done
    assert slow.log.index("carried out") < slow.log.index("end event: Updated Service b: why b.")


async def test_what_is_refused_has_no_event_and_an_event_that_is_refused_is_no_failure() -> None:
    slow = Slow(0.001, frozenset({"a", "event: Updated Service b: why b."}))
    failures = await carried_out(slow, action("a"), action("b"), action("c"))
    assert failures == ["Updated Service a failed: not yours"]
    assert slow.done == ["b", "c", "event: Updated Service c: why c."]


async def test_a_failure_of_what_comes_after_loses_no_event() -> None:
    slow = Slow(0.01)

    async def fail() -> None:
        async with Telling(cast(Cluster, slow), SERVICE) as telling:
            telling.tell("Normal", "Updated", "said")
            raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        await fail()
    assert slow.done == ["event: said"]


async def test_a_replica_that_is_told_to_end_writes_nothing_more() -> None:
    slow = Slow(0.05)
    work = asyncio.create_task(carried_out(slow, action("a"), action("b")))
    await asyncio.sleep(0.07)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    written = list(slow.done)
    await asyncio.sleep(0.15)
    assert slow.done == written == ["a"]
