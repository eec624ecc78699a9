"""From an EngineConfig to a running executor, in phases that the start-up log shows.

Invariants: every size is known before the first large allocation; a kernel that is missing for this device and dtype
stops the start here, by name; nothing is compiled or allocated later that could fail under load.
Knows nothing of requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from stoker_kernels.launch.dispatch import KernelUnavailable
from stoker_runtime.adapters.memory import AdapterMemory
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, KernelUnavailableError
from stoker_runtime.executor.device import (
    device_memory,
    gpu_bf16,
    multiplies_bf16,
    open_rank_device,
    phase,
    pin_kernels,
    refuse_head,
    use_threads,
)
from stoker_runtime.executor.drafts.open import open_drafter
from stoker_runtime.executor.drafts.plan import DraftModel, read_draft_model
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.host_memory import HostPlan, free_host_memory, plan_host
from stoker_runtime.executor.images.open import open_images, read_tower
from stoker_runtime.executor.images.plan import log_images, plan_images
from stoker_runtime.executor.kernel_names import refuse_kind, refuse_settings, refuse_variant
from stoker_runtime.executor.kernel_supply import gemm_weights, supply_cuda, supply_tiles, supply_triton
from stoker_runtime.executor.pooling import PoolingExecutor
from stoker_runtime.executor.pooling_build import build_pooling_executor
from stoker_runtime.executor.resolve import (
    GIB,
    NOTHING_BESIDE,
    asked_quantization,
    plan_memory,
    refuse_at_load,
    resolve,
)
from stoker_runtime.executor.state import refuse_beside_states, sequence_state_bytes, state_bytes
from stoker_runtime.executor.windows.layout import kv_layout, log_layout
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import ModelSource, read_source
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.hosted_experts import device_bytes, hosted_bytes, with_hosted
from stoker_runtime.models.pooling import read_pooling
from stoker_runtime.models.quantized_head import head_and_table, with_head
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.rank import Rank
from stoker_runtime.process.clock import process_age
from stoker_runtime.sampling.sampler import Sampler
from stoker_runtime.weights.block_plan import decoding_reason, plan_blocks
from stoker_runtime.weights.cpu_order import packed_for_cpu
from stoker_runtime.weights.layout import TORCH_DTYPES
from stoker_runtime.weights.load import load_weights
from stoker_runtime.weights.packed.requantize import requantized
from stoker_runtime.weights.upload_ahead import UploadAhead

log = logging.getLogger(__name__)

SamplerFactory = Callable[[int, int, torch.device], Sampler]
# Decode sizes captured before ready; the rest follow while the engine idles or at the first step of their size.
FIRST_GRAPHS = (1, 2, 4, 8)
# What a rank decides by its machine, and all have to decide alike.
DECIDED = (
    "dtype", "kv_cache_dtype", "quantization", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "num_state_snapshots",
)  # fmt: skip


def build_model(config: EngineConfig, ahead: UploadAhead | None = None) -> Executor | PoolingExecutor:
    """Load the model and allocate everything, for generating or for pooling as the model and `config` say.

    `ahead` is what the head start has brought, or is bringing, to the first GPU.

    Raises:
        ConfigError: a size that does not fit, or a device that is not there; names the flag.
        ModelError: a checkpoint that cannot be used.
        KernelUnavailableError: an op without a kernel for this device and dtype.
    """
    refuse_at_load(config.validate())
    refuse_settings(config)
    seconds = {"import": process_age()}
    log.info("start: %-8s %6.2f s", "import", seconds["import"])
    warn_without_bytecode()
    with phase("model", seconds):
        source = read_source(config.model)
        pooling = read_pooling(source, config)
    if pooling is not None:
        for name in ("enable_sleep_mode", "batch_invariant", "cpu_offload_experts"):
            if getattr(config, name):
                raise ConfigError(f"{name} is for models that generate; {config.model} embeds or scores.", param=name)
        return build_pooling_executor(config, source, pooling, seconds, ahead)
    return _build(config, source, seconds, ahead)


def build_rank(config: EngineConfig, rank: Rank, make: Callable[..., Executor]) -> Executor:
    """The executor of one rank among several, by `make`, which takes what `Executor` does; errors as `build_model`.

    Blocks until all ranks have built theirs.
    """
    refuse_at_load(config.validate())
    refuse_settings(config)
    seconds = {"import": process_age()}
    with phase("model", seconds):
        source = read_source(config.model)
        if read_pooling(source, config) is not None:
            raise ConfigError(
                f"{config.model} embeds or scores, which runs on one rank; leave --tensor-parallel-size and "
                "--pipeline-parallel-size out.",
                param="tensor_parallel_size",
            )
    executor = _build(config, source, seconds, None, rank, make)
    rank.collectives.least(0)
    return executor


def _build(
    config: EngineConfig,
    source: ModelSource,
    seconds: dict[str, float],
    ahead: UploadAhead | None,
    rank: Rank | None = None,
    make: Callable[..., Executor] = Executor,
) -> Executor:
    whole = with_head(build_spec(source), config.quantize_head)
    refuse_beside_states(config, whole)
    cut = rank.cut(whole) if rank else None
    spec = cut.spec if cut else whole
    with phase("device", seconds):
        device = open_rank_device(config, rank.place.rank if rank else 0)
        if device.type == "cpu":
            ahead = None
        memory = device_memory(device, ahead.reserved if ahead else 0)
        spec = requantized(config, spec)
        refused = decoding_reason(config, spec, device.type)
        blocks = plan_blocks(
            spec, source, asked_quantization(config), device.type, refused=refused, whole=whole,
            embedding=config.quantize_embedding,
        )  # fmt: skip
        spec = blocks.spec
        config = resolve(config, spec, device.type, memory.total, cpu_bf16=multiplies_bf16(), gpu_bf16=gpu_bf16(device))
        blocks.announce(config.dtype)
        spec = with_hosted(config, spec, free_host_memory)
        hosted = hosted_bytes(spec, config.dtype, config.quantization)
        embeds = rank is None or rank.place.is_first
        seeing = plan_images(config, source, spec, embeds=embeds)
        if spec.moe is not None and hosted:
            layers = len(spec.moe.hosted)
            log.info("experts in host memory: %.2f GiB, of %d of %d layers", hosted / GIB, layers, spec.num_layers)
    with phase("supply", seconds):
        supply_cuda(device)
    pin_kernels(config)
    refuse_head(config, device)
    refuse_variant(config, spec, device)
    refuse_kind(config, spec, device)
    # Every rank has all of what drafts, and the leader's drafts count.
    draft = read_draft_model(config, whole if rank else spec)
    if draft is not None:
        refuse_variant(draft.config, draft.spec, device)
        refuse_kind(draft.config, draft.spec, device)
    beside = draft.beside if draft else NOTHING_BESIDE
    weights_bytes = device_bytes(spec, config.dtype, config.quantization)
    weights_bytes += (draft.weights if draft else 0) + (seeing.weights if seeing else 0)
    if not config.batch_invariant:
        supply_tiles(device, gemm_weights(spec, config.dtype, config.quantization), tune=config.tune)
    if device.type == "cpu":
        use_threads(config, weights_bytes, config.local_ranks)
    host = plan_host(config, spec, lambda: free_host_memory() - hosted, beside)
    state = state_bytes(config, spec) + host.device_bytes(config.device) + (draft.state if draft else 0)
    state += seeing.state if seeing else 0
    plan = plan_memory(config, spec, memory, weights_bytes, state, beside)
    dtype = TORCH_DTYPES[config.dtype]
    if rank is not None:
        with phase("ranks", seconds):
            decided = {name: str(getattr(config, name)) for name in DECIDED}
            rank.meet(whole, device, dtype, config, decided)
            # What the exchanges keep for themselves on a GPU is in use from now on.
            plan = plan_memory(config, spec, device_memory(device), weights_bytes, state, beside)
            # One scheduler counts for all.
            plan = replace(plan, pages=rank.collectives.least(plan.pages))
            least = rank.collectives.least(host.pages), rank.collectives.least(host.states.count)
            host = replace(host, pages=least[0], states=replace(host.states, count=least[1]))

    def load(ahead: UploadAhead | None = None) -> list[DecoderWeights]:
        """The weights of the model, and behind them those of the draft model, if there is one."""
        found = [load_weights(source, spec, device, dtype, config.quantization, seed=config.seed, ahead=ahead, cut=cut)]
        if draft is not None:
            own = draft.config
            found.append(load_weights(draft.source, draft.spec, device, dtype, own.quantization, seed=own.seed))
        return [packed_for_cpu(each) if device.type == "cpu" else each for each in found]

    with phase("weights", seconds), torch.inference_mode():
        weights, *drafting = load(ahead)
        images = None if seeing is None else open_images(seeing, config, source, device, dtype)
    with phase("cache", seconds), torch.inference_mode():
        decoder: Decoder
        adapters: AdapterMemory | None = None
        if rank is None or cut is None:
            decoder = Decoder(spec, weights, device, dtype, max_model_len=config.max_model_len)
            sampler: SamplerFactory = Sampler
            adapters = AdapterMemory(config, spec, dtype, device) if config.enable_lora else None
        else:
            decoder = rank.decoder(spec, weights, device, dtype, config.max_model_len)
            sampler = rank.sampler
            adapters = rank.adapters(config, spec, dtype, device, cut) if config.enable_lora else None
        drafter = open_drafter(draft, drafting[0], decoder, plan.pages) if draft else None
        executor = make(config, decoder, plan, device, host, sampler, adapters=adapters, drafter=drafter, images=images)
    with phase("kernels", seconds):
        try:
            if device.type == "cuda":
                number = config.data_parallel_rank * config.ranks + (rank.place.rank if rank else 0)
                supply_triton(executor.rehearse, index=number % config.local_ranks, among=config.local_ranks)
            executor.load_kernels(FIRST_GRAPHS)
        except KernelUnavailable as error:
            raise KernelUnavailableError(str(error)) from error
    with phase("graphs", seconds):
        executor.capture(FIRST_GRAPHS)
    if config.enable_sleep_mode:
        executor.sleeper = executor.sleep_kind(executor, load)
        executor.sleeper.reload_tower = partial(read_tower, seeing, config, source, device, dtype) if seeing else None
    log.info("device: %s", executor.describe()["device"])
    for op, implementation in executor.kernels().items():
        log.info("kernel: %-22s %s", op, implementation)
    log.info(
        "memory: weights %.2f GiB, KV %.2f GiB (%d pages of %d tokens), workspace %.2f GiB",
        plan.weights / GIB, plan.kv_bytes / GIB, plan.pages, config.page_size, plan.overhead / GIB,
    )  # fmt: skip
    log_layout(kv_layout(config, spec), config, spec)
    if spec.recurrent is not None:
        log_states(config, spec)
    if spec.head_kind:
        log_head(config, spec)
    if seeing is not None:
        log_images(seeing)
    if weights.kv_scales is not None:
        _log_kv_scales(config.kv_cache_dtype)
    if config.drafting is not None:
        log.info("speculation: %s; a step verifies up to %d tokens", config.drafting, executor.verify_tokens)
    if draft is not None:
        log_draft_model(draft)
    if host.pages:
        log_host_pool(host, config.page_size)
    executor.start_seconds = seconds
    return executor


def warn_without_bytecode() -> None:
    """Say what a start loses where Python keeps no bytecode of torch, and so compiles two thousand files anew."""
    bytecode = torch.__spec__.cached if torch.__spec__ is not None else None
    if bytecode is not None and not Path(bytecode).exists():
        log.warning(
            "start: there is no bytecode of torch, so every start compiles it, which takes seconds; "
            "unset PYTHONDONTWRITEBYTECODE, or run: python -m compileall %s",
            Path(torch.__file__).parent,
        )


def log_head(config: EngineConfig, spec: ModelSpec) -> None:
    """Say what the output head has become, and what a tied one no longer shares."""
    head, table = head_and_table(spec, config.dtype, config.quantization)
    kept = f"; the embedding that it was tied to keeps {table / GIB:.2f} GiB for lookups" if table else ""
    if head:
        log.info("weights: the output head in %s, %.2f GiB%s", config.quantize_head, head / GIB, kept)


def log_states(config: EngineConfig, spec: ModelSpec) -> None:
    """Say what the states of sequences and of prefixes take."""
    size, kept = sequence_state_bytes(config, spec), config.num_state_snapshots
    log.info(
        "memory: states of %d sequences and %d prefixes %.2f GiB (%.1f MiB each), beside the pages of %d of %d layers",
        config.max_num_seqs, kept, size * (config.max_num_seqs + kept) / GIB, size / 2**20, len(spec.attending),
        spec.num_layers,
    )  # fmt: skip


def log_draft_model(draft: DraftModel) -> None:
    """Say which model drafts, and what it takes of what was said before."""
    kv = draft.beside.kv_of_a_token / 1024
    log.info("draft model: %s; %.2f GiB of weights, %.1f KiB of KV a token", draft, draft.weights / GIB, kv)
    for each in draft.decoded:
        log.warning("draft model: %s", each.said(draft.config.dtype))


def _log_kv_scales(kv_dtype: str) -> None:
    if kv_dtype == "fp8":
        log.info("KV cache: in e4m3, under the scales that the checkpoint was calibrated with")
    else:
        log.info("KV cache: in %s; the checkpoint is calibrated for --kv-cache-dtype fp8 too", kv_dtype)


def log_host_pool(host: HostPlan, page_size: int) -> None:
    """Say how large the pool is, and warn where it will not be used."""
    states = f", states of {host.states.count} sequences" if host.states.count else ""
    log.info("memory: host pool %.2f GiB (%d pages of %d tokens%s)", host.nbytes / GIB, host.pages, page_size, states)
    if host.page_tokens > page_size:
        log.warning(
            "memory: a page of %d tokens comes back from the host in the time in which this model computes %.0f, so "
            "preempted sequences are computed again and the host pool stays empty",
            page_size, host.page_tokens,
        )  # fmt: skip
