"""POST /score and /rerank: how well texts go together, by a cross-encoder or by the angle between embeddings.

Invariants: a score is a cross-encoder's own for the pair, or the cosine of the two texts' vectors; an equal text is
embedded once a request.
Knows nothing of how either is computed in the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from stoker_runtime.api.answering.intake import Ask, ReadBody
from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.http.answers import json_answer
from stoker_runtime.api.http.aside import aside
from stoker_runtime.api.http.caller import Caller
from stoker_runtime.api.http.routing import Route
from stoker_runtime.api.pooling.bodies import RerankBody, ScoreBody
from stoker_runtime.api.pooling.embeddings import pooling_id, pooling_usage
from stoker_runtime.api.pooling.job import PoolingWork, TextEncoder, make_pooling_work, open_job
from stoker_runtime.errors import RequestError
from stoker_runtime.models.pooling import Task
from stoker_runtime.request import PoolingParams

Pair = tuple[str, str]
# The names that clients use for the two sides, best known first.
SIDES = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))


router = APIRouter(route_class=Route)


@router.post("/score")
@router.post("/v1/score")
async def create_score(ask: Annotated[Ask[ScoreBody], Depends(ReadBody(ScoreBody))]) -> Response:
    """POST /score, /v1/score: a score for each pair of texts. Raises RequestError, CapacityError or EngineError."""
    state, caller, body = ask
    model = state.check_model(body.model)
    state.require_pooling()
    answer_id = pooling_id("score", body)
    scores, work = await _score(state, caller, body, read_pairs(body), answer_id)

    def whole() -> dict[str, Any]:
        return {
            "id": answer_id,
            "object": "list",
            "created": int(time.time()),
            "model": model,
            "data": [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)],
            "usage": pooling_usage(work),
        }

    return await json_answer(body.size, whole)


@router.post("/rerank")
@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def create_rerank(ask: Annotated[Ask[RerankBody], Depends(ReadBody(RerankBody))]) -> Response:
    """POST /rerank and its versions: documents by their score for a query, best first; raises as create_score."""
    state, caller, body = ask
    model = state.check_model(body.model)
    state.require_pooling()
    documents = [document if isinstance(document, str) else document.text for document in body.documents]
    answer_id = pooling_id("rerank", body)
    pairs = [(body.query, document) for document in documents]
    scores, work = await _score(state, caller, body, pairs, answer_id)
    usage = pooling_usage(work)

    def whole() -> dict[str, Any]:
        # The sort is stable: of equals the first document stays first.
        ranked = sorted(enumerate(scores), key=lambda entry: -entry[1])[: body.top_n or None]
        return {
            "id": answer_id,
            "model": model,
            "usage": {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]},
            "results": [_result(at, score, documents[at], body) for at, score in ranked],
        }

    return await json_answer(body.size, whole)


def _result(index: int, score: float, document: str, body: RerankBody) -> dict[str, Any]:
    shown = {} if body.return_documents is False else {"document": {"text": document}}
    return {"index": index, **shown, "relevance_score": score}


def read_pairs(body: ScoreBody) -> list[Pair]:
    """The pairs that `body` names: one first text goes with every second one. Raises RequestError."""
    given = body.model_fields_set & {name for side in SIDES for name in side}
    for one, two in SIDES:
        if given == {one, two}:
            break
    else:
        raise RequestError("Give text_1 and text_2 (or queries and documents).", param="text_1")
    first, second = _as_list(getattr(body, one), one), _as_list(getattr(body, two), two)
    if len(first) == 1:
        first *= len(second)
    if len(first) != len(second):
        raise RequestError(f"{one} has {len(first)} texts and {two} {len(second)}; {one} must have 1 or as many.",
                           param=one)  # fmt: skip
    return list(zip(first, second, strict=True))


def _as_list(texts: str | list[str] | None, name: str) -> list[str]:
    found = [texts] if isinstance(texts, str) else list(texts or ())
    if not found:
        raise RequestError(f"{name} must be a text or a list of texts, not empty.", param=name)
    return found


async def _score(
    state: ServerState, caller: Caller, body: ScoreBody | RerankBody, pairs: Sequence[Pair], label: str
) -> tuple[list[float], PoolingWork]:
    """A score for each pair, and the work it took."""
    service, pooling = state.require_pooling()
    encoder = TextEncoder(service, body)
    if pooling.task is Task.SCORE:
        side = "text_2" if isinstance(body, ScoreBody) else "documents"
        encoded = await encoder.encode_pairs(pairs, side, body.instruction)
        work = make_pooling_work(service, body, encoded, PoolingParams(), label)
        with open_job(state, service, work, caller) as job:
            return [_number(vector) for vector in await job.vectors(caller.receive)], work
    if body.instruction is not None:
        raise RequestError("This model compares embeddings, without an instruction; leave it out.", param="instruction")
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    encoded = await encoder.encode(texts, "text_1" if isinstance(body, ScoreBody) else "documents")
    work = make_pooling_work(service, body, encoded, PoolingParams(normalize=True), label)
    with open_job(state, service, work, caller) as job:
        vectors = dict(zip(texts, await job.vectors(caller.receive), strict=True))
    size = sum(map(len, vectors.values()))
    return await aside(max(size, body.size), lambda: _cosines(vectors, pairs)), work


def _number(vector: bytes) -> float:
    return float(memoryview(vector).cast("f")[0])


def _cosines(vectors: dict[str, bytes], pairs: Sequence[Pair]) -> list[float]:
    """The inner products of unit vectors."""
    # Imported here: numpy is not otherwise part of an API process, and generating servers never come here.
    import numpy as np

    unit = {text: np.frombuffer(vector, dtype=np.float32).astype(np.float64) for text, vector in vectors.items()}
    return [float(unit[one] @ unit[two]) for one, two in pairs]
