"""The HTTPS server behind the APIService v1beta2.custom.metrics.k8s.io.

Invariants: without a certificate of the API server's front proxy a client learns nothing; every answer is a
Kubernetes document, refusals included; each replica of the operator serves, whether it leads or not.
Knows nothing of autoscaling.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web

from stoker_operator.cluster.api import ApiError, Cluster
from stoker_operator.metrics_adapter import documents
from stoker_operator.metrics_adapter.certificate import Pair
from stoker_operator.metrics_adapter.front_proxy import (
    FrontProxy,
    Unauthenticated,
    Verdicts,
    load_certificate,
    read_front_proxy,
    server_context,
    trust,
)
from stoker_operator.metrics_adapter.registration import read_pair
from stoker_operator.metrics_adapter.scrape import Scraper
from stoker_operator.observe.gauges import SERIES
from stoker_operator.settings import Settings

log = logging.getLogger("stoker.operator")
SCRAPE_SECONDS = 3.0
# How often a renewed authority and certificate are looked for, and the first one while there is none.
RENEWAL_SECONDS = 60.0
FIRST_SECONDS = 1.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Adapter:
    """One server; `start` and `close` it. `serving` is set once it answers, which waits for a certificate."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._scraper = Scraper(cluster, SCRAPE_SECONDS)
        self._verdicts = Verdicts(cluster)
        self._proxy: FrontProxy | None = None
        self._pair: Pair | None = None
        self._runner: web.AppRunner | None = None
        self._life: asyncio.Task[None] | None = None
        self.serving = asyncio.Event()
        self.port = 0

    def start(self) -> None:
        """Serve from the first certificate on, and take up those that follow without a restart."""
        self._life = asyncio.create_task(self._live())

    async def _live(self) -> None:
        """Until cancelled. The leader makes the certificate: there may be none for a moment."""
        context: ssl.SSLContext | None = None
        while True:
            try:
                context = await self._renewed(context)
                if context is not None and not self.serving.is_set():
                    await self._listen(context)
                    self.serving.set()
            except (ApiError, OSError) as error:
                log.warning("custom metrics API: %s", error)
            await asyncio.sleep(RENEWAL_SECONDS if self.serving.is_set() else FIRST_SECONDS)

    async def _renewed(self, context: ssl.SSLContext | None) -> ssl.SSLContext | None:
        """The context with what is valid now; None while there is no certificate. Raises ApiError, OSError."""
        proxy, pair = await read_front_proxy(self._cluster), await read_pair(self._cluster, self._settings)
        if proxy is not None and context is not None and proxy != self._proxy:
            trust(context, proxy)
        self._proxy = proxy or self._proxy
        if pair is None or pair == self._pair:
            return context
        if context is None:
            if proxy is None:
                log.warning("custom metrics API: the API server has no front proxy; nothing will be answered")
            context = server_context(pair, proxy)
        else:
            load_certificate(context, pair)
        self._pair = pair
        return context

    async def _listen(self, context: ssl.SSLContext) -> None:
        app = web.Application(middlewares=[_as_documents])
        root = documents.ROOT
        app.add_routes(
            [
                web.get("/healthz", _healthz),
                web.get("/apis", self._known(documents.api_groups)),
                web.get(f"/apis/{documents.GROUP}", self._known(documents.api_group)),
                web.get(root, self._known(documents.resources)),
                web.get(root + "/namespaces/{namespace}/pods/{pod}/{series}", self._values),
            ]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        host, port = self._settings.http_host, self._settings.metrics_adapter_port
        try:
            await web.TCPSite(runner, host, port, ssl_context=context).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner, self.port = runner, runner.addresses[0][1]
        log.info("custom metrics API on port %d", self.port)

    async def close(self) -> None:
        """Stop serving."""
        if self._life is not None:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)
        if self._runner is not None:
            server = self._runner.server
            open_ones = [connection.transport for connection in server.connections] if server is not None else []
            await self._runner.cleanup()
            for transport in open_ones:
                if transport is not None:
                    # A TLS connection's orderly end waits for the API server's half, which keeps its idle ones. Of one
                    # that was closed twice Python 3.11.2 has nothing left to abort.
                    with contextlib.suppress(AttributeError):
                        transport.abort()
            await asyncio.sleep(0)

    def _user(self, request: web.Request) -> tuple[str, tuple[str, ...]]:
        transport = request.transport
        if self._proxy is None or transport is None:
            raise Unauthenticated("the API server has no front proxy")
        return self._proxy.user(transport.get_extra_info("peercert"), request.headers)

    def _known(self, document: Callable[[], documents.Document]) -> Handler:
        async def answer(request: web.Request) -> web.Response:
            self._user(request)
            return web.json_response(document())

        return answer

    async def _values(self, request: web.Request) -> web.Response:
        user, groups = self._user(request)
        namespace, pod, series = (request.match_info[key] for key in ("namespace", "pod", "series"))
        if not await self._verdicts.may_read(user, groups, documents.GROUP, namespace, series):
            return _refuse(403, "Forbidden", f"user {user} cannot get pods/{series} in namespace {namespace}")
        if series not in SERIES:
            return _refuse(404, "NotFound", f"no series {series}; there are {', '.join(SERIES)}")
        samples = await self._scraper.samples(namespace, request.query.get("labelSelector", ""), pod, series)
        if not samples and pod != "*":
            return _refuse(404, "NotFound", f"pod {pod} has no {series} now")
        return web.json_response(documents.values(namespace, series, samples))


async def _healthz(_: web.Request) -> web.Response:
    return web.Response(text="ok\n")


def _refuse(code: int, reason: str, message: str) -> web.Response:
    return web.json_response(documents.refusal(code, reason, message), status=code)


@web.middleware
async def _as_documents(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Unauthenticated as error:
        return _refuse(401, "Unauthorized", str(error))
    except web.HTTPException as error:
        return _refuse(error.status, error.reason, f"{request.method} {request.path}: {error.reason}")
    except ApiError as error:
        return _refuse(503, "ServiceUnavailable", f"the API server did not answer: {error.reason or error.status}")
