"""What an engine's pod takes of its node's memory when it keeps KV pages there (`--swap-space`, `--num-cpu-blocks`).

The pages are pinned as soon as the engine starts: a memory limit without room for them gets the pod killed, and a node
without room for them gets others killed. So a spec without `resources.memory` requests the sum, and one with it is
checked against the sum (fit.py).

Invariants: pure arithmetic; a flag wins over a variable and the last flag over those before it, as in the engine. What
a spec does not say itself (a variable from a Secret or ConfigMap, a file given by --config) is not counted.
Knows nothing of what GPUs hold and of what follows from a sum that is too large.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from stoker_operator.quantity import GIB, quantity
from stoker_operator.spec import FetchedModel, InferenceService

# Server and engine process together, measured at 7B: 0.87 to 0.98, at most 1.01 while it starts.
ENGINE_GIB = 1.1
_FLAGS = {
    "--swap-space": "swap-space",
    "--kv-offloading-size": "swap-space",
    "--num-cpu-blocks": "num-cpu-blocks",
    "--block-size": "block-size",
}
_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
# Bytes of a key or value on a GPU, by spec.model.kvCacheDtype.
KV_BYTES = {"Auto": 2, "BF16": 2, "FP16": 2, "FP8": 1}
# What the engine chooses: tokens of a KV page, on a GPU and on a CPU; and on a CPU bytes of a key or value.
_PAGE_TOKENS, _CPU_PAGE_TOKENS = 64, 16
_CPU_KV_BYTES = 4


@dataclass(frozen=True, slots=True)
class HostMemory:
    """GiB of a pod. `pool`: the KV pages; `weights`: where no GPU holds them; `limit`: resources.memory, 0 = unset."""

    pool: float
    shm: float
    weights: float
    limit: float

    @property
    def required(self) -> float:
        """All of it together."""
        return ENGINE_GIB + self.shm + self.weights + self.pool

    @property
    def request(self) -> str:
        """`required` as a quantity: whole MiB, none less."""
        return f"{math.ceil(self.required * 1024)}Mi"

    @property
    def sums(self) -> str:
        """The addition, for a message."""
        weights = f" + weights {self.weights:.1f}" if self.weights else ""
        parts = f"engine {ENGINE_GIB:.1f} + /dev/shm {self.shm:.1f}{weights} + KV pages in host memory {self.pool:.1f}"
        return f"{parts}: {self.required:.1f} GiB"


def host_memory(service: InferenceService, model: FetchedModel) -> HostMemory | None:
    """What a pod needs; None when it keeps no KV pages in host memory, or how large they are is not known."""
    pool = _pool_bytes(service, model)
    if not pool:
        return None
    limit = service.resources.memory
    return HostMemory(
        pool=pool / GIB,
        shm=float(quantity(service.runtime.shm_size)) / GIB,
        weights=0.0 if service.resources.gpus else model.bytes / GIB,
        limit=float(quantity(limit)) / GIB if limit else 0.0,
    )


def _pool_bytes(service: InferenceService, model: FetchedModel) -> float:
    given = _given(service)
    space = _number(given.get("swap-space", "0"))
    if space:
        return space * GIB
    on_cpu, dtype = not service.resources.gpus, service.model.kv_cache_dtype
    item = _CPU_KV_BYTES if on_cpu and dtype == "Auto" else KV_BYTES[dtype]
    tokens = _count(given.get("block-size", "0")) or (_CPU_PAGE_TOKENS if on_cpu else _PAGE_TOKENS)
    page = 2 * model.layers * model.kv_heads * model.head_dim * item * tokens
    return float(_count(given.get("num-cpu-blocks", "0")) * page)


def _given(service: InferenceService) -> Mapping[str, str]:
    """What the spec says of the pool's size, by flag name."""
    names = {f"STOKER_{name.upper().replace('-', '_')}": name for name in _FLAGS.values()}
    found = {
        names[item["name"]]: str(item["value"])
        for item in service.runtime.env
        if item["name"] in names and "value" in item
    }
    for argument, following in pairwise((*service.runtime.args, "")):
        spelled, equals, value = argument.partition("=")
        name = _FLAGS.get(spelled.replace("_", "-")) if spelled.startswith("--") else None
        if name is not None:
            found[name] = value if equals else following
    return found


def _number(text: str) -> float:
    """The number; 0 for what the engine will refuse."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


def _count(text: str) -> int:
    """The whole number, `4k` for 4,000 and `4K` for 4,096; 0 for what the engine will refuse."""
    found = re.fullmatch(r"(\d+)([kmgKMG]?)", text.strip())
    return int(found[1]) * _MULTIPLES[found[2]] if found else 0
