"""Whether the mirror that all walks share knows what the API server has: on a machine that does much else its watches
tell late, and what seems to be at rest is old.

Invariants: nothing is taken over here, only waited for; asks the API server for lists, so only where rest is in doubt.
Knows nothing of what the objects mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.operator.walk.arena import Arena

from stoker_operator.cluster import kinds
from stoker_operator.cluster.kinds import Kind
from stoker_operator.manifests.identity import OURS
from stoker_operator.observe.observe import CHILDREN

PATIENCE_SECONDS = 240.0
_FOLLOWED = (*CHILDREN, kinds.CLAIM, kinds.CONFIG_MAP, kinds.LEADER_WORKER_SET, kinds.INFERENCE_SERVICE)


async def caught_up(arena: Arena, namespace: str, taken: Sequence[Kind]) -> bool:
    """Wait until all of a namespace's news are told; whether there were any. `taken`: of these kinds a stranger has the
    name `demo`.
    """
    loop = asyncio.get_running_loop()
    end, waited = loop.time() + PATIENCE_SECONDS, False
    while late := await _late(arena, namespace, taken):
        assert loop.time() < end, f"watches do not tell of {late}"
        waited = True
        await asyncio.sleep(0.2)
    return waited


async def _late(arena: Arena, namespace: str, taken: Sequence[Kind]) -> str:
    """A kind of which watches have not told everything; "" = there is none."""
    for kind in _FOLLOWED:
        shelf = arena.mirror._shelves.get(kind.kind)
        if shelf is None:
            continue
        listed = await arena.cluster.list_all(kind, namespace, "" if kind is kinds.INFERENCE_SERVICE else OURS)
        there = {item["metadata"]["name"]: int(item["metadata"]["resourceVersion"]) for item in listed}
        known = {name: shelf.entries[namespace, name].version for name in shelf.inside.get(namespace, ())}
        if kind in taken:
            known.pop("demo", None)
        if known.keys() != there.keys() or any(known[name] < version for name, version in there.items()):
            return kind.plural
    return ""
