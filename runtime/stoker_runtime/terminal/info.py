"""`stoker info [MODEL]`: the device, the kernel that each op would use, and whether a model fits.

Invariants: the arithmetic is the engine's own (`executor.resolve`), so what is said here is what a start would do;
nothing is loaded or allocated. Works without a GPU.
Knows nothing of servers.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from stoker_runtime.errors import StokerError
from stoker_runtime.fetch.by_name import DESCRIPTIONS, located
from stoker_runtime.settings.parse import parse
from stoker_runtime.terminal.image_lines import image_lines
from stoker_runtime.terminal.mixture_lines import mixture_lines
from stoker_runtime.terminal.words import Line, gib
from stoker_runtime.version import VERSION

if TYPE_CHECKING:
    import torch

    from stoker_runtime.config import EngineConfig
    from stoker_runtime.executor.host_memory import HostPlan
    from stoker_runtime.executor.images.plan import ImagePlan
    from stoker_runtime.executor.resolve import DeviceMemory
    from stoker_runtime.models.config_source import ModelSource
    from stoker_runtime.models.pooling import PoolingSpec
    from stoker_runtime.models.spec import ModelSpec
    from stoker_runtime.parallel.place import Place
    from stoker_runtime.weights.block_plan import BlockPlan

USAGE = """usage: stoker info [MODEL] [FLAGS of stoker serve]

