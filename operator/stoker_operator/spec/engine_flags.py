"""What a spec tells the engine by `runtime.args` and `runtime.env`, or by a field that stands for a flag, for sums that
the operator does before a pod runs.

Invariants: a flag wins over a variable and the last flag over those before it, as in the engine. What a spec does not
say itself (a variable from a Secret or ConfigMap, a file given by --config) is not seen; what the engine will refuse
counts as not said.
Knows nothing of what flags mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from stoker_operator.spec.engine_arguments import told
from stoker_operator.spec.service import InferenceService

_KV_EVENTS = "kv-events-config"
_NAMES = (
    "swap-space", "num-cpu-blocks", "num-gpu-blocks", "block-size", "max-num-batched-tokens", "gpu-memory-utilization",
    "gpu-memory-reserve-gb", "max-loras", "max-lora-rank", "max-cpu-loras", "speculative-config", _KV_EVENTS,
    "disable-hybrid-kv-cache-manager", "num-state-snapshots", "enable-prefix-caching", "quantize-head",
    "quantize-embedding", "batch-invariant", "dtype", "runner", "cpu-offload-experts",
    "language-model-only",
)  # fmt: skip
_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def given(service: InferenceService) -> Mapping[str, str]:
    """What is said of the flags above, by their names."""
    found = told(service.runtime.args, service.runtime.env, _NAMES)
    return found if service.endpoint.kv_events is None else found | {_KV_EVENTS: "endpoint.inferencePool.kvEvents"}


def number(text: str) -> float:
    """The number; 0 for what the engine will refuse."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


def count(text: str) -> int:
    """The whole number, `4k` for 4,000 and `4K` for 4,096; 0 for what the engine will refuse."""
    found = re.fullmatch(r"(\d+)([kmgKMG]?)", text.strip())
    return int(found[1]) * _MULTIPLES[found[2]] if found else 0
