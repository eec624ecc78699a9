"""What an engine's pod takes of its node's memory when it keeps KV pages there (`--swap-space`, `--num-cpu-blocks`), or
experts (`--cpu-offload-experts`).

Both are pinned as soon as the engine starts: a memory limit without room for them gets the pod killed, and a node
without room for them gets others killed. So a spec without `resources.memory` requests the sum, and one with it is
checked against the sum (fit.py).

Invariants: pure arithmetic over what the spec itself says (engine_flags.py).
Knows nothing of what GPUs hold and of what follows from a sum that is too large.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker_operator.manifests.adapters import adapter_room
from stoker_operator.manifests.weight_memory import host_weights, hosted_experts
from stoker_operator.spec.engine_flags import count, given, number
from stoker_operator.spec.quantity import GIB, quantity
from stoker_operator.spec.service import FetchedModel, InferenceService

# Server and engine process together, measured at 7B: 0.87 to 0.98, at most 1.01 while it starts.
ENGINE_GIB = 1.1
# Bytes of a key or value on a GPU, by spec.model.kvCacheDtype.
KV_BYTES = {"Auto": 2, "BF16": 2, "FP16": 2, "FP8": 1}
# What the engine chooses: tokens of a KV page, on a GPU and on a CPU; and on a CPU bytes of a key or value.
PAGE_TOKENS, _CPU_PAGE_TOKENS = 64, 16
_CPU_KV_BYTES = 4
# Of one value of an adapter, at most.
_ADAPTER_BYTES, _CPU_ADAPTER_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class HostMemory:
    """GiB of a pod. `engine`: its processes; `pool`: the KV pages; `weights`: where no GPU holds them, of which `doubt`
    may not be needed; `adapters`: the host's copies of them; `experts`: those that a GPU reads there; `limit`:
    resources.memory, 0 = unset. `unknown`: why `weights` are those of the files, whatever they become.
    """

    engine: float
    pool: float
    shm: float
    weights: float
    limit: float
    adapters: float = 0.0
    doubt: float = 0.0
    unknown: str = ""
    experts: float = 0.0

    @property
    def required(self) -> float:
        """All of it together."""
        return self.engine + self.shm + self.weights + self.pool + self.adapters + self.experts

    @property
    def least(self) -> float:
        """The same of a processor on which weights take the least."""
        return self.required - self.doubt

    @property
    def request(self) -> str:
        """`required` as a quantity: whole MiB, none less."""
        return f"{math.ceil(self.required * 1024)}Mi"

    @property
    def sums(self) -> str:
        """The addition, for a message."""
        weights = f" + weights {self.weights:.1f}" if self.weights else ""
        parts = f"engine {self.engine:.1f} + /dev/shm {self.shm:.1f}{weights}"
        parts += f" + KV pages in host memory {self.pool:.1f}" if self.pool else ""
        parts += f" + experts in host memory {self.experts:.1f}" if self.experts else ""
        parts += f" + adapters {self.adapters:.1f}" if self.adapters else ""
        return f"{parts}: {self.required:.1f} GiB"


def host_memory(service: InferenceService, model: FetchedModel) -> HostMemory | None:
    """What a pod needs; None when it keeps neither KV pages nor experts in host memory, or how large pages are is not
    known.
    """
    pool, experts = _pool_bytes(service, model), hosted_experts(service, model) * service.pod_ranks
    if not pool and not experts:
        return None
    limit, engines = service.resources.memory, service.parallelism.data
    here = 0.0 if service.resources.on_gpu else engines / service.resources.nodes / GIB
    weights = host_weights(service, model)
    # A pod has to ask for something: as much as the files have.
    most = model.bytes if weights.unknown else weights.most
    return HostMemory(
        engine=ENGINE_GIB * service.pod_ranks,
        pool=pool / GIB,
        shm=float(quantity(service.runtime.shm_size)) / GIB,
        weights=most * here,
        doubt=(most - weights.least) * here,
        limit=float(quantity(limit)) / GIB if limit else 0.0,
        adapters=_adapter_bytes(service, model) / GIB,
        unknown="" if service.resources.on_gpu else weights.unknown,
        experts=experts / GIB,
    )


def _adapter_bytes(service: InferenceService, model: FetchedModel) -> float:
    """Of the host's copies of adapters; without a GPU of the slots, too."""
    room = adapter_room(service, model)
    if room is None:
        return 0.0
    copies = room.copies if service.resources.on_gpu else room.copies + room.slots
    return float(copies * room.values * (_ADAPTER_BYTES if service.resources.on_gpu else _CPU_ADAPTER_BYTES))


def _pool_bytes(service: InferenceService, model: FetchedModel) -> float:
    said = given(service)
    space = number(said.get("swap-space", ""))
    if space:
        return space * GIB * service.pod_ranks
    on_cpu, dtype = not service.resources.on_gpu, service.model.kv_cache_dtype
    item = _CPU_KV_BYTES if on_cpu and dtype == "Auto" else KV_BYTES[dtype]
    tokens = count(said.get("block-size", "")) or (_CPU_PAGE_TOKENS if on_cpu else PAGE_TOKENS)
    page = 2 * model.layers * model.kv_heads * model.head_dim * item * tokens
    engines, pages = service.parallelism.data, count(said.get("num-cpu-blocks", ""))
    # Layers with a state have those of sequences there, too: as much as the pages are, one a page at most.
    states = min(pages, max(int(pages * page // model.state_bytes), 1)) if model.state_bytes else 0
    return float((pages * page + states * model.state_bytes) * engines) / service.resources.nodes
