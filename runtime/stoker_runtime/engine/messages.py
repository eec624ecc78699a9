"""What API processes and the engine process say to each other: typed messages, msgpack on the wire.

An API process names each of its requests by a small integer, the handle, which it never uses twice. A step is one
message per API process: parallel arrays of handles and tokens for all its sequences, and sparse lists for what few
of them have.

Invariants: `decode(encode(message)) == message`. Plain data; no text of a prompt or an answer ever crosses.
Knows nothing of sockets or of who sends what.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any

import msgpack

from stoker_runtime import errors
from stoker_runtime.config import EngineConfig
from stoker_runtime.request import (
    Adapter,
    Constraint,
    ConstraintKind,
    EngineStats,
    FinishReason,
    Image,
    PoolingParams,
    Request,
    SamplingParams,
    TokenLogprobs,
    packed,
    unpacked,
)


@dataclass(frozen=True, slots=True)
class Start:
    """What the parent tells the engine process on its standard input, pickled, before anything else."""

    config: EngineConfig
    endpoint: str
    log_level: str = "info"
    log_json: bool = False


class Kind(IntEnum):
    """The first element of each message."""

    HELLO = 0
    ADD = 1
    ABORT = 2
    STOP = 3
    LOAD = 4
    UNLOAD = 5
    SLEEP = 6
    WAKE = 7
    READY = 10
    FAILED = 11
    REFUSED = 12
    STEP = 13
    ADAPTERS = 14
    DONE = 15


@dataclass(frozen=True, slots=True)
class Hello:
    """API → engine: here I am; answer with Ready when the model is loaded."""


@dataclass(frozen=True, slots=True)
class Add:
    """API → engine: run this request."""

    handle: int
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """API → engine: end these; nothing more is to be said of them."""

    handles: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """API → engine: serve the adapter in the folder `path` as `name`; answer `ticket` with Done."""

    ticket: int
    name: str
    path: str
    parent: str = ""
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Unload:
    """API → engine: take no new requests for the adapter `name`; answer `ticket` with Done."""

    ticket: int
    name: str


@dataclass(frozen=True, slots=True)
class Sleep:
    """API → engine: sleep at `level` once nothing runs; answer `ticket` with Done. With `abort` end what runs."""

    ticket: int
    level: int
    abort: bool = False


@dataclass(frozen=True, slots=True)
class Wake:
    """API → engine: wake these parts, none for all; answer `ticket` with Done."""

    ticket: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stop:
    """API → engine: free the device and exit."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Engine → API: the sizes that were decided, and `describe()` of the executor.

    `max_model_len` is the most tokens of one sequence: by the model, the flags and the pages there are.
    """

    pid: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    page_size: int
    vocab_size: int
    max_queued: int
    eos_token_ids: tuple[int, ...]
    description: dict[str, str]


@dataclass(frozen=True, slots=True)
class Failed:
    """Engine → API: the start failed; the process exits."""

    error: errors.StokerError


@dataclass(frozen=True, slots=True)
class Refused:
    """Engine → API: this request will not run."""

    handle: int
    error: errors.StokerError


@dataclass(frozen=True, slots=True)
class Adapters:
    """Engine → API: the adapters that are served from now on. To all, before whoever asked for a change is answered."""

    served: tuple[Adapter, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """Engine → API: what came of a Load, an Unload, a Sleep or a Wake."""

    ticket: int
    error: errors.StokerError | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A sequence gave its first output."""

    handle: int
    cached_tokens: int
    queue_seconds: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A sequence ended; `complete` as in TokenOutput."""

    handle: int
    reason: FinishReason
    stop_token: int | None = None
    error: str | None = None
    complete: bool = False


@dataclass(slots=True)
class Step:
    """Engine → API: one step's tokens, `tokens[i]` of `handles[i]`; without any, a heartbeat.

    `received` counts the Adds that came from this client so far, so that it knows which ones `stats` leaves out.
    `logprobs` is empty, or parallel to the tokens. `prompt_logprobs` are (handle, entries), `vectors` (handle, fp32).
    """

    stats: EngineStats
    received: int = 0
    handles: array[int] = field(default_factory=lambda: array("q"))
    tokens: array[int] = field(default_factory=lambda: array("i"))
    started: list[Started] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = field(default_factory=list)
    vectors: list[tuple[int, bytes]] = field(default_factory=list)


Message = Hello | Add | Abort | Load | Unload | Sleep | Wake | Stop | Ready | Failed | Refused | Adapters | Done | Step

_PARAMS = tuple(each.name for each in fields(SamplingParams) if each.name != "constraint")
_IMAGE = tuple(each.name for each in fields(Image))
_STATS = tuple(each.name for each in fields(EngineStats))
_READY = tuple(each.name for each in fields(Ready))
_REASONS = tuple(FinishReason)
_REASON_CODES = {reason: code for code, reason in enumerate(_REASONS)}


def encode(message: Message) -> bytes:
    """The message as bytes."""
    packed: bytes = msgpack.packb(_to_wire(message))
    return packed


class Unreadable(errors.EngineError):
    """Bytes that are no message. `handle` is that of the request they were to be, where that much can be read."""

    handle: int | None = None


def decode(data: bytes) -> Message:
    """The message that these bytes are. Raises Unreadable for everything else, whatever it is."""
    values: Any = ()
    try:
        values = msgpack.unpackb(data, use_list=False, strict_map_key=False)
        return _from_wire(*values)
    except errors.EngineError:
        raise
    except Exception as error:
        unreadable = Unreadable(f"A message of the other process cannot be read: {type(error).__name__}: {error}")
        if isinstance(values, tuple) and len(values) > 1 and values[0] == Kind.ADD and _is_handle(values[1]):
            unreadable.handle = values[1]
        raise unreadable from error


def _is_handle(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _from_wire(kind: int, *values: Any) -> Message:
    match kind:
        case Kind.STEP:
            return _step_from_wire(values)
        case Kind.ADD:
            handle, *request = values
            if not _is_handle(handle):
                raise ValueError(f"{handle!r:.40} is no handle")
            return Add(handle, _request_from_wire(request))
        case Kind.ABORT:
            return Abort(tuple(handle for handle in values[0] if _is_handle(handle)))
        case Kind.REFUSED:
            return Refused(values[0], _error_from_wire(values[1]))
        case Kind.READY:
            return Ready(*values)
        case Kind.FAILED:
            return Failed(_error_from_wire(values[0]))
        case Kind.ADAPTERS:
            return Adapters(tuple(Adapter(*each) for each in values[0]))
        case Kind.DONE:
            return Done(values[0], None if values[1] is None else _error_from_wire(values[1]))
        case Kind.LOAD:
            return Load(*values)
        case Kind.UNLOAD:
            return Unload(*values)
        case Kind.SLEEP:
            return Sleep(values[0], int(values[1]), bool(values[2]))
        case Kind.WAKE:
            return Wake(values[0], tuple(map(str, values[1])))
        case Kind.HELLO:
            return Hello()
        case Kind.STOP:
            return Stop()
    raise Unreadable(f"A message of the unknown kind {kind!r} came from the other process.")


def _to_wire(message: Message) -> tuple[Any, ...]:
    match message:
        case Step():
            return (Kind.STEP, *_step_to_wire(message))
        case Add():
            return (Kind.ADD, message.handle, *_request_to_wire(message.request))
        case Abort():
            return (Kind.ABORT, message.handles)
        case Refused():
            return (Kind.REFUSED, message.handle, _error_to_wire(message.error))
        case Ready():
            return (Kind.READY, *(getattr(message, name) for name in _READY))
        case Failed():
            return (Kind.FAILED, _error_to_wire(message.error))
        case Adapters():
            return (Kind.ADAPTERS, [(each.number, each.name, each.path, each.parent) for each in message.served])
        case Done():
            return (Kind.DONE, message.ticket, None if message.error is None else _error_to_wire(message.error))
        case Load():
            return (Kind.LOAD, message.ticket, message.name, message.path, message.parent, message.replace)
        case Unload():
            return (Kind.UNLOAD, message.ticket, message.name)
        case Sleep():
            return (Kind.SLEEP, message.ticket, message.level, message.abort)
        case Wake():
            return (Kind.WAKE, message.ticket, message.tags)
        case Hello():
            return (Kind.HELLO,)
        case Stop():
            return (Kind.STOP,)


def _request_to_wire(request: Request) -> tuple[Any, ...]:
    constraint, pooling = request.params.constraint, request.pooling
    return (
        request.id,
        packed(request.prompt_token_ids),
        tuple(getattr(request.params, name) for name in _PARAMS),
        request.arrival,
        request.priority,
        request.cache_salt,
        request.family,
        request.session,
        None if constraint is None else (constraint.kind.value, constraint.text, constraint.lead),
        None if pooling is None else (pooling.dimensions, pooling.normalize, pooling.second_segment),
        request.adapter,
        [tuple(getattr(image, name) for name in _IMAGE) for image in request.images],
    )


def _request_from_wire(values: Sequence[Any]) -> Request:
    name, prompt, params, arrival, priority, cache_salt, family, session, constraint, pooling, adapter, images = values
    known = dict(zip(_PARAMS, params, strict=True))
    if constraint is not None:
        known["constraint"] = Constraint(ConstraintKind(constraint[0]), *constraint[1:])
    pooled = None if pooling is None else PoolingParams(*pooling)
    asked = SamplingParams(**known)
    how = asked, arrival, priority, cache_salt, family, session, pooled, adapter
    return Request(name, unpacked(prompt), *how, images=tuple(Image(*each) for each in images))


def _step_to_wire(step: Step) -> tuple[Any, ...]:
    return (
        tuple(getattr(step.stats, name) for name in _STATS),
        step.received,
        step.handles.tobytes(),
        step.tokens.tobytes(),
        [(each.handle, each.cached_tokens, each.queue_seconds) for each in step.started],
        [
            (each.handle, _REASON_CODES[each.reason], each.stop_token, each.error, each.complete)
            for each in step.finished
        ],
        [_logprobs_to_wire(each) for each in step.logprobs],
        [(handle, [_logprobs_to_wire(each) for each in entries]) for handle, entries in step.prompt_logprobs],
        step.vectors,
    )


def _step_from_wire(values: Sequence[Any]) -> Step:
    stats, received, handles, tokens, started, finished, logprobs, prompt_logprobs, vectors = values
    step = Step(EngineStats(*stats), received)
    step.handles.frombytes(handles)
    step.tokens.frombytes(tokens)
    step.started = [Started(*each) for each in started]
    step.finished = [Finished(handle, _REASONS[code], *rest) for handle, code, *rest in finished]
    step.logprobs = [TokenLogprobs(*each) if each is not None else None for each in logprobs]
    step.prompt_logprobs = [(handle, [TokenLogprobs(*each) for each in entries]) for handle, entries in prompt_logprobs]
    step.vectors = list(vectors)
    return step


def _logprobs_to_wire(entry: TokenLogprobs | None) -> tuple[Any, ...] | None:
    return (entry.logprob, entry.rank, entry.top) if entry is not None else None


def _error_to_wire(error: errors.StokerError) -> tuple[Any, ...]:
    retry_after = error.retry_after if isinstance(error, errors.CapacityError) else None
    return (type(error).__name__, error.message, error.param, error.code, retry_after)


def _error_from_wire(values: tuple[Any, ...]) -> errors.StokerError:
    name, message, param, code, retry_after = values
    kind = getattr(errors, name, errors.EngineError)
    error: errors.StokerError = kind(message, param=param, code=code)
    if isinstance(error, errors.CapacityError) and retry_after is not None:
        error.retry_after = retry_after
    return error
