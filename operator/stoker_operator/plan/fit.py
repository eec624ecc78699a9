"""Will this model at this context length fit this GPU, and its KV pages in host memory the pod; the numbers behind the
verdict.

Invariants: pure arithmetic; what is not known gives the verdict "Unknown", never a guess that blocks a pod.
Knows nothing of how the engine lays out memory beyond its sums: on the GPU weights + KV of one full context, or of
--num-gpu-blocks, + states of sequences and prefixes + workspace, within what the engine may take of it; on the host
what host_memory.py adds up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stoker_operator.manifests import adapter_room
from stoker_operator.manifests.host_memory import KV_BYTES, PAGE_TOKENS, HostMemory, host_memory
from stoker_operator.manifests.weight_memory import gpu_weights
from stoker_operator.observe.gpu import Gpu, gpu_memory_gib, is_shared, slice_gib
from stoker_operator.spec.engine_flags import count, given, number
from stoker_operator.spec.quantity import GIB
from stoker_operator.spec.service import FetchedModel, InferenceService

# What the engine takes beside weights and KV, the driver included. From LARGE_GIB on its steps are longer, unless they
# are told; what 7B then takes, a larger model exceeds.
WORKSPACE_GIB, LARGE_WORKSPACE_GIB = 2.0, 3.2
LARGE_GIB = 36
# Most sequences that run at a time on such a GPU and on a smaller one, unless they are told, and the part of the GPU
# that their states take at most then. Of prefixes the states of half as many are kept, or of so many.
LARGE_SEQUENCES, SEQUENCES, STATES_PART, LEAST_SNAPSHOTS = 1024, 256, 4, 4
# Of one value of an adapter on a GPU.
ADAPTER_BYTES = 2
# What the engine takes of a GPU when nothing else is said.
UTILIZATION = 0.9
# Where layers give up pages behind their window: keys that are read together, so that what is kept begins at a multiple
# of them, and what of pages may stay unused.
READ_BLOCK, MOST_WASTE = 64, 0.25
# Flags with which the engine keeps all pages, whatever they say or with any number but 0.
KEEPING = ("speculative-config", "kv-events-config", "disable-hybrid-kv-cache-manager")
KEEPING_NUMBERS = ("swap-space", "num-cpu-blocks")
_LARGER, _LARGER_SLICE = "a larger GPU in resources.gpuProducts", "a larger slice in resources.gpuResource"
_ADVICE = (
    "lower runtime.contextLength, take smaller types (model.quantization, "
    "model.kvCacheDtype), or set resources.fitCheck: Off"
)


@dataclass(frozen=True, slots=True)
class Fit:
    """GiB per GPU. `verdict`: Fits, TooLarge or Unknown; `message` says what to change.

    `usable`: the share of the GPU that the engine may take, of a pod's part where `gpu_pods` share it.
    `certain`: the verdict rests on the spec alone, so a pod that does not fit need not be tried. `host`: what a pod
    takes of its node's memory, if it keeps KV pages or experts there.
    """

    verdict: str
    message: str
    gpu_product: str = ""
    weights_gib: float = 0.0
    kv_gib: float = 0.0
    workspace_gib: float = 0.0
    adapters_gib: float = 0.0
    states_gib: float = 0.0
    required_gib: float = 0.0
    gpu_gib: float = 0.0
    usable: float = UTILIZATION
    gpu_pods: int = 1
    context: int = 0
    certain: bool = False
    host: HostMemory | None = None

    @property
    def blocks(self) -> bool:
        """Whether no pod can fit, whatever the cluster has."""
        return self.verdict == "TooLarge" and self.certain


def asks_gpu(service: InferenceService) -> bool:
    """Whether the check needs to be told of the cluster's GPUs: it is asked for, and the spec names none."""
    resources = service.resources
    return bool(resources.gpus) and not resources.gpu_products and resources.fit_check != "Off"


def remembered_gpu(service: InferenceService) -> Gpu | None:
    """The GPU that the verdict of an earlier reconcile of the same generation was about."""
    fit = service.status.get("fit") or {}
    if not fit or service.status.get("observedGeneration") != service.generation:
        return None
    return Gpu(str(fit.get("gpuProduct", "")), float(fit.get("gpuGiB", 0)), int(fit.get("gpuPods", 1)))


def assess(service: InferenceService, model: FetchedModel, largest: Gpu | None = None) -> Fit | None:
    """The verdict for the smallest GPU that the spec names, else for the `largest` of the cluster; and for the pod's
    memory where KV pages or experts take of it. None when the spec asks for no check, or there is nothing to check it
    against.
    """
    if service.resources.fit_check == "Off":
        return None
    gpu = _on_gpu(service, model, largest)
    host = host_memory(service, model)
    if host is None or (gpu is not None and gpu.blocks):
        return gpu
    certain = 0 < host.limit < host.least
    if certain or (0 < host.limit < host.required and not host.unknown):
        text = f"The pod's memory is too small: {host.sums} of {host.limit:.1f} GiB. {_host_advice(host)}."
        return replace(gpu or Fit("", ""), verdict="TooLarge", message=text, certain=certain, host=host)
    if host.unknown:
        return Fit("Unknown", f"{host.unknown}; the fit was not checked.")
    text = f"In host memory: {host.sums} {f'of {host.limit:.1f} GiB' if host.limit else 'requested'}."
    if gpu is None:
        return Fit("Fits", text, certain=True, host=host)
    return replace(gpu, message=f"{gpu.message} {text}", host=host)


