"""Histories of a service, walked step by step, several at the same time; one that fails is made as small as it goes.

What holds: see `check` (after each step, at rest), `correct` (a corrected spec serves, whatever came before), `leave`
(a deleted service leaves nothing behind) and `World.reconcile` (at every moment).
Invariants: a fault is a history that failed twice; one that failed once is told of.
Knows nothing of how histories are chosen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

from tests.operator.reconcile.kubelet import condition
from tests.operator.walk.arena import Arena
from tests.operator.walk.grouped import of_groups
from tests.operator.walk.steps import STEPS, Step
from tests.operator.walk.world import World

from stoker_operator.cluster import kinds
from stoker_operator.observe.observe import CHILDREN

GOOD: dict[str, Any] = {
    "model": {"uri": "hf://org/model"},
    "resources": {"gpus": 0, "memory": "4Gi"},
    "runtime": {"image": "stoker/runtime:1"},
    "cache": {"verify": "Scheduled", "verifyEvery": "300s"},
    "replicas": 1,
}
# By which labels a child of the service's name chooses its pods.
REACH = {
    kinds.SERVICE: ("selector",),
    kinds.NETWORK_POLICY: ("podSelector", "matchLabels"),
    kinds.DISRUPTION_BUDGET: ("selector", "matchLabels"),
}
KINDS = (*CHILDREN, kinds.CLAIM, kinds.LEADER_WORKER_SET)
LEAVES_SECONDS = 120.0
SHRINKS = 40
SAID_EVERY = 20


@dataclass(frozen=True)
class Fault:
    """A history after which something did not hold: `why`, and what the service had said."""

    history: tuple[Step, ...]
    why: str
    said: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([self.why, f"history: {list(self.history)}", *self.said[-40:]])


class Walker:
    """Walks one history after the other in the same world, and in another one after a fault.

    `place` is a number that no other walker of this moment has.
    """

    def __init__(self, arena: Arena, place: int) -> None:
        self._arena, self._place = arena, place
        self._world: World | None = None

    async def walk(self, history: Sequence[Step]) -> Fault | None:
        """Walk one history."""
        world = self._world = self._world or await self._open()
        try:
            await world.begin()
            for name, number in history:
                await _step(world, name, number)
            await correct(world)
            await leave(world)
        except AssertionError as error:
            await self.close()
            return Fault(tuple(history), str(error), tuple(world.said))
        return None

    async def _open(self) -> World:
        world = World(self._arena, self._place, GOOD)
        await world.open()
        return world

    async def close(self) -> None:
        """Take the world away."""
        if self._world is not None:
            await self._world.close()
        self._world = None

    async def shrink(self, fault: Fault) -> Fault:
        """The shortest history that still fails, found by leaving out one step after the other."""
        tried, smallest, at = count(), fault, 0
        while at < len(smallest.history) and next(tried) < SHRINKS:
            shorter = smallest.history[:at] + smallest.history[at + 1 :]
            found = await self.walk(shorter)
            smallest, at = (found, at) if found is not None else (smallest, at + 1)
        return smallest


async def _step(world: World, name: str, number: int) -> None:
    served, step, before = bool(world.answering()), STEPS[name], await world.service()
    grouped = of_groups(world.here(kinds.LEADER_WORKER_SET), before)
    world.said.append(f"--- {name} {number}")
    await step.act(world, number)
    after = await world.service()
    careful = not (_asks_to_stop(before) or _asks_to_stop(after)) and (
        step.on_gpu or not (_on_gpu(before) or _on_gpu(after))
    )
    world.must_serve = served and step.harmless and careful and (step.grouped or not grouped)
    await world.settle()
    await check(world)
    world.must_serve = False


def _on_gpu(service: Any) -> bool:
    """Whether a change may have to take the place of a pod that serves."""
    return bool(service["spec"]["resources"].get("gpus"))


def _asks_to_stop(service: Any) -> bool:
    """Whether the spec itself wants changes to end who serves first."""
    return bool((service["spec"].get("rollout") or {}).get("strategy", "Auto") != "Auto")


async def check(world: World) -> None:
    """What holds after every step, at rest; what does not is looked at again where it was old news."""
    while True:
        try:
            return await _holds(world)
        except AssertionError:
            if not await world.caught_up():
                raise
        await world.settle()


async def _holds(world: World) -> None:
    touched = await world.strangers_touched()
    assert not touched, f"of strangers, was written or deleted: {', '.join(touched)}"
    _choose_the_pods(world)
    found_service = await world.service()
    status, answering = found_service["status"], world.answering()
    servable = condition(found_service, "Servable")
    assert (servable["status"] == "True") == bool(answering), f"Servable is {servable['status']}: {servable['message']}"
    assert status["readyReplicas"] == len(answering), f"{status['readyReplicas']} ready pods, {len(answering)} answer"
    assert status["observedGeneration"] == found_service["metadata"]["generation"], "an older generation's status"
    ready = condition(found_service, "Ready")
    assert ready["status"] == "False" or answering, "Ready at rest while no pod answers"
    assert all(item["reason"] and item["message"] for item in status["conditions"])


def _choose_the_pods(world: World) -> None:
    """Clients reach the pods, and the pods are guarded, whatever others patched into selectors."""
    for kind, path in REACH.items():
        for item in world.here(kind):
            if item["metadata"]["name"] != "demo" or kind in world.taken:
                continue
            chosen = item["spec"]
            for key in path:
                chosen = chosen[key]
            for pod in world.pods():
                assert chosen.items() <= pod["metadata"]["labels"].items(), f"{kind.kind} demo chooses {chosen}"


async def correct(world: World) -> None:
    """Everything is put right: the spec, the source, the nodes, the strangers; what waits for its time gets it."""
    world.kubelets.mend()
    await STEPS["strangers_leave"].act(world, 0)
    there = await world.service()
    spec = world.good | {"runtime": GOOD["runtime"] | {"args": ["--seed", "424242"]}}
    world.mirror.take_over(
        kinds.INFERENCE_SERVICE, await world.mirror.replace(kinds.INFERENCE_SERVICE, there | {"spec": spec})
    )
    world.said.append("--- corrected")
    for _ in range(6):
        await world.settle()
        while await world.caught_up():
            await world.settle()
        found = await world.service()
        ready = condition(found, "Ready")
        if ready["status"] == "True":
            assert len(world.answering()) == 1, "other than one pod that was asked for"
            return await world.read_anew()
        world.later += timedelta(seconds=700)
    raise AssertionError(f"a corrected spec does not serve: {ready['reason']}: {ready['message']}")


async def leave(world: World) -> None:
    """The service is deleted; its children go, and nothing of others."""
    await world.mirror.delete(kinds.INFERENCE_SERVICE, world.namespace, "demo", world.uid)
    loop = asyncio.get_running_loop()
    end = loop.time() + LEAVES_SECONDS
    while left := [f"{kind.kind} {name}" for kind in KINDS for name in _names(world, kind)]:
        assert loop.time() < end, f"left behind: {left}"
        await world.play()
        await asyncio.sleep(0.1)


def _names(world: World, kind: kinds.Kind) -> list[str]:
    if kind.kind not in world.mirror._shelves:
        return []
    return [item["metadata"]["name"] for item in world.here(kind) if item["metadata"]["name"] != "theirs"]


async def walk_all(
    arena: Arena, histories: Iterable[Sequence[Step]], at_once: int, say: Callable[[str], None] = print
) -> list[Fault]:
    """Walk histories, `at_once` at the same time; the faults, each as small as it goes. `say` is told how it goes."""
    todo, faults, walked = iter(histories), [], count(1)

    async def worker(place: int) -> None:
        walker = Walker(arena, place)
        try:
            for history in todo:
                once = await walker.walk(history)
                fault = await walker.walk(history) if once is not None else None
                if once is not None and fault is None:
                    say(f"It failed once, and not again: {once}")
                if fault is not None:
                    faults.append(await walker.shrink(fault))
                    say(str(faults[-1]))
                if (number := next(walked)) % SAID_EVERY == 0:
                    say(f"{number} histories, {len(faults)} faults")
        finally:
            await walker.close()

    await asyncio.gather(*(worker(place) for place in range(1, at_once + 1)))
    return faults
