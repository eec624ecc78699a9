"""What the engine process does: builds the executor, then receives requests, steps, and publishes tokens, in one
thread. `__main__.py` starts it.

Invariants: a client gets one message per step that concerns it, and one every `HEARTBEAT_SECONDS` otherwise; with
nothing to do the process sleeps in a poll. A slow or dead client never blocks a step.
Knows nothing of text or HTTP.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import zmq

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.adapters import OFF
from stoker_runtime.engine.executor_protocol import Executor, ExecutorFactory, PoolingExecutor
from stoker_runtime.engine.kv_events import KvEventPublisher
from stoker_runtime.engine.messages import (
    Abort,
    Adapters,
    Add,
    Done,
    Failed,
    Hello,
    Load,
    Message,
    Ready,
    Refused,
    Sleep,
    Start,
    Step,
    Stop,
    Unload,
    Unreadable,
    Wake,
    decode,
    encode,
)
from stoker_runtime.engine.outbound import split_by_client, step_message
from stoker_runtime.engine.pooling_loop import PoolingLoop
from stoker_runtime.engine.speculation_log import SpeculationLog
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import ConfigError, EngineDeadError, EngineError, StokerError, UnsupportedError
from stoker_runtime.process.heap import return_free_memory
from stoker_runtime.request import EngineStats
from stoker_runtime.scheduler.draft import StepOutput
from stoker_runtime.scheduler.sequence import Sequence
from stoker_runtime.weights.upload_ahead import UploadAhead

if TYPE_CHECKING:
    from stoker_runtime.ranks.crew import Crew

HEARTBEAT_SECONDS = 0.5
READ_SECONDS = 0.01
FAREWELL_MS = 2000
"""How long an ending process waits for its last messages to leave."""

Loop = StepLoop | PoolingLoop

log = logging.getLogger("stoker_runtime.engine.core")


@dataclass(slots=True)
class Client:
    """One API process: its identity on the socket and its live sequences by handle."""

    identity: bytes
    index: int
    sequences: dict[int, Sequence] = field(default_factory=dict)
    received: int = 0
    last_sent: float = 0.0


class EngineCore:
    """The loop between socket and step loop."""

    def __init__(self, loop: Loop, socket: zmq.Socket[bytes], events: KvEventPublisher | None = None) -> None:
        """`events`, unless None, publishes what the prefix cache gains and loses."""
        self._loop = loop
        self._events = events
        self._adapters = loop.adapters if isinstance(loop, StepLoop) else None
        self._sleeper = loop.sleeper if isinstance(loop, StepLoop) else None
        self._preparing = True
        """Whether the executor may have something left to prepare."""
        self._socket = socket
        self._clients: dict[bytes, Client] = {}
        self._by_index: list[Client] = []
        self._stopped = False
        self._speculation_log = SpeculationLog()

    def run(self) -> None:
        """Serve until a client says Stop. Raises what breaks the executor, after telling the clients."""
        while not self._stopped:
            reading = self._adapters is not None and self._adapters.busy
            resting, ordered = (self._sleeper.resting, self._sleeper.busy) if self._sleeper else (False, False)
            prepares = self._preparing and not resting
            self._receive(wait=not (prepares or reading or ordered or self._loop.has_work))
            if self._loop.has_work:
                self._step()
            elif self._adapters is not None and reading:
                self._adapters.take_over(StepOutput(), idle=True)
            elif prepares and not (self._sleeper and self._sleeper.resting):
                self._preparing = self._loop.executor.idle()
            if self._sleeper is not None and self._sleeper.advance(idle=not self._loop.has_work):
                self._preparing = True
            if self._events is not None:
                self._events.publish()
            self._heartbeat()

    def _receive(self, *, wait: bool) -> None:
        ready, until = self._socket.poll(int(HEARTBEAT_SECONDS * 1000) if wait else 0), time.monotonic() + READ_SECONDS
        while ready:
            identity, data = self._socket.recv_multipart()
            client = self._clients.get(identity) or self._meet(identity)
            try:
                self._handle(client, decode(data))
            except Unreadable as error:
                self._disregard(client, error)
            ready = self._socket.poll(0) if time.monotonic() < until else 0

    def _disregard(self, client: Client, error: Unreadable) -> None:
        """No message ends the engine: what cannot be read is refused where it has a handle, and else dropped."""
        log.error("a message of an API process is disregarded: %s", error.message)
        if error.handle is not None:
            client.received += 1
            self._send(client, Refused(error.handle, error))

    def _handle(self, client: Client, message: Message) -> None:
        match message:
            case Add():
                self._add(client, message)
            case Abort(handles):
                for handle in handles:
                    if (sequence := client.sequences.pop(handle, None)) is not None:
                        self._loop.abort(sequence)
            case Load() | Unload():
                self._change_adapters(client, message)
            case Sleep() | Wake():
                self._order(client, message)
            case Hello():
                if self._adapters is not None and self._adapters.served:
                    self._send(client, Adapters(tuple(self._adapters.served.values())))
                self._send(client, describe_ready(self._loop))
            case Stop():
                self._stopped = True
            case _:
                raise Unreadable(f"A client sent {type(message).__name__}, which only the engine sends.")

    def _meet(self, identity: bytes) -> Client:
        client = Client(identity, len(self._by_index))
        self._clients[identity] = client
        self._by_index.append(client)
        return client

    def _add(self, client: Client, message: Add) -> None:
        client.received += 1
        try:
            sequence = self._loop.add(message.request, client=client.index, handle=message.handle)
        except StokerError as error:
            self._send(client, Refused(message.handle, error))
        else:
            client.sequences[message.handle] = sequence

    def _change_adapters(self, client: Client, message: Load | Unload) -> None:
        def told(error: StokerError | None) -> None:
            if error is None and self._adapters is not None:
                listed = Adapters(tuple(self._adapters.served.values()))
                for each in list(self._clients.values()):
                    self._send(each, listed)
            self._send(client, Done(message.ticket, error))

        try:
            if self._adapters is None:
                raise UnsupportedError(OFF)
            if isinstance(message, Load):
                self._adapters.load(message.name, message.path, message.parent, told, replace=message.replace)
            else:
                self._adapters.unload(message.name)
                told(None)
        except StokerError as error:
            told(error)

    def _order(self, client: Client, message: Sleep | Wake) -> None:
        def told(error: StokerError | None) -> None:
            # All know before whoever asked is answered.
            for each in list(self._clients.values()):
                self._send(each, Step(self._stats(), each.received))
            self._send(client, Done(message.ticket, error))

        try:
            if self._sleeper is None:
                raise UnsupportedError("A model that pools does not sleep.")
            if isinstance(message, Wake):
                self._sleeper.wake(message.tags, told)
                return
            self._sleeper.sleep(message.level, told)
        except StokerError as error:
            told(error)
        else:
            if message.abort and isinstance(self._loop, StepLoop):
                output = StepOutput()
                for sequence in [each for known in self._by_index for each in known.sequences.values()]:
                    self._loop.cut_short(sequence, output)
                self._publish(output)

    def _step(self) -> None:
        try:
            output = self._loop.step()
        except EngineDeadError as error:
            self._publish(StepOutput(finished=self._loop.fail(error)))
            raise
        except EngineError as error:
            log.exception("a step failed; the sequences it touched end")
            self._publish(StepOutput(finished=self._loop.fail(error)))
        except Exception as error:
            self._publish(StepOutput(finished=self._loop.fail(error)))
            raise
        else:
            self._publish(output)

    def _publish(self, output: StepOutput) -> None:
        if not output.tokens and not output.finished and not output.prompt_logprobs:
            return
        stats = self._stats()
        if stats.drafts:
            self._speculation_log.tell(stats, time.monotonic())
        if len(self._by_index) == 1:
            self._send(self._by_index[0], step_message(output, stats, self._by_index[0].received))
        else:
            for index, part in split_by_client(output).items():
                client = self._by_index[index]
                self._send(client, step_message(part, stats, client.received))
        for sequence in output.finished:
            self._by_index[sequence.client].sequences.pop(sequence.handle, None)

    def _stats(self) -> EngineStats:
        stats = self._loop.stats()
        if self._events is not None:
            self._events.count(stats)
        return stats

    def _heartbeat(self) -> None:
        now = time.monotonic()
        for client in list(self._clients.values()):
            if now - client.last_sent >= HEARTBEAT_SECONDS:
                self._send(client, Step(self._stats(), client.received))

    def _send(self, client: Client, message: Message) -> None:
        client.last_sent = time.monotonic()
        try:
            self._socket.send_multipart((client.identity, encode(message)), flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._forget(client)

    def _forget(self, client: Client) -> None:
        """The client's process is gone: end what it asked for."""
        if self._clients.pop(client.identity, None) is None:
            return
        level = logging.WARNING if client.sequences else logging.INFO
        log.log(level, "an API process went away; its %d open requests are aborted", len(client.sequences))
        for sequence in client.sequences.values():
            self._loop.abort(sequence)
        client.sequences.clear()


