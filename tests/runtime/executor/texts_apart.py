"""Where texts part from those of plain decoding, the model itself says whether that is a matter of rounding."""

from __future__ import annotations

from collections.abc import Sequence

from stoker_runtime.bench.engine_mode import default_tolerance
from stoker_runtime.bench.verify import verify_greedy
from stoker_runtime.executor.executor import Executor
from stoker_runtime.request import Request


def check_apart(
    executor: Executor, asked: Sequence[Request], plain: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]
) -> int:
    """How many greedy texts differ. Raises AssertionError where one has a token that is wrong, not about as likely."""
    rows = zip(asked, plain, drafted, strict=True)
    apart = [(each.prompt_token_ids, got) for each, text, got in rows if text != got and not each.params.temperature]
    if apart:
        decoder, tolerance = executor.decoder, default_tolerance(executor.config)
        verdict = verify_greedy(decoder.spec, decoder.weights, apart, tolerance, executor.max_model_len)
        assert verdict.passed, f"{verdict.wrong} tokens are wrong, the worst by {verdict.worst:.2f} logits"
    return len(apart)