def _host_advice(host: HostMemory) -> str:
    least = math.ceil(host.required)
    flags = ["--swap-space or --num-cpu-blocks"] if host.pool else []
    flags += ["--cpu-offload-experts"] if host.experts else []
    return (
        f"Set resources.memory to {least}Gi or leave it out, lower {' or '.join(flags)}, or set resources.fitCheck: Off"
    )


def _on_gpu(service: InferenceService, model: FetchedModel, largest: Gpu | None) -> Fit | None:
    resources = service.resources
    if not resources.on_gpu:
        return None
    named = bool(resources.gpu_products)
    if named:
        product = min(resources.gpu_products, key=gpu_memory_gib)
        if is_shared(product, resources.gpu_resource):
            text = f"Pods share GPU {product}, and its name does not say how many"
            return Fit("Unknown", f"{text}; the fit was not checked.", product)
        # With the strategy "mixed" nodes keep the whole GPU's label, and the resource names the slice.
        found = Gpu(product, slice_gib(resources.gpu_resource) or gpu_memory_gib(product))
    elif largest is None:
        return None
    else:
        found = largest
        if not found.gib:
            text = "No node that a pod may run on says which GPU it has (label nvidia.com/gpu.product)"
            return Fit("Unknown", f"{text}; the fit was not checked.")
    if not found.gib:
        text = f"The memory of GPU {found.product} is not known; the fit was not checked."
        return Fit("Unknown", text, found.product)
    return _sum(service, model, found, certain=named)