def make_loop(executor: Executor | PoolingExecutor, config: EngineConfig) -> Loop:
    """The loop that drives this kind of executor."""
    if isinstance(executor, PoolingExecutor):
        return PoolingLoop(executor, config)
    loop = StepLoop(executor, config)
    for module in config.lora_modules:
        loop.adapters.load_configured(module)
    return loop


def open_events(loop: Loop, config: EngineConfig) -> KvEventPublisher | None:
    """What publishes the prefix cache's events, where the configuration says so. Raises ConfigError."""
    settings = config.kv_events_config
    if settings is None or not settings.publishes:
        return None
    if not isinstance(loop, StepLoop) or loop.journal is None:
        told = "kv_events_config: a model that pools has no prefix cache to tell of; leave --kv-events-config out."
        raise ConfigError(told, param="kv_events_config")
    adapters = loop.adapters
    return KvEventPublisher(settings, loop.journal, lambda: adapters.served)


def describe_ready(loop: Loop) -> Ready:
    """The answer to a Hello."""
    executor = loop.executor
    return Ready(
        pid=os.getpid(),
        max_model_len=loop.max_tokens,
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        num_pages=executor.num_pages,
        page_size=executor.page_size,
        vocab_size=executor.vocab_size,
        max_queued=loop.max_queued,
        eos_token_ids=tuple(executor.eos_token_ids),
        description=executor.describe(),
    )


