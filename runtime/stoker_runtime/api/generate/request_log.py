"""The log of requests: what each asked for and what it got, in parameters and counts.

Invariants: no text of a prompt or an answer, and no token id, ever stands in it; of a constraint only its kind does.
Knows nothing of HTTP. On by `--enable-log-requests`.
"""

from __future__ import annotations

import logging
import time
from dataclasses import fields

from stoker_runtime.api.generate.generation import Answers
from stoker_runtime.request import SamplingParams

log = logging.getLogger("stoker.requests")
_DEFAULTS = SamplingParams()
# Their values would tell what the client's text is about.
_COUNTED = frozenset({"logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words"})


def log_start(generation: Answers) -> None:
    """A request was submitted."""
    work = generation.work
    lengths = "+".join(str(len(prompt.ids)) for prompt in work.prompts)
    log.info(
        "received: prompt tokens %s, n=%d, %s",
        lengths,
        work.n,
        describe(work.params),
        extra={"request_id": work.label},
    )


def log_end(generation: Answers) -> None:
    """A request ended, however it did."""
    log.info(
        "finished: %d prompt tokens (%d cached), %d generated, %s, %.3f s",
        generation.prompt_tokens,
        generation.cached_tokens,
        generation.completion_tokens,
        "complete" if generation.aborted is None else f"aborted ({generation.aborted.message})",
        time.monotonic() - generation.arrival,
        extra={"request_id": generation.work.label},
    )


def describe(params: SamplingParams) -> str:
    """The parameters that are not at their default."""
    parts: list[str] = []
    for field in fields(params):
        value = getattr(params, field.name)
        if value == getattr(_DEFAULTS, field.name):
            continue
        if field.name == "constraint":
            value = value.kind.value
        elif field.name in _COUNTED:
            value = f"({len(value)})"
        parts.append(f"{field.name}={value}")
    return ", ".join(parts) or "all parameters at their defaults"
