"""The operator's process: settings → health endpoint, custom metrics API, mirror → leader lease → kopf and
work queue. `stoker operator`.

Invariants: a replica that does not lead reads and watches, and writes nothing but the lease; one that loses the lease
exits, so it can never act on what it remembers; SIGTERM stops the work, then gives the lease up: a reconcile cut short
is taken up by the next leader, level-triggered.
Exit status: 0 after a signal, 1 after a lost lease, 2 for a bad setting.
Knows nothing of what a reconcile does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import kopf
from aiohttp import web

from stoker_operator import handlers, metrics, process
from stoker_operator.apply.retention import sweep
from stoker_operator.cluster import kinds
from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.cluster.lease import Lease
from stoker_operator.cluster.queue import Key, WorkQueue
from stoker_operator.cluster.turns import Turns
from stoker_operator.metrics_adapter.registration import Registration
from stoker_operator.metrics_adapter.server import Adapter
from stoker_operator.observe.activators import Activators
from stoker_operator.observe.mounts import Mounts
from stoker_operator.observe.pod_http import PodClient
from stoker_operator.observe.pulse import Pulse
from stoker_operator.observe.standby import Standby
from stoker_operator.reconcile import Reconciler
from stoker_operator.settings import Settings, SettingsError, from_arguments

log = logging.getLogger("stoker.operator")
# A reconcile makes a few requests of at most half a minute each; one that takes longer than this hangs.
HUNG_SECONDS = 600.0
STOP_SECONDS = 1.0
_HEAD = {"apiVersion": kinds.INFERENCE_SERVICE.api_version, "kind": kinds.INFERENCE_SERVICE.kind}


@dataclass(slots=True)
class Health:
    """What /healthz and /readyz say. `queue` is there while leading."""

    queue: WorkQueue | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)


async def serve_health(settings: Settings, health: Health) -> web.AppRunner:
    """Start /healthz, /readyz and /metrics; the caller cleans the runner up."""

    def sick() -> str:
        hung = health.queue is not None and health.queue.longest_active > HUNG_SECONDS
        return "a reconcile hangs" if hung else ""

    def unready() -> str:
        return "" if health.started.is_set() else "starting"

    return await process.serve_health(settings.http_host, settings.http_port, sick=sick, unready=unready)


async def resync(cluster: Cluster, queue: WorkQueue, settings: Settings) -> None:
    """Enqueue every service now and then, spread over the interval: what a frozen watch missed is found
    here. Volumes whose time is over are ended at the same pace.
    """
    while True:
        with _told("retention"):
            for namespace in settings.namespaces or ("",):
                await sweep(cluster, namespace, without=settings.exclude_namespaces)
        await asyncio.sleep(settings.resync_seconds)
        with _told("resync"):
            for namespace in settings.namespaces or ("",):
                keys: list[Key] = []
                # A page at a time: what 5,000 services are parsed to would be most of the operator's memory.
                async for items, _ in cluster.pages(kinds.INFERENCE_SERVICE, namespace, ""):
                    keys += [(item["metadata"]["namespace"], item["metadata"]["name"]) for item in items]
                for index, key in enumerate(keys):
                    await queue.add(key, index * settings.resync_seconds / (2 * len(keys)), routine=True)


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Log what the API server refuses, and go on."""
    try:
        yield
    except ApiError as error:
        log.warning("%s: %s", what, error)


@contextlib.asynccontextmanager
async def metrics_api(cluster: Cluster, settings: Settings, health: Health) -> AsyncIterator[Registration | None]:
    """The custom metrics API on this replica, which is ready once it answers; the leader registers it."""
    if not settings.metrics_adapter_port:
        health.started.set()
        yield None
        return
    adapter = Adapter(cluster, settings)
    health.started = adapter.serving
    registration = Registration(cluster, settings, adapter.serving)
    adapter.start()
    try:
        yield registration
    finally:
        await registration.leave()
        await adapter.close()


