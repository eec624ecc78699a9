"""POST /v1/completions/render and /v1/chat/completions/render: what the engine would be asked, in token ids.

A router that looks for the server with the longest cached prefix asks here for the ids of a prompt, and a client that
keeps its own tokens for what a conversation looks like to the model. The answer is vLLM's.
Invariants: the body is the completion's own and is read, checked and refused as there, so what is rendered is what
would run; nothing is submitted.
Knows nothing of how answers look.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from stoker_runtime.api.answering.intake import Ask, ReadBody
from stoker_runtime.api.generate.generation import Prompt, Work
from stoker_runtime.api.http.answers import JsonAnswer
from stoker_runtime.api.http.fields import SamplingFields
from stoker_runtime.api.http.routing import Route
from stoker_runtime.api.openai.chat import chat_work
from stoker_runtime.api.openai.completions import completion_work
from stoker_runtime.api.openai.protocol import ChatBody, CompletionBody
from stoker_runtime.request import ConstraintKind

router = APIRouter(route_class=Route)

SAME = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "seed", "logprobs", "prompt_logprobs", "ignore_eos"),
)
"""Parameters that vLLM calls what we call them."""
STRUCTURED = {ConstraintKind.JSON_SCHEMA: "json", ConstraintKind.REGEX: "regex", ConstraintKind.GRAMMAR: "grammar"}


@router.post("/v1/chat/completions/render")
async def render_chat(ask: Annotated[Ask[ChatBody], Depends(ReadBody(ChatBody))]) -> Response:
    """The token ids and sampling parameters that a chat completion would ask the engine for."""
    state, _, body = ask
    work, layout = await chat_work(state, state.require_service(), body)
    return JsonAnswer(_rendered(work, work.prompts[0], body, layout.model, work.params.max_tokens, work.label))


@router.post("/v1/completions/render")
async def render_completion(ask: Annotated[Ask[CompletionBody], Depends(ReadBody(CompletionBody))]) -> Response:
    """The token ids and sampling parameters that a completion would ask the engine for, one object a prompt."""
    state, _, body = ask
    model = state.check_model(body.model)
    work, asked = await completion_work(state.require_service(), body)
    return JsonAnswer(
        [
            _rendered(work, prompt, body, model, asked, f"{work.label}-{index}")
            for index, prompt in enumerate(work.prompts)
        ]
    )


def _rendered(
    work: Work, prompt: Prompt, body: SamplingFields, model: str, max_tokens: int, name: str
) -> dict[str, Any]:
    """One prompt as vLLM's GenerateRequest. There are no media and no transfers of KV, so their fields are null."""
    return {
        "request_id": name,
        "token_ids": list(prompt.ids),
        "features": None,
        "sampling_params": _parameters(work, body, max_tokens),
        "model": model,
        "stream": bool(body.stream),
        "stream_options": body.stream_options.model_dump() if body.stream_options is not None else None,
        "cache_salt": work.cache_salt or None,
        "priority": work.priority,
        "kv_transfer_params": None,
    }


def _parameters(work: Work, body: SamplingFields, max_tokens: int) -> dict[str, Any]:
    """Under vLLM's names; what the model's own defaults and the client's fields come to."""
    params, constraint = work.params, work.params.constraint
    return {
        **{name: getattr(params, name) for name in SAME},
        "n": work.n,
        "max_tokens": max_tokens,
        "stop": list(work.stops),
        "stop_token_ids": list(params.stop_token_ids),
        "include_stop_str_in_output": work.include_stop,
        "skip_special_tokens": work.skip_special,
        "logit_bias": dict(params.logit_bias) or None,
        "allowed_token_ids": list(params.allowed_token_ids) or None,
        "bad_words": list(body.bad_words or ()),
        "structured_outputs": None if constraint is None else {STRUCTURED[constraint.kind]: constraint.text},
    }
