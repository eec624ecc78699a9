"""What every generating route does with a body before the engine: name it, and make its `Work`.

Invariants: the whole request is checked before anything is submitted.
Knows nothing of how answers look.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

from stoker_runtime.api.answering.prompts import off_loop
from stoker_runtime.api.answering.state import ServerState, Service
from stoker_runtime.api.generate.generation import BeamPlan, Prompt, Work
from stoker_runtime.api.generate.sampling import build_params, check_beams, spellings
from stoker_runtime.api.http.aside import aside
from stoker_runtime.api.http.caller import Caller
from stoker_runtime.api.http.fields import MAX_SEQUENCES, SamplingFields
from stoker_runtime.errors import RequestError
from stoker_runtime.request import Constraint


def public_id(prefix: str, body: SamplingFields) -> str:
    """The id of the answer: the client's own `request_id`, or a new one."""
    return f"{prefix}-{body.request_id or uuid.uuid4().hex}"


def check_stream_options(body: SamplingFields) -> None:
    """Raise RequestError for stream options without a stream."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only allowed when stream is true.", param="stream_options")


async def make_work(
    service: Service,
    body: SamplingFields,
    prompts: Sequence[Prompt],
    max_tokens: int,
    logprobs: int | None,
    label: str,
    constraint: Constraint | None = None,
) -> Work:
    """The work that `body` asks for, under a constraint that was checked.

    Raises RequestError naming the field, NotFoundError for an adapter that is not there any more.
    """
    bad = body.bad_words or ()
    words = await off_loop(2 * sum(map(len, bad)), lambda: spellings(bad, service.tokenizer)) if bad else ()
    params = await aside(
        body.size, lambda: build_params(body, max_tokens, logprobs, service.limits, service.defaults, words)
    )
    n = body.n or 1
    if constraint is not None:
        params = replace(params, constraint=constraint)
    plan = None
    if body.use_beam_search:
        check_beams(body, params)
        plan = BeamPlan(_penalty(body), frozenset(params.stop_token_ids) | _eos_ids(body, service))
    elif body.length_penalty not in (None, 1.0):
        raise RequestError("length_penalty is only allowed with use_beam_search.", param="length_penalty")
    tried = max(n, body.best_of or n)
    field = "n" if tried == n else "best_of"
    if len(prompts) * tried > service.limits.max_queued:
        raise RequestError(
            f"{len(prompts)} prompts with {tried} choices each never fit into this server's queue, which holds "
            f"{service.limits.max_queued} requests (--max-queued).",
            param=field if tried > service.limits.max_queued or len(prompts) == 1 else "prompt",
        )
    if len(prompts) * tried > MAX_SEQUENCES:
        raise RequestError(
            f"{len(prompts)} prompts with {tried} choices each are too many; at most {MAX_SEQUENCES} choices in all.",
            param=field,
        )
    if tried > n and params.logprobs is None:
        # The best are known by their log-probabilities.
        params = replace(params, logprobs=0)
    return Work(
        prompts=tuple(prompts),
        params=params,
        n=tried,
        keep=n,
        beams=plan,
        stops=body.stop,
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        cache_salt=body.cache_salt or "",
        session=body.session_id or "",
        adapter=service.adapter_of(body.model),
        label=label,
        deadline=body.timeout,
        interval=body.stream_interval or 1,
    )


def let_through(state: ServerState, caller: Caller, work: Work) -> Work:
    """`work` as its caller's: part of the caller's trace, and charged to the caller's rate limits.

    Raises CapacityError while the limits do not allow it, RequestError where they never will.
    """
    charge = None
    if state.limiter is not None:
        charge = state.limiter.admit(caller.owner, work.prompt_tokens, caller.answer_headers)
    return replace(work, trace=caller.trace, charge=charge) if caller.trace or charge else work


def _penalty(body: SamplingFields) -> float:
    return 1.0 if body.length_penalty is None else body.length_penalty


def _eos_ids(body: SamplingFields, service: Service) -> frozenset[int]:
    return frozenset() if body.ignore_eos else frozenset(service.limits.eos_token_ids)
