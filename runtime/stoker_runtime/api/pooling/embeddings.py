"""POST /v1/embeddings and /pooling: a vector for each text.

Invariants: answers are in the order of the inputs, and each vector is the same in either encoding.
Knows nothing of how vectors are computed.
"""

from __future__ import annotations

import base64
import sys
import time
import uuid
from array import array
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from stoker_runtime.api.answering.intake import Ask, ReadBody
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.http.answers import Later, json_answer
from stoker_runtime.api.http.caller import Caller
from stoker_runtime.api.http.routing import Route
from stoker_runtime.api.pooling.bodies import EmbeddingBody, PoolingBody, PoolingFields
from stoker_runtime.api.pooling.job import PoolingWork, TextEncoder, make_pooling_work, open_job
from stoker_runtime.errors import RequestError
from stoker_runtime.models.pooling import Task, check_dimensions
from stoker_runtime.request import PoolingParams

router = APIRouter(route_class=Route)


@router.post("/v1/embeddings")
async def create_embedding(ask: Annotated[Ask[EmbeddingBody], Depends(ReadBody(EmbeddingBody))]) -> Response:
    """POST /v1/embeddings: the vectors of texts. Raises RequestError, CapacityError or EngineError."""
    state, caller, body = ask
    model = state.check_model(body.model)
    if state.require_pooling()[1].task is not Task.EMBED:
        raise RequestError(f"The model `{model}` scores pairs of texts; it has no embeddings. Ask /v1/score.")
    vectors, answer = await _pooled(state, caller, body, pooling_id("embd", body))

    def whole() -> dict[str, Any]:
        data = [
            {"index": at, "object": "embedding", "embedding": Later(partial(spelled, vector, body.encoding_format))}
            for at, vector in enumerate(vectors)
        ]
        return {**answer, "model": model, "data": data}

    return await json_answer(sum(map(len, vectors)), whole)


@router.post("/pooling")
async def create_pooling(ask: Annotated[Ask[PoolingBody], Depends(ReadBody(PoolingBody))]) -> Response:
    """POST /pooling: what the model pools of each text. Raises RequestError, CapacityError or EngineError."""
    state, caller, body = ask
    model = state.check_model(body.model)
    task = state.require_pooling()[1].task
    if body.task not in (None, task):
        raise RequestError(f"The model `{model}` has the task {task}, not {body.task}.", param="task")
    vectors, answer = await _pooled(state, caller, body, pooling_id("pool", body))

    def whole() -> dict[str, Any]:
        data = [
            {"index": at, "object": "pooling", "data": Later(partial(spelled, vector, body.encoding_format))}
            for at, vector in enumerate(vectors)
        ]
        return {**answer, "model": model, "data": data}

    return await json_answer(sum(map(len, vectors)), whole)


async def _pooled(
    state: ServerState, caller: Caller, body: EmbeddingBody, answer_id: str
) -> tuple[list[bytes], dict[str, Any]]:
    """The vectors of the texts of `body`, and what the answer says besides."""
    service, pooling = state.require_pooling()
    check_dimensions(pooling, body.dimensions)
    texts = await TextEncoder(service, body).encode(body.input, "input", pooling.prompt(body.prompt_name))
    work = make_pooling_work(service, body, texts, PoolingParams(body.dimensions, body.normalize), answer_id)
    with open_job(state, service, work, caller) as job:
        vectors = await job.vectors(caller.receive)
    return vectors, {
        "id": answer_id,
        "object": "list",
        "created": int(time.time()),
        "usage": pooling_usage(work),
    }


def spelled(vector: bytes, encoding: str | None) -> str | list[float]:
    """A vector as the client wants it: numbers, or the base64 of little-endian fp32."""
    numbers = array("f", vector)
    if encoding != "base64":
        return numbers.tolist()
    if sys.byteorder == "big":
        numbers.byteswap()
    return base64.b64encode(numbers).decode("ascii")


def pooling_id(prefix: str, body: PoolingFields) -> str:
    """The id of the answer: the client's own `request_id`, or a new one."""
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"


def pooling_usage(work: PoolingWork) -> dict[str, Any]:
    """The usage object."""
    tokens = work.prompt_tokens
    return {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
        "prompt_tokens_details": None,
    }