Show versions, the device, the kernel chosen for each op, and for MODEL how its weights and KV cache fit the device.
Of a model of the hub the files that describe it are fetched, no weights.
"""


def main(argv: list[str]) -> int:
    """Run `stoker info` and return its exit status: 0, or 2 when the model or a flag cannot work here."""
    if any(argument in ("-h", "--help") for argument in argv):
        sys.stdout.write(USAGE)
        return 0
    try:
        config = located(parse(argv, os.environ).engine, only=DESCRIPTIONS, say=tell) if argv else None
        # Imported once the flags are right: PyTorch takes seconds.
        from stoker_runtime.executor.device import gpu_bf16, open_device, pin_kernels

        device = open_device(config.device if config else "auto")
        show("Versions", versions())
        show("Device", device_lines(device))
        dtype = "float32" if device.type == "cpu" else "bfloat16" if gpu_bf16(device) else "float16"
        if config is not None:
            pin_kernels(config)
            lines, dtype = describe_model(config, device)
            show("Model", lines)
        show("Kernels", kernel_lines(dtype, device))
    except StokerError as error:
        sys.stderr.write(f"stoker info: {error.message}\n")
        return 2
    return 0


def tell(text: str) -> None:
    """Where a model comes from, beside what is asked for."""
    sys.stderr.write(f"{text}\n")


def show(title: str, lines: Sequence[Line]) -> None:
    """Print one section."""
    width = max(len(name) for name, _ in lines)
    body = "".join(f"  {name:<{width}}  {text}\n" for name, text in lines)
    sys.stdout.write(f"{title}\n{body}")


def versions() -> list[Line]:
    """Programs and libraries."""
    found = [("stoker", VERSION), ("python", platform.python_version())]
    for package in ("torch", "triton", "tokenizers"):
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            found.append((package, "not installed"))
    return [*found, ("GPU kernels", kernels_ahead())]


def kernels_ahead(here: int | None = None) -> str:
    """For which kinds of GPU kernels came compiled, and whether for SM `here`."""
    from stoker_kernels.launch.aot_index import ahead_command, compiled_ahead

    found = compiled_ahead()
    if here is not None:
        return (
            f"{found[here]} came compiled"
            if here in found
            else (
                f"none came compiled for sm_{here}: a first start compiles what its model needs; {ahead_command(here)}"
            )
        )
    if not found:
        return "none came compiled: a first start on a GPU compiles what its model needs"
    return "compiled for " + ", ".join(f"sm_{sm} ({count})" for sm, count in found.items())


def device_lines(device: torch.device) -> list[Line]:
    """What the device is and what of its memory is free."""
    if device.type == "cpu":
        cores = len(os.sched_getaffinity(0))
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return [("name", f"CPU, {platform.machine()}"), ("cores", str(cores)), ("memory", gib(pages * size))]
    import torch

    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return [
        ("name", properties.name),
        ("compute", f"sm_{properties.major}{properties.minor}, {properties.multi_processor_count} SMs"),
        ("memory", f"{gib(total)}, {gib(free)} free"),
        ("cuda", str(torch.version.cuda)),
        ("kernels", kernels_ahead(properties.major * 10 + properties.minor)),
    ]


def describe_model(config: EngineConfig, device: torch.device) -> tuple[list[Line], str]:
    """What the model is and how it fits, and the dtype that it would run in. Raises ConfigError."""
    from stoker_runtime.executor.device import device_memory, gpu_bf16, multiplies_bf16, refuse_head
    from stoker_runtime.executor.host_memory import free_host_memory
    from stoker_runtime.executor.images.plan import plan_images
    from stoker_runtime.executor.kernel_names import refuse_kind, refuse_settings, refuse_variant
    from stoker_runtime.executor.resolve import asked_quantization, plan_memory, refuse_at_load, resolve
    from stoker_runtime.executor.state import refuse_beside_states, state_bytes
    from stoker_runtime.models.architectures import build_spec
    from stoker_runtime.models.config_source import read_source
    from stoker_runtime.models.hosted_experts import device_bytes, with_hosted
    from stoker_runtime.models.pooling import read_pooling
    from stoker_runtime.models.quantized_head import with_head
    from stoker_runtime.parallel.place import places
    from stoker_runtime.parallel.split import split_spec
    from stoker_runtime.weights.block_plan import decoding_reason, plan_blocks
    from stoker_runtime.weights.packed.requantize import requantized

    source = read_source(config.model)
    pooling = read_pooling(source, config)
    if pooling is not None:
        return pooling_lines(source, pooling, config, device)
    refuse_at_load(config)
    refuse_settings(config)
    refuse_head(config, device)
    spec = with_head(build_spec(source), config.quantize_head)
    refuse_beside_states(config, spec)
    asked = asked_quantization(config)
    ranks = places(
        config.tensor_parallel_size,
        config.pipeline_parallel_size,
        whole_experts=config.enable_expert_parallel,
        nodes=config.nnodes,
    )
    parts = [spec] if config.ranks == 1 else [split_spec(spec, place) for place in ranks]
    parts = [requantized(config, part) for part in parts]
    plans = [
        plan_blocks(
            part, source, asked, device.type, refused=decoding_reason(config, part, device.type), whole=spec,
            embedding=config.quantize_embedding,
        )
        for part in parts
    ]
    parts = [plan.spec for plan in plans]
    memory = device_memory(device)
    config = resolve(config, parts[0], device.type, memory.total, cpu_bf16=multiplies_bf16(), gpu_bf16=gpu_bf16(device))
    parts = [with_hosted(config, part, free_host_memory) for part in parts]
    seen = [
        plan_images(config, source, part, embeds=place.is_first) for part, place in zip(parts, ranks, strict=True)
    ]
    if config.ranks == 1:
        (spec,) = parts
    refuse_variant(config, spec, device)
    refuse_kind(config, spec, device)
    several = config.data_parallel_size
    beside = [("engines", f"{several}, of each of which the following is said")] if several > 1 else []
    blocks = block_lines(plans[0], config.dtype)
    if config.ranks == 1:
        return [*beside, *model_lines(spec, config, memory, seeing=seen[0]), *blocks], config.dtype
    size = [
        device_bytes(part, config.dtype, config.quantization) + (each.weights if each else 0)
        for part, each in zip(parts, seen, strict=True)
    ]
    # Every rank has as many pages as the one with the least room, which says what fits.
    room = [
        plan_memory(config, part, memory, weights, state_bytes(config, part) + (each.state if each else 0)).pages
        for part, weights, each in zip(parts, size, seen, strict=True)
    ]
    fullest = min(range(len(ranks)), key=lambda rank: (room[rank], -size[rank]))
    layers = ", ".join(str(len(place.layers(spec.num_layers))) for place in reversed(ranks[:: ranks[0].tensors]))
    lines = [
        ("ranks", f"{config.ranks}: {config.tensor_parallel_size} share each of the stages of {layers} layers"),
        ("weights of all", gib(sum(size))),
        *node_lines(ranks, size),
        ("the fullest", f"rank {fullest}, of which the following is said"),
    ]
    of_rank = model_lines(parts[fullest], config, memory, spec, seeing=seen[fullest])
    return [*beside, *lines, *of_rank, *blocks], config.dtype


def block_lines(plan: BlockPlan, dtype: str) -> list[Line]:
    """What of the weights is in blocks, and what of a GGUF file's is not, with the reason."""
    held = [("blocks", plan.sizes)] if plan.spec.blocks else []
    return [*held, *(("decoded", each.said(dtype)) for each in plan.decoded)]


