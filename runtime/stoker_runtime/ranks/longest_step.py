"""How long the longest step of a model may take its GPUs, so that it is not taken for one that hangs.

Invariants: pure; leans to the long side. Knows nothing of who waits.
"""

from __future__ import annotations

from stoker_runtime.config import EngineConfig
from stoker_runtime.models.spec import ModelSpec

SLOWEST_FLOPS = 250e12
"""Operations a second of a large step, at least: 16-bit products on Hopper reach 600e12 and more, attention 400e12."""


def longest_step(spec: ModelSpec, config: EngineConfig) -> float:
    """Seconds of as many tokens as a step may have, at the end of the longest context; `spec` is a rank's part.

    Stages of a pipeline follow each other. `config` is resolved.
    """
    tokens = config.max_num_batched_tokens + config.max_num_seqs
    products = 2 * spec.step_parameters * tokens
    attention = 4 * tokens * config.max_model_len * spec.q_size * len(spec.attending)
    return config.pipeline_parallel_size * (products + attention) / SLOWEST_FLOPS
