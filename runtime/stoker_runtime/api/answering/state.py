"""What the routes of one server share: its phase, its model, and the requests under way.

Invariants: `service` is there exactly from the moment the engine runs; a generating route gets it only when the
server is ready, so nobody's request meets a half-started engine; every generation under way is in `active`.
Knows nothing of routes or sockets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from stoker_runtime.api.constraints.constraint_checker import ConstraintChecker
from stoker_runtime.api.generate.beam_generation import BeamGeneration
from stoker_runtime.api.generate.engine_client import EngineClient
from stoker_runtime.api.generate.generation import Answers, Generation, Work
from stoker_runtime.api.generate.request_log import log_end, log_start
from stoker_runtime.api.generate.sampling import Limits, SamplingDefaults
from stoker_runtime.api.limits.limiter import RateLimiter
from stoker_runtime.api.tools.dialect import Dialect
from stoker_runtime.config import ServerConfig
from stoker_runtime.errors import AsleepError, CapacityError, EngineError, NotFoundError, RequestError, UnavailableError
from stoker_runtime.images.loading import ImageLoader
from stoker_runtime.metrics import ServerMetrics
from stoker_runtime.models.pooling import PoolingSpec, Task
from stoker_runtime.process.board import ACTIVE, LAST
from stoker_runtime.request import Adapter
from stoker_runtime.text.chat_template import ChatTemplate
from stoker_runtime.text.tokenizer import Tokenizer
from stoker_runtime.tracing import RequestTrace, RequestTracer

_DOES = {
    Task.EMBED: ("embeds texts", "/v1/embeddings"),
    Task.SCORE: ("scores pairs of texts", "/v1/score or /v1/rerank"),
}


def trace_of(generation: Answers, model: str, error: BaseException | None) -> RequestTrace:
    """What a trace says of a request that is over, and of the `error` that ended it."""
    work, params = generation.work, generation.work.params
    return RequestTrace(
        name=work.label,
        operation=work.operation,
        model=model,
        context=work.trace,
        arrival=generation.arrival,
        prompt_tokens=generation.prompt_tokens,
        cached_tokens=generation.cached_tokens,
        sequences=generation.times,
        parameters={
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.choice.count": work.keep,
            "gen_ai.request.n": work.keep,
        },
        error=error or generation.aborted,
    )


@contextmanager
def _charged(generation: Answers) -> Iterator[None]:
    """Charge what was generated, however it ended, where rate limits are counted."""
    charge = generation.work.charge
    failed = False
    try:
        yield
    except (CapacityError, EngineError):
        failed = True
        raise
    finally:
        if charge is not None:
            charge.close(generation.completion_tokens, failed=failed)


class Phase(StrEnum):
    """Where a server stands in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


class FollowedAdapters(Protocol):
    """A list of adapters that this server follows."""

    problem: str
    """What is wrong with the list itself; "" = nothing."""

    def reports(self) -> Sequence[Mapping[str, str]]:
        """What became of each adapter of the list."""
        ...


class Running(Protocol):
    """A client's request under way."""

    def abort(self, reason: str = ...) -> None:
        """End it; whoever waits for it is told `reason`."""
        ...