def _sum(service: InferenceService, model: FetchedModel, gpu: Gpu, *, certain: bool) -> Fit:
    resting = gpu_weights(service, model)
    if resting.unknown:
        return Fit("Unknown", f"{resting.unknown}; the fit was not checked.", gpu.product, gpu_gib=round(gpu.gib, 1))
    said = given(service)
    share, reserve = _share_of_part(said, gpu), number(said.get("gpu-memory-reserve-gb", ""))
    context = service.runtime.context_length or model.max_context
    page, pages = count(said.get("block-size", "")) or PAGE_TOKENS, count(said.get("num-gpu-blocks", ""))
    tokens = pages * page or context
    # On each GPU: its layers' keys and values, and of the heads its own, or one that others have too.
    tensor, pipeline = service.parallelism.tensor, service.parallelism.pipeline
    layers, heads = -(-model.layers // pipeline), -(-model.kv_heads // tensor)
    held = layers * tokens
    if gives_up(model, said, context, pipeline):
        held = pages * page * (layers - model.window_layers) or layer_tokens(model, context, page)
    kv = 2 * held * heads * model.head_dim * KV_BYTES[service.model.kv_cache_dtype] / GIB
    weights = resting.most / GIB
    told = service.runtime.max_concurrency or count(said.get("max-num-batched-tokens", ""))
    workspace = LARGE_WORKSPACE_GIB if gpu.whole_gib >= LARGE_GIB and not told else WORKSPACE_GIB
    room = adapter_room(service, model)
    adapters = room.slots * room.values * ADAPTER_BYTES / GIB if room is not None else 0.0
    # Of a layer's adapters a rank may hold one matrix of each pair whole: no less is counted than there is.
    adapters *= layers / model.layers if model.layers else 1.0
    # Heads with a state, and layers that have them, are shared as weights are.
    state_bytes = -(-model.state_bytes // service.parallelism.ranks)
    sequences = service.runtime.max_concurrency or _sequences(state_bytes, gpu)
    prefixes = _prefixes(said, sequences)
    states = (sequences + prefixes) * state_bytes / GIB
    taken = weights + kv + workspace + adapters + states
    required = max(taken / share, taken + reserve)
    usable = max(min(share, 1 - reserve / gpu.gib), 0.0)
    known = Fit(
        "Fits", "", gpu.product, round(weights, 1), round(kv, 1), workspace, round(adapters, 2), round(states, 2),
        round(required, 1), round(gpu.gib, 1),
        round(usable, 3), gpu.pods, context, certain,
    )  # fmt: skip
    slots = f" + room for {room.slots} adapters {adapters:.2f}" if room is not None and adapters else ""
    slots += f" + states of {sequences} sequences and {prefixes} prefixes {states:.2f}" if states else ""
    gpus, engines = service.parallelism.all_ranks, service.parallelism.data
    each = f"on each of {gpus} GPUs " if gpus > 1 else ""
    each += f"of {service.resources.nodes} nodes " if service.resources.spans_nodes else ""
    each += f"of {engines} engines " if engines > 1 else ""
    sums = (
        f"{each}weights {weights:.1f} + KV cache of {tokens} tokens {kv:.1f} + workspace {workspace:.1f}{slots}, "
        f"over {usable:.0%} of {_part(service, gpu)}: {required:.1f} GiB of {gpu.gib:.1f} GiB on {gpu.product}"
    )
    if required > gpu.gib:
        larger = _LARGER_SLICE if slice_gib(service.resources.gpu_resource) else _LARGER
        advice = f"{'Lower runtime.maxConcurrency, or: name' if states else 'Name'} {larger}, {_ADVICE}"
        return replace(known, verdict="TooLarge", message=f"The model does not fit: {sums}. {advice}.")
    if not kv:
        text = f"The weights alone fit, but the model's shape is not known: {sums}."
        return replace(known, verdict="Unknown", message=text)
    draft = _draft_model(said.get("speculative-config", ""))
    if draft:
        text = f"The model alone fits, but the size of {draft}, which --speculative-config names, is not known: {sums}."
        return replace(known, verdict="Unknown", message=text)
    return replace(known, message=f"The model fits: {sums}.{_too_much(said, gpu)}")


def _draft_model(config: str) -> str:
    """The model, or the head, that drafts beside the served one; "" where none is named."""
    try:
        keys = json.loads(config or "{}")
    except ValueError:  # the engine says what is wrong with it
        return ""
    return str(keys.get("model") or "") if isinstance(keys, dict) else ""


def _sequences(state_bytes: int, gpu: Gpu) -> int:
    """How many run at a time where nobody says it: a power of two whose states take no more than a part of the GPU."""
    room = max(int(gpu.whole_gib * GIB) // STATES_PART // max(state_bytes, 1), 1)
    return min(LARGE_SEQUENCES if gpu.whole_gib >= LARGE_GIB else SEQUENCES, 1 << room.bit_length() - 1)


def _prefixes(said: Mapping[str, str], sequences: int) -> int:
    """Of how many prefixes the states are kept; `said` are the engine's flags."""
    if said.get("enable-prefix-caching", "") == "false":
        return 0
    return count(said.get("num-state-snapshots", "")) or max(LEAST_SNAPSHOTS, sequences // 2)


def _part(service: InferenceService, gpu: Gpu) -> str:
    """What of a GPU the pod has, in words."""
    resource = service.resources.gpu_resource
    whole = f"the slice {resource}" if slice_gib(resource) else "the GPU"
    return f"the pod's part of {whole}, which {gpu.pods} pods share" if gpu.pods > 1 else whole


def _share_of_part(said: Mapping[str, str], gpu: Gpu) -> float:
    """Of the pod's part, what the engine takes: it is told a share of the whole, and to leave the other pods theirs."""
    return _share(said) if gpu.pods == 1 else min(_share(said) * gpu.pods, UTILIZATION)


def _too_much(said: Mapping[str, str], gpu: Gpu) -> str:
    """That the engine takes what other pods are to have, where it does; else ""."""
    if gpu.pods == 1 or _share(said) * gpu.pods <= 1.0:
        return ""
    least = math.floor(100 * UTILIZATION / gpu.pods) / 100
    return f" The engine takes more than that part: set --gpu-memory-utilization {least:.2f} in runtime.args."


def _share(said: Mapping[str, str]) -> float:
    """Of the GPU's memory, what --gpu-memory-utilization gives the engine."""
    asked = number(said.get("gpu-memory-utilization", ""))
    return asked if 0.01 <= asked <= 1.0 else UTILIZATION


def gives_up(model: FetchedModel, said: Mapping[str, str], context: int, stages: int) -> bool:
    """Whether layers with a window keep no more than it; `said` are the engine's flags, `stages` of a pipeline."""
    near, whole = model.window_layers, model.layers - model.window_layers
    if not 0 < near < model.layers or stages > 1 or model.window >= context:
        return False
    kept = any(said.get(name, "") not in ("", "false") for name in KEEPING)
    kept |= any(number(said.get(name, "")) or count(said.get(name, "")) for name in KEEPING_NUMBERS)
    return not kept and whole * (1 + -(-near // whole)) - model.layers <= MOST_WASTE * model.layers


def layer_tokens(model: FetchedModel, tokens: int, page: int) -> int:
    """Tokens times layers of the pages, of `page` tokens each, that a sequence takes where it gives up some.

    A page has as many layers as see everything; those with a window fill as many more pages as it takes.
    """
    whole = model.layers - model.window_layers
    parts, places = -(-model.window_layers // whole), -(-tokens // page)
    span = -(-(model.window + max(READ_BLOCK, page) - 1) // page)
    return (places + parts * min(places, span)) * page * whole
