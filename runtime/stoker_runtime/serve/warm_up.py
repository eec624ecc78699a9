"""The warm-up: one short completion, or text to pool, before anybody else is served.

Knows nothing of ports and of what a server does besides.
"""

from __future__ import annotations

import time
from dataclasses import replace

from stoker_runtime.api.answering.state import Service
from stoker_runtime.api.generate.engine_client import EngineClient
from stoker_runtime.errors import AsleepError, EngineError
from stoker_runtime.request import FinishReason, PoolingParams, Request, SamplingParams

WARM_UP_TOKENS = 2


async def warm_up(service: Service, engine: EngineClient) -> None:
    """Let one short completion, or text to pool, through an engine. Raises EngineError when it does not come out.

    An engine that sleeps has had its own.
    """
    prompt = tuple(at % service.limits.vocab_size for at in range(4))
    request, good = Request("warm-up", prompt, SamplingParams(), time.monotonic()), FinishReason.LENGTH
    if service.pooling is None:
        tokens = min(WARM_UP_TOKENS, service.limits.max_model_len - len(prompt))
        params = SamplingParams(max_tokens=max(tokens, 1), temperature=0.0, ignore_eos=True)
        request = replace(request, params=params)
    else:
        prompt = prompt[: service.limits.max_model_len]
        params, good = SamplingParams(max_tokens=0), FinishReason.STOP
        request = replace(request, prompt_token_ids=prompt, params=params, pooling=PoolingParams())
    try:
        stream = engine.submit([request])
        while True:
            for output in await stream.next():
                if output.finish is good:
                    return
                if output.finish is not None:
                    said = output.error or "no reason"
                    raise EngineError(f"The warm-up completion ended with {output.finish}: {said}.")
    except AsleepError:
        # It answered others before it slept.
        return
