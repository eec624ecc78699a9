"""One service of a walk of weeks: as its owner has it, its clients use it and the operator's queue knows it.

Invariants: a change that admission would refuse changes nothing.
Knows nothing of the other services, but that they are in the same world.
"""

from __future__ import annotations

import contextlib
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tests.operator.weeks.voices import Traffic

from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import Object
from stoker_operator.cluster.kinds import Kind
from stoker_operator.spec.service import SpecError, parse

if TYPE_CHECKING:
    from tests.operator.weeks.machines import Machines
    from tests.operator.weeks.store import Store
    from tests.operator.weeks.world import World


class Tenant:
    """`said` is what Ready said last, `asked` how many pods the ReplicaSets asked for at the last look. `due` is when
    the operator is to look again, `seen` the news it has seen, `idle_looks` how often in a row it found nothing to do.
    """

    def __init__(self, world: World, name: str, spec: dict[str, Any]) -> None:
        self.world, self.name = world, name
        self.traffic = Traffic(world.now)
        self.wishes = 0
        self.asked = 0
        self.said = ""
        self.due: datetime | None = world.time
        self.seen, self.idle_looks = -1, 0
        head = {"name": name, "namespace": "ns", "annotations": {}}
        body = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": head, "spec": spec}
        world.store.add(body)

    @property
    def store(self) -> Store:
        """The API server."""
        return self.world.store

    @property
    def machines(self) -> Machines:
        """The nodes, which are everybody's."""
        return self.world.machines

    def find(self, kind: Kind, suffix: str = "") -> Object | None:
        """The service itself, or one of its children, by the end of its name."""
        return self.store.find(kind, f"{self.name}{suffix}")

    @property
    def there(self) -> Object | None:
        """As it is; None where it was deleted."""
        return self.find(kinds.INFERENCE_SERVICE)

    @property
    def service(self) -> Object:
        """As it is."""
        found = self.there
        assert found is not None
        return found

    def has_news(self) -> bool:
        """Whether the operator is to look now: something of it changed, or its time has come."""
        news = self.store.news_of(self.name)
        if news != self.seen:
            self.seen, self.idle_looks = news, 0
            return True
        return self.due is not None and self.world.time >= self.due

    def change(self, **parts: Any) -> None:
        """Its owner changes parts of the spec: a mapping is merged, None takes a field out. What admission would refuse
        stays as it was.
        """
        service = self.service
        changes = {key: _merged(service["spec"].get(key), value) for key, value in parts.items()}
        fresh = {key: value for key, value in {**service["spec"], **changes}.items() if value is not None}
        with contextlib.suppress(SpecError):
            parse({**service, "spec": fresh})
            self.store.patch_spec(service, changes)

    def note(self, annotation: str, text: str) -> None:
        """Somebody annotates it."""
        meta = self.service["metadata"]
        noted = {**meta, "annotations": {**meta["annotations"], annotation: text}}
        self.store.put({**self.service, "metadata": noted})


def _merged(known: Any, patch: Any) -> Any:
    """A JSON merge patch."""
    if not isinstance(patch, dict):
        return patch
    found = dict(known) if isinstance(known, dict) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = _merged(found.get(key), value)
    return found
