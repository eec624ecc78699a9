"""The life of a server: open the port, start the engine, warm up, serve, drain, stop.

    1. the port opens and answers "starting", the engine process starts, the tokenizer loads beside it
    2. a warm-up completion goes through the engine; only then is the server ready
    3. SIGTERM or SIGINT: no new requests, running streams finish within `drain_seconds`, exit status 0
    4. a second signal: exit at once

Invariants: whatever ends a start, the engine process is closed and the error is the one that caused it. The log
tells each phase with its seconds.
Knows nothing of routes or of how the engine works inside.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from stoker_runtime.api.answering.state import Phase, ServerState, Service
from stoker_runtime.api.app import Application
from stoker_runtime.api.generate.sampling import Limits, SamplingDefaults, load_defaults
from stoker_runtime.api.limits.ledger import Ledger
from stoker_runtime.api.responses.store import ResponseStore
from stoker_runtime.api.tools.dialect import Dialect, choose_dialect
from stoker_runtime.config import EngineConfig, ServerConfig
from stoker_runtime.images.loading import ImageLoader
from stoker_runtime.images.placeholders import placeholders
from stoker_runtime.images.rule import read_rule
from stoker_runtime.metrics import EngineView, ServerMetrics
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.pooling import PoolingSpec, read_pooling
from stoker_runtime.process.board import LAST, WARM, Board
from stoker_runtime.process.clock import process_age
from stoker_runtime.process.exit_status import FORCED_EXIT
from stoker_runtime.serve.adapter_file import AdapterFile
from stoker_runtime.serve.even import EvenPort
from stoker_runtime.serve.owned_engine import Mortal, OwnedEngine, StartEngine
from stoker_runtime.serve.port import address, open_port
from stoker_runtime.serve.tls import keep_fresh, tls_context
from stoker_runtime.serve.warm_up import warm_up
from stoker_runtime.serve.web import GOODBYE_SECONDS, HttpServer, uvicorn_config
from stoker_runtime.text.chat_template import ChatTemplate, load_chat_template
from stoker_runtime.text.tokenizer import Tokenizer
from stoker_runtime.tracing import open_tracer

log = logging.getLogger(__name__)
MOURNING_SECONDS = 0.5  # all of a fault's five seconds may be gone until it is found
WARM_UP_SECONDS = 300.0
ADAPTER_SECONDS = 120.0
POLL_SECONDS = 0.02


class Phases:
    """Seconds of each phase of a start, for one line of the log. The total counts from the process's beginning."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        began = time.monotonic()
        yield
        self._parts.append(f"{name} {time.monotonic() - began:.2f}")

    def detail(self, description: Mapping[str, str]) -> None:
        """Put the phases that an engine tells of itself (`seconds.NAME`) behind the last one measured."""
        told = [(name.partition(".")[2], text) for name, text in description.items() if name.startswith("seconds.")]
        if told:
            self._parts[-1] += f" [{', '.join(f'{name} {text}' for name, text in told)}]"

    def summary(self) -> str:
        """`3.10 s (tokenizer 0.20, engine 2.70 [import 2.10, …], …)`."""
        return f"{process_age():.2f} s ({', '.join(self._parts)})"


class Seat(NamedTuple):
    """One API process's place among several: the socket it accepts from, and what they share."""

    listener: socket.socket
    board: Board
    responses: ResponseStore
    ledger: Ledger


