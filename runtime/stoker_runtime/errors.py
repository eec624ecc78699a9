"""Every error of the runtime. Who is at fault decides the class; the class decides the HTTP status, once, at the edge.

    StokerError
    ├── RequestError                 the caller's fault: 400
    │   ├── AuthenticationError      401
    │   ├── ForbiddenError           403
    │   ├── NotFoundError            404
     │   ├── DeadlineError            408: the request's own time is over
     │   ├── TooLargeError            413
     │   └── UnsupportedError         501: a route that this server was not started for, or does not have yet
    ├── ConfigError                  the operator's of this server: start-up stops, exit status 2
    │   ├── ModelError               a checkpoint, GGUF file, tokenizer or template that cannot be used
    │   └── KernelUnavailableError   no kernel for this op, dtype and device
    ├── CapacityError                nobody's fault: 429 with Retry-After
    │   └── UnavailableError         503: starting, draining
    ├── StorageError                 the disk is full or failed: 507
    └── EngineError                  ours: 500
        └── EngineDeadError          503: the engine process died or hangs

Knows nothing of HTTP beyond the status code each class carries.
"""

from __future__ import annotations


class StokerError(Exception):
    """Base of all errors. `message` is for people and never holds a secret; `param` names the offending field."""

    status = 500
    type = "server_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class RequestError(StokerError):
    """A request that cannot be served as written."""

    status = 400
    type = "invalid_request_error"


class AuthenticationError(RequestError):
    """A missing or wrong API key."""

    status = 401
    type = "authentication_error"


class ForbiddenError(RequestError):
    """What this caller may not do, whatever the key: no client certificate was shown."""

    status = 403
    type = "permission_error"


class NotFoundError(RequestError):
    """A model, route or object that does not exist."""

    status = 404
    type = "not_found_error"


class DeadlineError(RequestError):
    """The time that the request had is over; what it held is free."""

    status = 408
    type = "timeout_error"


class TooLargeError(RequestError):
    """A body over the size limit."""

    status = 413


class UnsupportedError(RequestError):
    """A route that this server was not started for, or does not have yet; the message says which."""

    status = 501
    type = "not_implemented_error"


class ConfigError(StokerError):
    """A flag, file or variable that names no possible configuration; the message names the key and the fix."""

    type = "config_error"


class ModelError(ConfigError):
    """A checkpoint, tokenizer or template that cannot be used; the message names the file and the tensor or key."""

    type = "model_error"


class KernelUnavailableError(ConfigError):
    """No kernel for an op, dtype and device; never replaced by a silent slow path."""

    type = "kernel_unavailable"


class CapacityError(StokerError):
    """The queue is full. `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"
    retry_after = 1.0


class UnavailableError(CapacityError):
    """The server is starting or draining."""

    status = 503
    type = "service_unavailable"


class AsleepError(UnavailableError):
    """The server sleeps, or is about to."""

    retry_after = 5.0

    def __init__(
        self,
        message: str = "The server is asleep, or falls asleep; POST /wake_up wakes it.",
        *,
        param: str | None = None,
        code: str | None = "server_asleep",
    ) -> None:
        super().__init__(message, param=param, code=code)


class StorageError(StokerError):
    """The disk is full, or failed."""

    status = 507
    type = "storage_error"


class EngineError(StokerError):
    """The engine failed on a request that was right."""


class EngineDeadError(EngineError):
    """The engine process died or does not take steps any more."""

    status = 503
    type = "engine_dead"