async def lead(
    cluster: Cluster,
    settings: Settings,
    health: Health,
    stop: asyncio.Event,
    registration: Registration | None,
    standby: Standby,
) -> None:
    """Reconcile until `stop` is set, once `standby` is filled."""
    metrics.LEADER.set(1)
    if not await _unless(stop, standby.filled()):
        return
    mirror = standby.mirror

    def news(service: Mapping[str, Any]) -> bool:
        # kopf's list leaves these two out of its items.
        return mirror.learn(kinds.INFERENCE_SERVICE, {**_HEAD, **service})

    async def wake(key: Key) -> None:
        await queue.add(key)

    turns = Turns(settings.rollout_parallel)
    pods = PodClient(settings.pod_timeout_seconds)
    mounts = Mounts(mirror, settings.namespaces, wake)
    activators = None
    if settings.activator_service:
        activators = Activators(cluster, mirror, settings.lease_namespace, settings.activator_service, wake)
    reconciler = Reconciler(
        mirror, pods, settings, unmounted=mounts.failed, turns=turns, wake=wake, activators=activators
    )
    if registration is not None:
        reconciler = replace(reconciler, metrics_api=lambda: registration.state)
    queue = WorkQueue(reconciler.reconcile, workers=settings.workers, per_second=settings.reconciles_per_second)
    health.queue = queue
    started = asyncio.Event()
    work = [
        asyncio.create_task(_first_all(standby, queue)),
        asyncio.create_task(Pulse(mirror, pods, queue.add).run()),
        asyncio.create_task(mounts.run()),
        asyncio.create_task(resync(cluster, queue, settings)),
        asyncio.create_task(stop.wait()),
        *([asyncio.create_task(registration.keep())] if registration is not None else []),
        *([asyncio.create_task(activators.run())] if activators is not None else []),
    ]
    watches = asyncio.create_task(
        kopf.operator(
            registry=handlers.registry(queue.add, news),
            settings=handlers.settings(),
            clusterwide=not settings.namespaces,
            namespaces=settings.namespaces,
            standalone=True,
            # Its own guess asks for the user's name, and the image's user has none.
            identity=settings.identity,  # type: ignore[arg-type]  # a NewType of str that kopf keeps to itself
            ready_flag=started,
        )
    )
    again = asyncio.create_task(_signals_again(started, stop))
    try:
        done, _ = await asyncio.wait([watches, *work], return_when=asyncio.FIRST_COMPLETED)
    finally:
        # Also when cancelled: from the end of the gather on, nothing is written any more. The watches hold nothing
        # worth waiting for, and kopf takes its time.
        metrics.LEADER.set(0)
        for task in (*work, again, watches):
            task.cancel()
        await asyncio.gather(*work, again, standby.stop(), return_exceptions=True)
        await asyncio.wait([watches], timeout=STOP_SECONDS)
    for task in done:
        if not task.cancelled() and task.exception() is not None:
            raise RuntimeError("the operator's work ended") from task.exception()


async def _first_all(standby: Standby, queue: WorkQueue) -> None:
    """Work on the queue, in which every service is from the beginning."""
    await standby.take_up(queue.add)
    await queue.run()


async def run(settings: Settings, stop: asyncio.Event) -> int:
    """The whole life of one replica; returns the exit status."""
    health = Health()
    cluster = await Cluster.connect(settings.api_concurrency)
    standby = Standby(cluster, settings)
    runner = await serve_health(settings, health)
    lease = Lease(
        cluster.aside(2), settings.lease_namespace, settings.lease_name, settings.identity, settings.lease_seconds
    )
    try:
        async with metrics_api(cluster, settings, health) as registration:
            try:
                if not await _unless(stop, lease.acquire()):
                    return 0
                return await _term(lease, lead(cluster, settings, health, stop, registration, standby))
            finally:
                await lease.release()
    finally:
        await standby.stop()
        await runner.cleanup()
        await cluster.close()


async def _term(lease: Lease, work: Coroutine[Any, Any, None]) -> int:
    """Do the leader's work while the lease is held; the exit status."""
    leading, holding = asyncio.create_task(work), asyncio.create_task(lease.hold())
    await asyncio.wait([leading, holding], return_when=asyncio.FIRST_COMPLETED)
    lost = holding.done()
    if lost:
        # Another replica may lead any moment: nothing is finished, everything stops now.
        leading.cancel()
    holding.cancel()
    await asyncio.gather(holding, return_exceptions=True)
    with contextlib.suppress(asyncio.CancelledError):
        await leading
    return 1 if lost else 0


async def _signals_again(started: asyncio.Event, stop: asyncio.Event) -> None:
    """kopf takes the signals for itself when it starts; a second one would then end in a traceback."""
    await started.wait()
    if threading.current_thread() is threading.main_thread():
        process.take_signals(stop)


async def _unless(stop: asyncio.Event, awaited: object) -> bool:
    """Await, unless `stop` comes first; whether it was awaited to the end."""
    task = asyncio.ensure_future(awaited)  # type: ignore[call-overload]
    waiter = asyncio.ensure_future(stop.wait())
    await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """`stoker operator`: parse the settings and run."""
    try:
        settings = from_arguments(sys.argv[1:] if argv is None else argv)
    except SettingsError as error:
        sys.stderr.write(f"stoker operator: {error}\n")
        return 2
    process.write_logs(settings.log_level)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    process.spare_garbage()
    return process.until_signal(functools.partial(run, settings))


if __name__ == "__main__":
    sys.exit(main())
