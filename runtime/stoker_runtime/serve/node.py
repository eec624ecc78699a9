"""The life of a node beside the leader's: its ranks run, probes are answered, and nobody else is.

    1. the port opens and answers probes; the node joins the leader, and its ranks load
    2. it is ready once all ranks of all nodes are
    3. the leader ends the ranks: exit status 0; a rank or the leader is lost: 1, so that it starts again
    4. SIGTERM or SIGINT: it goes on for the leader, which drains, for up to `drain_seconds`; then it leaves, status 0
    5. a second signal: exit at once

Invariants: no tokenizer, no torch, no client. The port closes with the ranks.
Knows nothing of how nodes join and what they are told.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.api.http.errors import error_answer
from stoker_runtime.config import ServerConfig
from stoker_runtime.errors import EngineError, NotFoundError, UnavailableError
from stoker_runtime.process.exit_status import FAILED, FORCED_EXIT
from stoker_runtime.ranks.nodes.member import Member
from stoker_runtime.ranks.team import COMMAND
from stoker_runtime.serve.port import address, open_port
from stoker_runtime.serve.tls import keep_fresh, tls_context
from stoker_runtime.serve.web import HttpServer, uvicorn_config
from stoker_runtime.version import VERSION

FAREWELL_SECONDS = 10.0
"""For what follows the leader's drain."""

log = logging.getLogger(__name__)


class Probes:
    """An ASGI application: what a node says of itself."""

    def __init__(self, config: ServerConfig, member: Member) -> None:
        engine = config.engine
        self.stopping = False
        self._member = member
        self._who = f"This is node {engine.node_rank} of {engine.nnodes}"
        self._leader = engine.master_addr

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        await self._answer(scope["path"])(scope, receive, send)

    def _answer(self, path: str) -> JsonAnswer:
        detail = "it is shutting down" if self.stopping else self._member.detail
        phase = "draining" if self.stopping else "ready" if self._member.ready else "starting"
        if path in ("/health", "/ping"):
            return JsonAnswer({"status": "ok", "phase": phase})
        if path == "/version":
            return JsonAnswer({"version": VERSION})
        if path != "/ready":
            return error_answer(NotFoundError(f"{self._who}; clients ask node 0, at {self._leader}."))
        if phase != "ready":
            return error_answer(UnavailableError(f"{self._who}, and not ready: {detail}."))
        return JsonAnswer({"status": "ready"})


class NodeServer:
    """The process of one node. `run` returns its exit status."""

    def __init__(self, config: ServerConfig, command: Sequence[str] = COMMAND) -> None:
        """`command` is a rank's program. Raises ConfigError for a secret that is missing."""
        self._config = config
        self._member = Member(config.engine, command)
        self._probes = Probes(config, self._member)
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal or the leader ends it (0), or a rank or the leader is lost (1).

        Raises ConfigError when the leader refuses the node.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        tls = tls_context(self._config)
        http = HttpServer(uvicorn_config(self._probes, tls))
        listener = open_port(self._config.host, self._config.port)
        log.info("listening on %s, for probes", address(self._config, listener))
        serving = asyncio.create_task(http.serve([listener]))
        refreshing = asyncio.create_task(keep_fresh(tls, self._config)) if tls else None
        try:
            await self._work()
        except EngineError as error:
            log.error("%s", error.message)
            return 0 if self._stop.is_set() else FAILED
        finally:
            if refreshing is not None:
                refreshing.cancel()
            http.should_exit = True
            await serving
        log.info("stopped")
        return 0

    async def _work(self) -> None:
        """Be a member until the ranks end, or some time after a signal. Raises what ended them."""
        working = asyncio.create_task(asyncio.to_thread(self._member.run))
        stopping = asyncio.create_task(self._stop.wait())
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not working.done():
            patience = self._config.drain_seconds + FAREWELL_SECONDS if self._member.ready else 0.0
            await asyncio.wait({working}, timeout=patience)
            self._member.leave()
        await working

    def stop(self) -> None:
        """Leave once the leader has drained; called a second time, exit at once."""
        if self._stop.is_set():
            log.warning("second signal: exiting at once")
            os._exit(FORCED_EXIT)
        log.info("asked to end: this node serves until the leader stops, at most %.0f s", self._config.drain_seconds)
        self._probes.stopping = True
        self._stop.set()