class Server:
    """One server process. `run` returns its exit status."""

    def __init__(self, config: ServerConfig, start_engine: StartEngine, seat: Seat | None = None) -> None:
        """`seat`: this process's place among several; without one it is alone and opens the port itself."""
        self.config = config
        self._seat = seat
        self._board = seat.board if seat else Board()
        metrics = ServerMetrics(config.model_names[0], self._board)
        self.state = ServerState(config, metrics)
        self.app: Application | None = None
        self._start_engine = start_engine
        self._engine: OwnedEngine | None = None
        self._adapters: AdapterFile | None = None
        self._following: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal (0), or until the engine is dead (1).

        Raises ConfigError, ModelError or EngineError when the start fails.
        """
        self._catch_signals()
        tls = tls_context(self.config)
        if self.config.lora_modules_file:
            self._adapters = AdapterFile(self.config.lora_modules_file, self.config.model_names)
            self.state.followed = self._adapters
        tracer = self.state.tracer = open_tracer(self.config.otlp_traces_endpoint, self.state.metrics.spans)
        seat = self._seat
        self.app = Application(self.state, seat.responses if seat else None, seat.ledger if seat else None)
        listeners: list[socket.socket] = []
        if seat is None:
            listeners = [open_port(self.config.host, self.config.port)]
            log.info("listening on %s", address(self.config, listeners[0]))
        http = HttpServer(uvicorn_config(self.app, tls), EvenPort(seat.listener, seat.board) if seat else None)
        starting = asyncio.create_task(self._start())
        stopping = asyncio.create_task(self._stop.wait())
        serving = asyncio.create_task(self._serve(http, listeners, starting))
        refreshing = asyncio.create_task(keep_fresh(tls, self.config)) if tls else None
        try:
            asked = await self._end(starting, stopping)
            await self._drain(self.config.drain_seconds if asked else 0.0)
        finally:
            ending = [task for task in (starting, stopping, self._following) if task is not None]
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)
            if self._engine is not None:
                await self._engine.close()
            if refreshing is not None:
                refreshing.cancel()
            http.should_exit = True
            await serving
            if tracer is not None:
                await asyncio.to_thread(tracer.close)
        log.info("stopped")
        return 0 if asked else 1

    async def _end(self, starting: asyncio.Task[None], stopping: asyncio.Task[bool]) -> bool:
        """Wait for the end; whether a signal asked for it. Raises what made the start fail."""
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return True
        await starting
        assert self._engine is not None, "started without an engine"
        losing = asyncio.create_task(outlast(self._engine))
        try:
            await asyncio.wait({losing, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if losing.done():
                losing.result()
        finally:
            losing.cancel()
        return stopping.done()

    async def _serve(self, http: HttpServer, listeners: list[socket.socket], starting: asyncio.Task[None]) -> None:
        """Answer whoever connects. A process that replaces another lets them wait until it can."""
        if self._board.all_warm:
            await asyncio.wait({starting})
        await http.serve(listeners)

    def stop(self) -> None:
        """Drain and stop; called a second time, exit at once."""
        if self._stop.is_set():
            log.warning("second signal: exiting at once")
            # The engine process sees its pipe close and ends by itself.
            os._exit(FORCED_EXIT)
        self._stop.set()

    def _catch_signals(self) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        if self._seat is None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self.stop)
        else:
            # The terminal sends it to every process; whoever started this one passes on what is meant.
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    async def _start(self) -> None:
        phases = Phases()
        engine = asyncio.ensure_future(self._start_engine(self.config.engine))
        try:
            with phases.measure("tokenizer"):
                text_side = await asyncio.to_thread(load_text_side, self.config)
            with phases.measure("engine"):
                self._engine = await engine
            phases.detail(self._engine.ready.description)
        except BaseException:
            engine.cancel()
            raise
        service = self._service(self._engine, text_side)
        self.state.service = service
        self.state.detail = "the warm-up completion is running"
        with phases.measure("warm-up"):
            for each in self._engine.engines:
                await asyncio.wait_for(warm_up(service, each), WARM_UP_SECONDS)
        if self._adapters is not None:
            with phases.measure("adapters"):
                await self._follow(self._adapters, self._engine)
        self._board.cells[WARM] = 1.0
        self._board.cells[LAST] = time.monotonic()
        while not self._board.all_warm:
            await asyncio.sleep(POLL_SECONDS)
        # What lives now lives for ever: the collector need not look at it again in the middle of a stream.
        gc.collect()
        gc.freeze()
        self.state.phase = Phase.READY
        self.state.detail = ""
        if self.app is not None and self.app.batches is not None:
            self.app.batches.start()
        if service.pooling is None:
            dialect = service.dialect
            log.info("tool calls: %s; reasoning: %s", dialect.tool_parser or "none", dialect.reasoning_parser or "none")
        log.info("ready in %s; serving %s", phases.summary(), ", ".join(self.state.model_names))

    async def _follow(self, adapters: AdapterFile, engine: OwnedEngine) -> None:
        """Serve what the file of adapters names, and follow it from then on. A folder that hangs delays no start."""

        async def follow() -> None:
            await adapters.start(engine)
            taken_up.set()
            await adapters.run()

        taken_up = asyncio.Event()
        self.state.detail = "its adapters are being loaded"
        self._following = asyncio.create_task(follow())
        first = asyncio.create_task(taken_up.wait())
        await asyncio.wait({first, self._following}, timeout=ADAPTER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if self._following.done():
            self._following.result()

    def _service(self, engine: OwnedEngine, text_side: TextSide) -> Service:
        limits = Limits(
            engine.max_model_len,
            engine.vocab_size,
            self.config.engine.scheduling_policy == "priority",
            engine.ready.eos_token_ids,
            self.config.engine.max_queued,
        )
        self.state.metrics.attach([
            EngineView(each.stats, each.ready.page_size, each.ready.num_pages) for each in engine.engines
        ])  # fmt: skip
        if self.config.engine.enable_lora:
            self.state.metrics.attach_adapters(self.config.engine.max_loras)
        return Service(
            engine,
            text_side.tokenizer,
            text_side.template,
            limits,
            text_side.defaults,
            text_side.dialect,
            pooling=text_side.pooling,
            names=self.config.model_names,
            images=text_side.images,
        )

    async def _drain(self, patience: float) -> None:
        state = self.state
        state.phase, state.detail = Phase.DRAINING, "it is shutting down"
        if self.app is not None and self.app.batches is not None:
            # Their lines run again at the next start, so nobody need wait for them.
            await self.app.batches.stop()
        if state.load:
            log.info("draining: %d requests are running, they have %.0f s", state.load, patience)
        if not await _empty(state, patience):
            log.warning("%d requests are cut short after %.0f s", len(state.active), patience)
            for generation in list(state.active):
                generation.abort("The server is shutting down.")
            await _empty(state, GOODBYE_SECONDS)


async def _empty(state: ServerState, seconds: float) -> bool:
    """Wait until no request is under way in any process, at most `seconds`: who is done first answers until then."""
    deadline = time.monotonic() + seconds
    while state.load:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
    return True


class TextSide(NamedTuple):
    """What the API process needs of the model's files."""

    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: SamplingDefaults
    dialect: Dialect
    pooling: PoolingSpec | None
    images: ImageLoader | None


