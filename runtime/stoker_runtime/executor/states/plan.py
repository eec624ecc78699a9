"""How many states a device keeps beside those of the sequences that run: of prefixes, to go on from.

Invariants: arithmetic on a configuration and a spec; what is counted here is what is allocated.
Knows nothing of devices, and of which prefixes these are.
"""

from __future__ import annotations

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
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