def run(start: Start, ahead: UploadAhead | None, build: ExecutorFactory) -> int:
    """The life of the process that was told `start`, to the exit status. `ahead` is its head start."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, FAREWELL_MS)
        socket.bind(start.endpoint)
        return build_and_serve(start.config, build, socket, ahead)


def build_and_serve(
    config: EngineConfig, build: ExecutorFactory, socket: zmq.Socket[bytes], ahead: UploadAhead | None
) -> int:
    """Build the executor and serve; 0 after a Stop, 2 for a configuration that cannot work, 1 for a breakdown."""
    try:
        executor = build(config, ahead)
        loop = make_loop(executor, config)
        events = open_events(loop, config)
    except Exception as error:
        if not isinstance(error, StokerError):
            log.exception("the engine did not start")
            error = EngineError(f"The engine did not start: {type(error).__name__}: {error}")
        tell_failure(socket, error)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        if ahead is not None:
            ahead.close()
    # What was loaded lives until the end: keep the collector from walking it in the middle of a step.
    gc.collect()
    gc.freeze()
    gc.enable()
    return_free_memory()
    log.info("engine ready, process %d", os.getpid())
    try:
        EngineCore(loop, socket, events).run()
    except Exception:
        log.critical("the executor is broken; the engine process ends", exc_info=True)
        return 1
    finally:
        if events is not None:
            events.close()
        if isinstance(loop, StepLoop):
            loop.sleeper.close()
        executor.close()
    return 0


def tell_failure(socket: zmq.Socket[bytes], error: StokerError) -> None:
    """Answer the Hello of those who wait for the start."""
    data = encode(Failed(error))
    while socket.poll(FAREWELL_MS // 10):
        identity, _ = socket.recv_multipart()
        socket.send_multipart((identity, data))


def build_executor(
    config: EngineConfig, ahead: UploadAhead | None, crew: Crew | None = None
) -> Executor | PoolingExecutor:
    """The real executor. Imported here so that a failing import is reported like any failing start."""
    from stoker_runtime.ranks.build import build_model, end_process

    return build_model(config, ahead, on_fault=end_process, crew=crew)
