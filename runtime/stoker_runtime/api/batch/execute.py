"""Runs one line of a batch as a request of this server to itself.

Invariants: what passes (a full queue, a rate limit, a server that is starting or draining) is waited out and never
becomes a result; everything else does, an error of the line's own included.
Knows nothing of files or of other lines.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message

from stoker_runtime.api.answering.intake import Ask, ask_within, raw_of
from stoker_runtime.api.answering.loopback import whole
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.batch.lines import Line
from stoker_runtime.api.http.aside import aside
from stoker_runtime.api.http.caller import Caller
from stoker_runtime.api.http.errors import error_body
from stoker_runtime.api.openai.chat import create_chat_completion
from stoker_runtime.api.openai.completions import create_completion
from stoker_runtime.api.openai.protocol import ChatBody, CompletionBody
from stoker_runtime.api.pooling.bodies import EmbeddingBody
from stoker_runtime.api.pooling.embeddings import create_embedding
from stoker_runtime.api.responses.background import Shelf
from stoker_runtime.api.responses.routes import create_response
from stoker_runtime.errors import CapacityError, EngineDeadError, EngineError, RequestError, StokerError

log = logging.getLogger(__name__)
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
# Behind every interactive request where the policy is `priority`; lower runs first.
PRIORITY = 1_000_000


async def _nobody_leaves() -> Message:
    """What a client does that waits for ever."""
    await asyncio.Event().wait()
    raise RuntimeError("An event that nobody sets was set.")


class LineExecutor:
    """Runs lines on the routes of one server."""

    def __init__(self, state: ServerState, shelf: Shelf) -> None:
        self._state = state
        self._shelf = shelf

    async def __call__(self, endpoint: str, line: Line, owner: str) -> dict[str, Any]:
        """The entry of `line`, which is run for `owner`, in the results."""
        name = f"batch_req_{uuid.uuid4().hex}"
        caller = Caller(name, _nobody_leaves, owner=owner)
        while True:
            try:
                status, body = await self._answer(endpoint, line, caller)
                break
            except CapacityError as error:
                # Not all at once: lines that wait for the same rate limit are let in one after the other.
                await asyncio.sleep(error.retry_after + random.random())
            except EngineDeadError:
                # Whoever watches the server's health starts it again.
                await asyncio.sleep(CapacityError.retry_after)
        return {
            "id": name,
            "custom_id": line.custom_id,
            "response": {"status_code": status, "request_id": name, "body": body},
            "error": None,
        }

    async def _answer(self, endpoint: str, line: Line, caller: Caller) -> tuple[int, Any]:
        """Status and body. Raises CapacityError and EngineDeadError."""
        try:
            answer = await self._ask(endpoint, caller, self._payload(endpoint, line.body), line.size)
            return answer.status_code, whole(answer)
        except (CapacityError, EngineDeadError):
            raise
        except StokerError as error:
            return error.status, error_body(error)
        except Exception:
            log.exception("A line of a batch failed.", extra={"request_id": caller.request_id})
            failure = EngineError("The server failed on this request.")
            return failure.status, error_body(failure)

    async def _ask(self, endpoint: str, caller: Caller, payload: dict[str, Any], size: int) -> Response:
        state = self._state
        if endpoint == "/v1/chat/completions":
            return await create_chat_completion(await ask_within(payload, ChatBody, state, caller, size))
        if endpoint == "/v1/completions":
            return await create_completion(await ask_within(payload, CompletionBody, state, caller, size))
        if endpoint == "/v1/embeddings":
            return await create_embedding(await ask_within(payload, EmbeddingBody, state, caller, size))
        return await create_response(Ask(state, caller, await aside(size, lambda: raw_of(payload))), self._shelf)

    def _payload(self, endpoint: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The body as it runs. Raises RequestError for what makes no sense in a batch."""
        for name in ("stream", "background"):
            if body.get(name):
                raise RequestError(f"{name} is not allowed in a batch.", param=name)
        found = dict(body)
        if endpoint == "/v1/responses":
            # Thousands of lines would push what people talk about out of the store.
            found.setdefault("store", False)
        if endpoint in GENERATING and self._state.require_service().limits.priorities:
            found.setdefault("priority", PRIORITY)
        return found
