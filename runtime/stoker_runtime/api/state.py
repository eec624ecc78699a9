"""What the routes of one server share: its phase, its model, and the requests under way.

Invariants: `service` is there exactly from the moment the engine runs; a generating route gets it only when the
server is ready, so nobody's request meets a half-started engine; every generation under way is in `active`.
Knows nothing of routes or sockets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum

from stoker_runtime.api.constraint_checker import ConstraintChecker
from stoker_runtime.api.dialect import Dialect
from stoker_runtime.api.engine_client import EngineClient
from stoker_runtime.api.generation import Generation, Work
from stoker_runtime.api.request_log import log_end, log_start
from stoker_runtime.api.sampling import Limits, SamplingDefaults
from stoker_runtime.board import ACTIVE
from stoker_runtime.chat_template import ChatTemplate
from stoker_runtime.config import ServerConfig
from stoker_runtime.errors import CapacityError, NotFoundError, UnavailableError
from stoker_runtime.metrics import ServerMetrics
from stoker_runtime.tokenizer import Tokenizer


class Phase(StrEnum):
    """Where a server stands in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Service:
    """A model that answers: what is fixed once the engine runs."""

    engine: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    limits: Limits
    defaults: SamplingDefaults
    dialect: Dialect
    constraints: ConstraintChecker = field(default_factory=ConstraintChecker)


@dataclass(slots=True)
class ServerState:
    """The one mutable object of the API process. `detail` says in words what the phase waits for."""

    config: ServerConfig
    metrics: ServerMetrics
    phase: Phase = Phase.STARTING
    detail: str = "the engine is starting"
    service: Service | None = None
    active: set[Generation] = field(default_factory=set)
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names clients may ask for; the first is the one that answers carry."""
        return self.config.model_names

    def check_model(self, name: str | None) -> str:
        """The name that the answer carries. Raises NotFoundError for a model that is not served here."""
        if not name:
            return self.model_names[0]
        if name not in self.model_names:
            raise NotFoundError(f"The model `{name}` does not exist.", param="model", code="model_not_found")
        return name

    def require_service(self) -> Service:
        """The service, to generate with. Raises UnavailableError while starting or draining."""
        if self.phase is not Phase.READY or self.service is None:
            raise UnavailableError(f"The server is {self.phase}: {self.detail}.", code=f"server_{self.phase}")
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
    def generate(self, service: Service, work: Work) -> Iterator[Generation]:
        """A generation that is aborted if it is left before its end. Raises what Generation raises."""
        try:
            generation = Generation(service.engine, service.tokenizer, self.metrics, work)
        except UnavailableError:
            raise
        except CapacityError:
            self.metrics.request_rejected()
            raise
        self.active.add(generation)
        self.metrics.board.cells[ACTIVE] = len(self.active)
        if self.config.log_requests:
            log_start(generation)
        try:
            yield generation
        except CapacityError as error:
            if not isinstance(error, UnavailableError):
                self.metrics.request_rejected()
            raise
        finally:
            self.active.discard(generation)
            self.metrics.board.cells[ACTIVE] = len(self.active)
            generation.abort()
            if self.config.log_requests:
                log_end(generation)