def load_text_side(config: ServerConfig) -> TextSide:
    """What the API process needs of the model's files. Raises ModelError or ConfigError."""
    source = config.engine.tokenizer or config.engine.model
    tokenizer = Tokenizer.load(source)
    template = load_chat_template(
        config.chat_template, tokenizer.chat_templates, tokenizer.special_tokens, tokenizer.source
    )
    defaults = load_defaults(config.engine.model) if config.generation_config == "auto" else SamplingDefaults()
    pooling = find_pooling(config.engine)
    images = find_images(config, tokenizer) if pooling is None else None
    return TextSide(tokenizer, template, defaults, choose_dialect(config, template), pooling, images)


def find_images(config: ServerConfig, tokenizer: Tokenizer) -> ImageLoader | None:
    """What loads images for the model; None where it does not see. Raises ModelError."""
    # Shapes have no words for an image, and of a GGUF file the vision tower lies elsewhere.
    if config.engine.language_model_only or not (Path(config.engine.model) / "config.json").is_file():
        return None
    rule = read_rule(read_source(config.engine.model))
    if rule is None:
        return None
    log.info("images: %s, of at most %d pixels", rule.kind, rule.max_pixels)
    places = placeholders(rule, tokenizer.id_to_token)
    return ImageLoader(rule, places, config.allowed_media_domains, config.image_limit)


def find_pooling(config: EngineConfig) -> PoolingSpec | None:
    """How the model pools; None where it generates. Raises ModelError or ConfigError."""
    # Only files can say by themselves that a model pools.
    model = Path(config.model)
    if config.runner != "pooling" and not model.is_file() and not (model / "config.json").is_file():
        return None
    return read_pooling(read_source(config.model), config)


async def outlast(engine: Mortal) -> None:
    """Return a while after the engine has died: until then whoever asks, a probe too, is told why."""
    error = await engine.died()
    log.error("%s The server ends, for nothing else brings an engine back.", error.message)
    await asyncio.sleep(MOURNING_SECONDS)
