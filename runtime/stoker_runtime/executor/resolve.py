"""Sizes by arithmetic: an EngineConfig with "auto" in it becomes one with none, and the KV arena's pages are counted.

Invariants: pure and torch-free; the same inputs give the same sizes on every machine, so a start never probes
the device by running out of memory. Every refusal names the flag to change and the number that would do.
Knows nothing of how memory is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.spec import ITEM_BYTES, ModelSpec

GIB = 1024**3
# What the CUDA graphs' private pool, cuBLAS's workspace and Triton's scratch take beside what is counted below.
GRAPH_RESERVE_BYTES = 512 * 1024**2


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of one device. `used` is what others and the driver's context hold before Stoker allocates."""

    total: int
    used: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where every byte goes; `pages` of KV are what is left. Bytes unless named otherwise."""

    weights: int
    workspace: int
    state: int
    page_bytes: int
    pages: int

    @property
    def kv_bytes(self) -> int:
        """The KV arena."""
        return self.pages * self.page_bytes


def resolve(config: EngineConfig, spec: ModelSpec, device: str) -> EngineConfig:
    """Return `config` with every automatic value decided for this model and device ("cuda" or "cpu").

    Raises:
        ConfigError: max_model_len beyond what the model was trained for.
    """
    dtype = config.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else ("bfloat16" if spec.dtype == "float32" else spec.dtype)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    if config.max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model's positions end at {spec.max_position}; "
            f"set --max-model-len to {spec.max_position} or less.",
            param="max_model_len",
        )
    max_len = config.max_model_len or spec.max_position
    on_gpu = device == "cuda"
    max_seqs = config.max_num_seqs or (1024 if on_gpu else 32)
    return replace(
        config,
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        max_model_len=max_len,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens or (8192 if on_gpu else 512), max_seqs),
        page_size=config.page_size or (64 if on_gpu else 16),
        quantization=resolve_quantization(config.quantization, spec),
    )


def resolve_quantization(asked: str, spec: ModelSpec) -> str:
    """"none" or "fp8". Raises ConfigError for weights that are FP8 already and are asked to be something else."""
    if spec.checkpoint is None:
        return "none" if asked == "auto" else asked
    if asked == "none":
        raise ConfigError(
            "quantization is none, but the checkpoint's weights are FP8; leave --quantization out.",
            param="quantization",
        )
    return "fp8"


def workspace_bytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Peak activations of one step: the widest point of a layer plus the residual stream, and the logits."""
    element = ITEM_BYTES[config.dtype]
    tokens = config.max_num_batched_tokens
    qkv = spec.q_size + 2 * spec.kv_size
    layer = max(2 * qkv + spec.q_size, 3 * spec.ffn) + 4 * spec.hidden
    logits = config.max_num_seqs * spec.vocab * (element + 4)
    return tokens * layer * element + logits


def plan_memory(config: EngineConfig, spec: ModelSpec, memory: DeviceMemory, weights: int, state: int) -> MemoryPlan:
    """Count the KV pages that fit beside `weights` and `state` bytes, or take `num_gpu_blocks` and check that they do.

    Raises:
        ConfigError: not even one sequence of max_model_len fits; the message says what would.
    """
    page_bytes = spec.kv_bytes_per_token(config.kv_cache_dtype) * config.page_size
    workspace = workspace_bytes(config, spec)
    pages_for_one = -(-config.max_model_len // config.page_size)
    if config.device == "cpu":
        room = int(config.cpu_kv_gb * GIB)
    else:
        budget = min(
            int(memory.total * config.gpu_memory_utilization),
            memory.total - int(config.gpu_memory_reserve_gb * GIB),
        )
        room = budget - memory.used - weights - workspace - state - GRAPH_RESERVE_BYTES
    wanted = config.num_gpu_blocks or room // page_bytes
    if wanted * page_bytes > room and config.device != "cpu":
        raise ConfigError(
            f"num_gpu_blocks is {wanted} ({wanted * page_bytes / GIB:.2f} GiB of KV), but {max(room, 0) / GIB:.2f} GiB "
            f"are left beside {weights / GIB:.2f} GiB of weights and {workspace / GIB:.2f} GiB of workspace; "
            "lower --num-gpu-blocks or raise --gpu-memory-utilization.",
            param="num_gpu_blocks",
        )
    if wanted < 1:
        raise ConfigError(
            f"No memory is left for the KV cache: {weights / GIB:.2f} GiB of weights and {workspace / GIB:.2f} GiB of "
            f"workspace in {memory.total / GIB:.2f} GiB at --gpu-memory-utilization {config.gpu_memory_utilization}; "
            "raise it, lower --max-num-batched-tokens, or quantize the model.",
            param="gpu_memory_utilization",
        )
    if wanted < pages_for_one and not config.num_gpu_blocks:
        raise ConfigError(
            f"max_model_len {config.max_model_len} needs {pages_for_one} KV pages, but {wanted} fit; "
            f"set --max-model-len to {wanted * config.page_size} or less.",
            param="max_model_len",
        )
    return MemoryPlan(weights, workspace, state, page_bytes, wanted)