def node_lines(ranks: Sequence[Place], size: Sequence[int]) -> list[Line]:
    """What each of several nodes has of the `ranks`, whose weights take `size` bytes."""
    count = ranks[0].nodes
    if count == 1:
        return []
    lines: list[Line] = []
    for number in range(count):
        own = [place.rank for place in ranks if place.node == number]
        which = f"rank {own[0]}" if len(own) == 1 else f"ranks {own[0]} to {own[-1]}"
        lines.append((f"node {number}", f"{which}, weights {gib(sum(size[rank] for rank in own))}"))
    return lines


def pooling_lines(
    source: ModelSource, pooling: PoolingSpec, config: EngineConfig, device: torch.device
) -> tuple[list[Line], str]:
    """The same of a model that embeds or scores: it keeps no cache, so a step is all that it needs beside weights."""
    from stoker_runtime.executor.device import device_memory, gpu_bf16
    from stoker_runtime.executor.kernel_names import refuse_kind
    from stoker_runtime.executor.pooling_resolve import plan_pooling, resolve_pooling
    from stoker_runtime.models.pooling_spec import pooling_spec

    spec = pooling_spec(source)
    config = resolve_pooling(config, spec, pooling, device.type, gpu_bf16=gpu_bf16(device))
    refuse_kind(config, spec, device)
    plan = plan_pooling(config, spec, device_memory(device))
    normalized = ", normalized" if pooling.normalize else ""
    lines = [
        (
            "architecture",
            f"{spec.architecture}, {spec.num_layers} layers, hidden {spec.hidden}, vocabulary {spec.vocab}",
        ),
        ("task", f"{pooling.task}: {pooling.pooling}{normalized}, texts of up to {config.max_model_len:,} tokens"),
        ("dtype", config.dtype),
        ("weights", gib(plan.weights)),
        ("workspace", f"{gib(plan.workspace)} for steps of {config.max_num_batched_tokens:,} tokens"),
    ]
    return lines, config.dtype


def model_lines(
    spec: ModelSpec,
    config: EngineConfig,
    device: DeviceMemory,
    whole: ModelSpec | None = None,
    *,
    seeing: ImagePlan | None = None,
) -> list[Line]:
    """The model's sizes and how many tokens of KV cache fit beside it; `whole` is what `spec` is a rank's part of.

    Raises ConfigError when it does not fit.
    """
    from stoker_runtime.executor.drafts.plan import read_draft_model
    from stoker_runtime.executor.host_memory import free_host_memory, plan_host
    from stoker_runtime.executor.resolve import NOTHING_BESIDE, plan_memory
    from stoker_runtime.executor.state import state_bytes
    from stoker_runtime.executor.windows.layout import kv_layout
    from stoker_runtime.models.hosted_experts import device_bytes
    from stoker_runtime.models.mixed_words import mixture

    draft = read_draft_model(config, whole or spec)
    beside = draft.beside if draft else NOTHING_BESIDE
    weights = device_bytes(spec, config.dtype, config.quantization) + (draft.weights if draft else 0)
    host = plan_host(config, spec, free_host_memory, beside)
    state = state_bytes(config, spec) + host.device_bytes(config.device) + (draft.state if draft else 0)
    weights, state = weights + (seeing.weights if seeing else 0), state + (seeing.state if seeing else 0)
    plan = plan_memory(config, spec, device, weights, state, beside)
    layout = kv_layout(config, spec)
    # Of layers that give up pages there is no one number of tokens: it is that of the longest sequences.
    fitting = plan.pages / layout.pages(config.max_model_len, config.page_size)
    tokens = plan.pages * config.page_size if layout.sight is None else int(fitting * config.max_model_len)
    # On a GPU plan_memory has refused what does not fit; the CPU's memory is the machine's.
    needed = plan.weights + plan.overhead + plan.kv_bytes + host.nbytes
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    shortage = f"no: it needs {gib(needed)} of {gib(memory)}" if config.device == "cpu" and needed > memory else ""
    quantized = "" if config.quantization == "none" else f", {config.quantization} weights"
    return [
        (
            "architecture",
            f"{spec.architecture}, {spec.num_layers} layers, hidden {spec.hidden}, vocabulary {spec.vocab}",
        ),
        ("dtype", f"{config.dtype}{quantized}, {config.kv_cache_dtype} KV"),
        ("weights", gib(plan.weights)),
        *([("quantized", words)] if (words := mixture(spec)) and not spec.requantized else []),
        *head_lines(spec, config),
        *mixture_lines(spec, config),
        *state_lines(spec, config),
        *image_lines(seeing),
        ("workspace", gib(plan.overhead)),
        *([("draft model", f"{draft}; {gib(draft.weights)} of the weights")] if draft else []),
        ("KV of a token", f"{plan.page_bytes / config.page_size / 1024:.1f} KiB"),
        *window_lines(spec, config),
        ("KV cache", f"{gib(plan.kv_bytes)}: {plan.pages} pages of {config.page_size}, {tokens:,} tokens"),
        *([("adapters", describe_adapters(config, spec))] if config.enable_lora else []),
        ("host pool", describe_host(host, config.page_size)),
        ("fits", shortage or f"{fitting:.1f} sequences of {config.max_model_len:,} tokens"),
    ]


