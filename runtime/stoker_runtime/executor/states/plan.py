"""How much a device keeps beside the states of the sequences that run: those of prefixes, to go on from, and what lets
a step take drafts back.

Invariants: arithmetic on a configuration and a spec; what is counted here is what is allocated.
Knows nothing of devices, and of which prefixes these are.
"""

from __future__ import annotations

from math import prod

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.spec import ModelSpec

LEAST_SNAPSHOTS = 4


def snapshots_of(config: EngineConfig, spec: ModelSpec, sequences: int) -> int:
    """States that are kept of prefixes beside those of so many `sequences`: as asked, else half as many as these.

    Raises ConfigError where they are asked for and nothing would keep any.
    """
    if config.num_state_snapshots and (spec.recurrent is None or not config.enable_prefix_caching):
        why = "whose layers keep no state" if spec.recurrent is None else "whose prefix cache is off"
        raise ConfigError(
            f"num_state_snapshots is {config.num_state_snapshots} for {spec.architecture}, {why}; leave "
            "--num-state-snapshots out.",
            param="num_state_snapshots",
        )
    if spec.recurrent is None or not config.enable_prefix_caching:
        return 0
    return config.num_state_snapshots or max(LEAST_SNAPSHOTS, sequences // 2)


def tried_shapes(config: EngineConfig, spec: ModelSpec) -> tuple[tuple[int, int, int], tuple[int, int, int, int]]:
    """What is kept of the tokens of a step that verifies drafts, `[layers, tokens, C]` and `[layers, tokens, 2, H]`."""
    state, drafting = spec.recurrent, config.drafting
    assert state is not None, "nothing keeps a state"
    assert drafting is not None, "nothing is drafted"
    wide = drafting.verify_tokens(config.max_num_seqs, config.max_num_batched_tokens)
    return (state.layers, wide, state.channels), (state.layers, wide, 2, state.heads)


def drafted_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Bytes that drafts take beside states, of a resolved `config`; 0 where nothing is drafted or keeps a state."""
    if spec.recurrent is None or config.drafting is None:
        return 0
    channels, gates = tried_shapes(config, spec)
    return 2 * prod(channels) * ITEM_BYTES[config.dtype] + prod(gates) * ITEM_BYTES["float32"]
