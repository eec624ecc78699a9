"""Services over weeks, in moments: the operator, Kubernetes' controllers, nodes and traffic by one clock.

Time goes from one moment at which something is due to the next. At each, everybody acts until nobody has anything left
to do, the operator once after every change as its watches have it.
Invariants: `checks.look` and `neighbours.look` are asked after every reconcile; the operator that finds nothing to do
for a while is asked more and more rarely, as one on a machine that does much else.
Knows nothing of what befalls the services.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from tests.operator.weeks import checks, neighbours
from tests.operator.weeks.controllers import Controllers
from tests.operator.weeks.machines import Machines
from tests.operator.weeks.store import Died, Store
from tests.operator.weeks.tenants import Tenant
from tests.operator.weeks.voices import Voices

from stoker_operator.apply.retention import sweep
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError
from stoker_operator.cluster.queue import Key
from stoker_operator.manifests.activation import COMPONENT_NAME, slice_port
from stoker_operator.manifests.identity import COMPONENT, INSTANCE
from stoker_operator.observe.activators import Activators
from stoker_operator.reconcile import FOLLOW_UP_SECONDS, ApplyFailed, Reconciler
from stoker_operator.settings import Settings

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
    `skew`: by so much the operator's clock is ahead.
    """

    def __init__(self) -> None:
        self.time = BEGIN
        self.skew = timedelta()
        self.store = Store(self.now)
        self.controllers = Controllers(self.store, self.now)
        self.machines = Machines(self.store, self.now)
        self.voices = Voices(self.store, self.machines, lambda name: self.tenants[name].traffic, self.now)
        self.holders = Holders(self.store)
        self.tenants: dict[str, Tenant] = {}
        self.said: list[str] = []
        self.spared = 0
        self._swept = BEGIN
        self.take_over()

    def now(self) -> datetime:
        """The time."""
        return self.time

    def make(self, name: str, spec: dict[str, Any]) -> None:
        """A service is created."""
        self.tenants[name] = Tenant(self, name, spec)

    def take_over(self) -> None:
        """Another process of the operator leads, with nothing of what the one before knew."""
        activators = cast(Activators, self.holders)
        clock = self._clock
        self.reconciler = Reconciler(self.store, self.voices, SETTINGS, clock=clock, activators=activators)
        for tenant in self.tenants.values():
            tenant.due = self.time

    def _clock(self) -> datetime:
        """The operator's, which may be another one's than the API server's."""
        return self.time + self.skew

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
        looks = [tenant.due for tenant in self.tenants.values() if tenant.due is not None]
        return [self._swept + timedelta(hours=1), *looks]

    async def _moment(self) -> None:
        """Everybody acts until nobody has anything left to do at this moment. Of several services that the operator is
        to look at, each is looked at before Kubernetes has done what the look at another one asks for.
        """
        if self.time >= self._swept + timedelta(hours=1):
            self._swept = self.time
            with contextlib.suppress(ApiError, Died):
                await sweep(self.store, "", self._clock())
        for _ in range(ROUNDS * len(self.tenants)):
            await self._play()
            looked_at = [tenant for tenant in self.tenants.values() if tenant.has_news()]
            if not looked_at:
                return
            for tenant in looked_at:
                await self.reconcile(tenant)
        raise AssertionError(f"no rest at {self.time}: {self.store.writes[-12:]}")

    async def _play(self) -> None:
        """Kubernetes' part."""
        version = -1
        while version != self.store.version:
            version = self.store.version
            self.controllers.sync()
            self.machines.sync()

    async def reconcile(self, tenant: Tenant) -> None:
        """One look of the operator at a service, and ours at what came of it."""
        version = self.store.version
        before, around = checks.before(tenant), neighbours.before(tenant)
        whole = True
        try:
            again = await self.reconciler.reconcile("ns", tenant.name)
        except (ApplyFailed, ApiError):
            again, whole = AGAIN_SECONDS, False
        except Died:
            self.store.dies_before = None
            self.take_over()
            tenant.due = self.time + timedelta(seconds=AGAIN_SECONDS)
            checks.look(tenant, before, whole=False)
            neighbours.look(tenant, around, whole=False)
            return
        tenant.idle_looks = 0 if self.store.version != version else tenant.idle_looks + 1
        wait = RESYNC_SECONDS if again is None else max(again, 0.5)
        if tenant.idle_looks > 3:
            wait = min(wait * 2.0 ** (tenant.idle_looks - 3), RARELY_SECONDS) if wait < OFTEN_SECONDS else wait
        tenant.due = self.time + timedelta(seconds=wait)
        checks.look(tenant, before, whole=whole)
        neighbours.look(tenant, around, whole=whole)
        if whole and self.store.version != version and again != FOLLOW_UP_SECONDS:
            await self._spared(tenant, again)

    async def _spared(self, tenant: Tenant, again: float | None) -> None:
        """The look that the operator spared itself, since its own plan of what it wrote had nothing to do."""
        written = len(self.store.writes)
        assert await self.reconciler.reconcile("ns", tenant.name) == again
        assert self.store.writes[written:] == [], "a look was spared that had something to do"
        self.spared += 1