@dataclass(frozen=True, slots=True)
class Service:
    """A model that answers: what is fixed once the engine runs.

    `pooling`: it embeds or scores, and generates nothing. `names` are the model's own. `images`: it sees.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    limits: Limits
    defaults: SamplingDefaults
    dialect: Dialect
    names: tuple[str, ...]
    constraints: ConstraintChecker = field(default_factory=ConstraintChecker)
    pooling: PoolingSpec | None = None
    images: ImageLoader | None = None

    def adapter_of(self, model: str | None) -> int:
        """The number of the adapter that is called `model`, 0 for the model itself.

        Raises NotFoundError for what is neither: an adapter may have been unloaded since the request came.
        """
        if not model or model in self.names:
            return 0
        adapter = self.engine.adapters.get(model)
        if adapter is None:
            raise unknown_model(model)
        return adapter.number


def unknown_model(name: str) -> NotFoundError:
    """What a client is told who asks for a model that is not served."""
    return NotFoundError(f"The model `{name}` does not exist.", param="model", code="model_not_found")


@dataclass(slots=True)
class ServerState:
    """What is true now of the server in this process. `detail` says in words what the phase waits for."""

    config: ServerConfig
    metrics: ServerMetrics
    phase: Phase = Phase.STARTING
    detail: str = "the engine is starting"
    service: Service | None = None
    active: set[Running] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))
    tracer: RequestTracer | None = None
    followed: FollowedAdapters | None = None
    limiter: RateLimiter | None = None

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may ask for; the first is the one that answers carry."""
        return self.config.model_names

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries. Raises NotFoundError for a model that is not served here."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names and name not in self.adapters:
            raise unknown_model(name)
        return name

    @property
    def sees(self) -> bool:
        """Whether the model takes images."""
        return self.service is not None and self.service.images is not None

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters that are served, by name: models to clients."""
        return self.service.engine.adapters if self.service is not None else {}

    def require_service(self) -> Service:
        """The service, to generate with.

        Raises UnavailableError while starting or draining, RequestError for a model that does not generate.
        """
        service = self.require_ready()
        if service.pooling is not None:
            does, where = _DOES[service.pooling.task]
            raise RequestError(
                f"The model `{self.model_names[0]}` {does}; it does not generate text. Ask {where}.",
                param="model",
                code="model_does_not_generate",
            )
        return service

    def require_pooling(self) -> tuple[Service, PoolingSpec]:
        """The service, to embed or score with; errors as for `require_service`."""
        service = self.require_ready()
        if service.pooling is None:
            raise RequestError(
                f"The model `{self.model_names[0]}` generates text; it does not embed or score. A decoder embeds when "
                "it is served with --runner pooling.",
                param="model",
                code="model_does_not_embed",
            )
        return service, service.pooling

    def require_ready(self) -> Service:
        """The service, whatever it does. Raises UnavailableError while starting or draining, AsleepError asleep."""
        if self.phase is not Phase.READY or self.service is None:
            raise UnavailableError(f"The server is {self.phase}: {self.detail}.", code=f"server_{self.phase}")
        if self.service.engine.stats().sleep_level:
            raise AsleepError
        return self.service

    def loaded(self) -> Service:
        """The service, for routes that generate nothing and so may answer while draining."""
        if self.service is None:
            raise UnavailableError(f"The server is {self.phase}: {self.detail}.", code=f"server_{self.phase}")
        return self.service

    @property
    def load(self) -> int:
        """Client requests under way in the whole server, whichever process has them."""
        return int(self.metrics.board.total(ACTIVE))

    @contextmanager
    def generate(self, service: Service, work: Work) -> Iterator[Answers]:
        """A generation that is aborted if it is left before its end. Raises what Generation raises."""
        kind = Generation if work.beams is None else BeamGeneration
        try:
            generation: Answers = kind(service.engine, service.tokenizer, self.metrics, work)
        except (CapacityError, EngineError) as error:
            if work.charge is not None:
                work.charge.close(0, failed=True)
            if isinstance(error, CapacityError) and not isinstance(error, UnavailableError):
                self.metrics.request_rejected()
            raise
        if self.config.log_requests:
            log_start(generation)
        try:
            with _charged(generation), self._traced(service, generation), self.under_way(generation):
                yield generation
        except CapacityError as error:
            if not isinstance(error, UnavailableError):
                self.metrics.request_rejected()
            raise
        finally:
            if self.config.log_requests:
                log_end(generation)

    @contextmanager
    def _traced(self, service: Service, generation: Answers) -> Iterator[None]:
        """Send a trace of `generation` once it is over, where traces are sent."""
        if self.tracer is None:
            yield
            return
        error: BaseException | None = None
        model = self._model_of(service, generation.work)  # an adapter may be unloaded before its request ends
        try:
            yield
        except BaseException as found:
            error = found
            raise
        finally:
            self.tracer.record(trace_of(generation, model, error))

    def _model_of(self, service: Service, work: Work) -> str:
        named = (each.name for each in service.engine.adapters.values() if each.number == work.adapter)
        return next(named, self.model_names[0])

    @contextmanager
    def under_way(self, running: Running) -> Iterator[None]:
        """Count `running` among what is under way, and abort it if it is left before its end."""
        self.active.add(running)
        self._count()
        try:
            yield
        finally:
            self.active.discard(running)
            self._count()
            running.abort()

    def _count(self) -> None:
        """Tell all processes what is under way in this one, and that it changed now."""
        cells = self.metrics.board.cells
        cells[LAST] = time.monotonic()
        cells[ACTIVE] = len(self.active)
