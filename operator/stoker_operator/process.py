"""What every process of the operator's image does the same way: its logs, its signals, its health endpoint, its end.

Invariants: logs go to stderr, one line a record; /healthz is 500 and /readyz 503 while something is wrong, each with
the reason.
Knows nothing of what a process is for.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from stoker_operator.lines import LineFormatter


def write_logs(level: str) -> None:
    """Log from `level` (debug, info, warning, error) on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def take_signals(stop: asyncio.Event) -> None:
    """SIGINT and SIGTERM set `stop`."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)


def until_signal(main: Callable[[asyncio.Event], Coroutine[Any, Any, int]]) -> int:
    """Run `main` with an event that SIGINT and SIGTERM set; its exit status."""

    async def with_signals() -> int:
        stop = asyncio.Event()
        take_signals(stop)
        return await main(stop)

    return asyncio.run(with_signals())


async def work_until(
    stop: asyncio.Event, *work: Coroutine[Any, Any, None], leave: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Do all of `work` until `stop` is set, and on while `leave` runs, if anybody is led here; then cancel it.

    Raises what a piece of the work raises, at once; nothing of it is left running.
    """
    tasks = [asyncio.create_task(each) for each in work]
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if leave is not None:
            await leave()
    finally:
        for task in (*tasks, stopping):
            task.cancel()
        await asyncio.gather(*tasks, stopping, return_exceptions=True)


def spare_garbage() -> None:
    """Look for cycles less often: Python's defaults have it go through all that was imported some times a second.

    Call once everything is imported.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


async def serve_health(
    host: str | None, port: int, *, sick: Callable[[], str], unready: Callable[[], str]
) -> web.AppRunner:
    """Start /healthz, /readyz and /metrics; the caller cleans the runner up. `sick` and `unready` say why, "" = it is
    not.
    """

    async def healthz(_: web.Request) -> web.Response:
        return _said(sick(), 500)

    async def readyz(_: web.Request) -> web.Response:
        return _said(unready(), 503)

    async def read_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", read_metrics)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    return runner


def _said(why: str, status: int) -> web.Response:
    return web.Response(status=status, text=f"{why}\n") if why else web.Response(text="ok\n")
