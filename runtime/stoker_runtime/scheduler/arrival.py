"""A request that was let in becomes a sequence: how long it may get, what ends it, what its pages are told apart by.

Invariants: nothing is decided here that depends on other sequences.
Knows nothing of queues.
"""

from __future__ import annotations

from stoker_runtime.kvcache.prefix_index import root_key
from stoker_runtime.request import Request
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.sequence import Sequence


def new_sequence(request: Request, config: SchedulerConfig, seed: int) -> Sequence:
    """The sequence of `request`, which passed `refuse_impossible`; its tokens are drawn by `seed`."""
    params = request.params
    ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *config.eos_token_ids)
    sequence = Sequence(
        request,
        limit=min(len(request.prompt_token_ids) + params.max_tokens, config.max_tokens),
        stops=frozenset(ends),
        seed=seed,
        root=root_key(request.cache_salt, request.adapter),
    )
    sequence.recorded = config.verify_tokens > 0
    return sequence
