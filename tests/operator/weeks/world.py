"""One service over weeks, in moments: the operator, Kubernetes' controllers, nodes and traffic by one clock.

Time goes from one moment at which something is due to the next. At each, everybody acts until nobody has anything left
to do, the operator once after every change as its watches have it.
Invariants: `checks.look` is asked after every reconcile; the operator that finds nothing to do for a while is asked
more and more rarely, as one on a machine that does much else.
Knows nothing of what befalls the service.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from tests.operator.weeks import checks
from tests.operator.weeks.controllers import Controllers
from tests.operator.weeks.machines import Machines
from tests.operator.weeks.store import Died, Store
from tests.operator.weeks.voices import Traffic, Voices

from stoker_operator.apply.retention import sweep
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Object
from stoker_operator.cluster.queue import Key
from stoker_operator.manifests.activation import COMPONENT_NAME, slice_port
from stoker_operator.manifests.identity import COMPONENT, INSTANCE
from stoker_operator.observe.activators import Activators
from stoker_operator.reconcile import FOLLOW_UP_SECONDS, ApplyFailed, Reconciler
from stoker_operator.settings import Settings
from stoker_operator.spec.service import SpecError, parse

BEGIN = datetime(2026, 3, 16, 6, 0, tzinfo=UTC)  # the clocks of Europe change within the two weeks
RESYNC_SECONDS = 300.0
# What is looked at so often is looked at more and more rarely where nothing comes of it.
OFTEN_SECONDS, RARELY_SECONDS = 400.0, 3600.0
AGAIN_SECONDS = 1.0
# What is followed is looked up as often as weeks bear.
SETTINGS = Settings(follow_seconds=6 * 3600)
ROUNDS = 80


class Holders:
    """The activator's pods, as the operator knows them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.addresses: tuple[str, ...] | None = ("10.99.0.7",)

    def ports(self) -> dict[Key, int]:
        """The ports that services have."""
        slices = self._store.of(kinds.ENDPOINT_SLICE)
        ours = [each for each in slices if each["metadata"]["labels"].get(COMPONENT) == COMPONENT_NAME]
        return {("ns", str(each["metadata"]["labels"][INSTANCE])): slice_port(each) for each in ours}


class World:
    """`said` is what Ready said, one line a change, `spared` how often the operator did not look again after a write.
    `skew`: by so much the operator's clock is ahead. `asked`: how many pods the ReplicaSets asked for at the last look.
    """

    def __init__(self) -> None:
        self.time = BEGIN
        self.skew = timedelta()
        self.store = Store(self.now)
        self.controllers = Controllers(self.store, self.now)
        self.machines = Machines(self.store, self.now)
        self.traffic = Traffic(self.now)
        self.voices = Voices(self.store, self.machines, self.traffic, self.now)
        self.holders = Holders(self.store)
        self.said: list[str] = []
        self.wishes = 0
        self.spared = 0
        self.asked = 0
        self._due: datetime | None = None
        self._swept = BEGIN
        self._idle_looks, self._seen = 0, -1
        self.take_over()

    def now(self) -> datetime:
        """The time."""
        return self.time

    def take_over(self) -> None:
        """Another process of the operator leads, with nothing of what the one before knew."""
        activators = cast(Activators, self.holders)
        clock = self._clock
        self.reconciler = Reconciler(self.store, self.voices, SETTINGS, clock=clock, activators=activators)
        self._due = self.time

    def _clock(self) -> datetime:
        """The operator's, which may be another one's than the API server's."""
        return self.time + self.skew

    # The service, as its owner has it.

    def make(self, spec: dict[str, Any]) -> None:
        """The service is created."""
        head = {"name": "demo", "namespace": "ns", "annotations": {}}
        body = {"apiVersion": "stoker.dev/v1alpha1", "kind": "InferenceService", "metadata": head, "spec": spec}
        self.store.add(body)

    @property
    def service(self) -> Object:
        """As it is."""
        found = self.store.find(kinds.INFERENCE_SERVICE, "demo")
        assert found is not None
        return found

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
        self.store.put({**self.service, "metadata": {**meta, "annotations": {**meta["annotations"], annotation: text}}})

    # Time.

    async def pass_by(self, seconds: float) -> None:
        """So much time passes."""
        end = self.time + timedelta(seconds=seconds)
        await self._moment()
        while True:
            due = [at for at in (*self.controllers.due(), *self.machines.due(), *self._own_due()) if at > self.time]
            at = min(due, default=end)
            if at >= end:
                break
            self.time = at
            await self._moment()
        self.time = end
        await self._moment()

    def _own_due(self) -> list[datetime]:
        found = [self._swept + timedelta(hours=1)]
        return found if self._due is None else [*found, self._due]

    async def _moment(self) -> None:
        """Everybody acts until nobody has anything left to do at this moment."""
        if self.time >= self._swept + timedelta(hours=1):
            self._swept = self.time
            with contextlib.suppress(ApiError, Died):
                await sweep(self.store, "", self._clock())
        for _ in range(ROUNDS):
            await self._play()
            if self.store.version != self._seen:
                self._idle_looks = 0
            elif self._due is None or self.time < self._due:
                return
            self._seen = self.store.version
            await self.reconcile()
        raise AssertionError(f"no rest at {self.time}: {self.store.writes[-12:]}")

    async def _play(self) -> None:
        """Kubernetes' part."""
        version = -1
        while version != self.store.version:
            version = self.store.version
            self.controllers.sync()
            self.machines.sync()

    async def reconcile(self) -> None:
        """One look of the operator, and ours at what came of it."""
        version = self.store.version
        before = checks.before(self)
        whole = True
        try:
            again = await self.reconciler.reconcile("ns", "demo")
        except (ApplyFailed, ApiError):
            again, whole = AGAIN_SECONDS, False
        except Died:
            self.store.dies_before = None
            self.take_over()
            self._due = self.time + timedelta(seconds=AGAIN_SECONDS)
            checks.look(self, before, whole=False)
            return
        self._idle_looks = 0 if self.store.version != version else self._idle_looks + 1
        wait = RESYNC_SECONDS if again is None else max(again, 0.5)
        if self._idle_looks > 3:
            wait = min(wait * 2.0 ** (self._idle_looks - 3), RARELY_SECONDS) if wait < OFTEN_SECONDS else wait
        self._due = self.time + timedelta(seconds=wait)
        checks.look(self, before, whole=whole)
        if whole and self.store.version != version and again != FOLLOW_UP_SECONDS:
            await self._spared(again)

    async def _spared(self, again: float | None) -> None:
        """The look that the operator spared itself, since its own plan of what it wrote had nothing to do."""
        written = len(self.store.writes)
        assert await self.reconciler.reconcile("ns", "demo") == again
        assert self.store.writes[written:] == [], "a look was spared that had something to do"
        self.spared += 1


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