def window_lines(spec: ModelSpec, config: EngineConfig) -> list[Line]:
    """Of layers with a window what a sequence keeps in them, or why that is all of it."""
    from stoker_runtime.executor.windows.layout import kv_layout

    layout = kv_layout(config, spec)
    if layout.kept:
        return [("windows", f"layers with one keep the pages of whole sequences: {layout.kept}")]
    if (sight := layout.sight) is None:
        return []
    near, token = len(spec.attending) - layout.depth, spec.kv_bytes_per_token(config.kv_cache_dtype, layout.depth)
    most = sight.parts * sight.most(-(-config.max_model_len // config.page_size)) * config.page_size * token
    return [
        (
            "windows",
            f"{near} of {len(spec.attending)} layers look back {sight.window:,} tokens and give up the rest: "
            f"{most / 2**20:.1f} MiB a sequence; KV of a token is that of the other {layout.depth}",
        )
    ]


def head_lines(spec: ModelSpec, config: EngineConfig) -> list[Line]:
    """Of an output head that is quantized by itself what it takes, and what a tied one no longer shares."""
    from stoker_runtime.models.quantized_head import head_and_table

    head, table = head_and_table(spec, config.dtype, config.quantization)
    if not spec.head_kind or not head:
        return []
    kept = f"; the embedding that it was tied to keeps {gib(table)} for lookups" if table else ""
    return [("output head", f"{config.quantize_head}, {gib(head)} of the weights{kept}")]


def state_lines(spec: ModelSpec, config: EngineConfig) -> list[Line]:
    """Of layers with a state what one sequence's takes, whatever its length, and how many layers cache tokens."""
    from stoker_runtime.executor.state import sequence_state_bytes

    if spec.recurrent is None:
        return []
    size = sequence_state_bytes(config, spec)
    seqs, kept = config.max_num_seqs, config.num_state_snapshots
    return [
        (
            "states",
            f"{size / 2**20:.1f} MiB a sequence in {spec.recurrent.layers} layers, {gib(size * (seqs + kept))} of the "
            f"workspace for {seqs} and {kept} prefixes; {len(spec.attending)} of {spec.num_layers} layers attend",
        )
    ]


def describe_adapters(config: EngineConfig, spec: ModelSpec) -> str:
    """What adapters take of the device, which is part of the workspace, and of the host."""
    from stoker_runtime.adapters.memory import adapter_bytes, slot_bytes

    slot = slot_bytes(config, spec)
    return (
        f"{gib(adapter_bytes(config, spec))} of the workspace: {config.max_loras} slots of {gib(slot)}, rank "
        f"{config.max_lora_rank}; up to {gib(config.host_loras * slot)} of host memory for {config.host_loras}"
    )


def describe_host(host: HostPlan, page_size: int) -> str:
    """The pool of KV pages in host memory, and which sequences use it."""
    if not host.pages:
        return "none (--swap-space, --num-cpu-blocks): preempted sequences are computed again"
    size = f"{gib(host.nbytes)}: {host.pages} pages, {host.pages * page_size:,} tokens"
    size += f", states of {host.states.count} sequences" if host.states.count else ""
    if host.page_tokens > page_size:
        return f"{size}; not used: this model computes a page sooner than it comes back"
    return f"{size}; bringing a page back takes the time of {host.page_tokens:.1f} of its {page_size} tokens"


def kernel_lines(dtype: str, device: torch.device) -> list[Line]:
    """The implementation of each op for this device and dtype, or why there is none."""
    import torch

    return list(_choices(device, getattr(torch, dtype)))


def _choices(device: torch.device, dtype: torch.dtype) -> Iterator[Line]:
    from stoker_kernels.launch import dispatch

    for op in sorted(dispatch.ops()):
        try:
            yield op, dispatch.require(device, dtype, (op,))[op]
        except dispatch.KernelUnavailable as error:
            yield op, f"none: {'; '.join(f'{name}: {reason}' for name, reason in error.reasons.items())}"
