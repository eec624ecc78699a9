"""Sizes of a model that pools: every automatic value decided, and whether it fits.

Invariants: pure and torch-free, like `resolve.py`. A step holds the longest text whole, because texts are not cut.
Knows nothing of how memory is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker_runtime.config import ISQ_BLOCKS, EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.resolve import (
    GIB,
    DeviceMemory,
    activation_bytes,
    asked_quantization,
    budget_bytes,
    refuse_beyond,
    resolve_quantization,
)
from stoker_runtime.models.encoders.spec import EncoderSpec
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.pooling import PoolingSpec
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.block_formats import KEPT

# cuBLAS's workspace and what Triton's kernels take.
RESERVE_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True)
class PoolingMemory:
    """Bytes of weights, and of everything that a step needs beside them."""

    weights: int
    workspace: int


def resolve_pooling(
    config: EngineConfig, spec: EncoderSpec | ModelSpec, pooling: PoolingSpec, device: str, *, gpu_bf16: bool = True
) -> EngineConfig:
    """Return `config` with every automatic value decided for this model and device ("cuda" or "cpu").

    `gpu_bf16`: the GPU multiplies bfloat16.
    Raises ConfigError for a longer text than the model has positions for, or a setting that encoders lack.
    """
    for name in ("swap_space", "num_cpu_blocks"):
        if getattr(config, name):
            raise ConfigError(
                f"A model that pools keeps no KV cache; leave --{name.replace('_', '-')} out.", param=name
            )
    if config.quantize_head != "none":
        raise ConfigError("A model that pools has no output head; leave --quantize-head out.", param="quantize_head")
    if config.quantize_embedding != "none":
        raise ConfigError(
            f"quantize_embedding is {config.quantize_embedding}, which makes blocks for models that generate; leave it "
            "out.",
            param="quantize_embedding",
        )
    encoder = isinstance(spec, EncoderSpec)
    if config.quantization == KEPT:
        raise ConfigError(
            f"quantization is {KEPT}, which keeps blocks for models that generate; leave it out.", param="quantization"
        )
    if config.isq in ISQ_BLOCKS:
        raise ConfigError(
            f"isq is {config.isq}, which makes blocks for models that generate; use fp8 or w4.", param="isq"
        )
    if encoder and asked_quantization(config) not in ("auto", "none"):
        raise ConfigError(f"Encoders are not quantized; leave {asked_quantization(config)} out.", param="quantization")
    refuse_beyond(config.max_model_len, spec.max_position)
    on_gpu = device == "cuda"
    # An encoder's values stay small, and float16's three bits more keep its vectors nearer to float32's.
    half = "float16" if encoder or not gpu_bf16 else "bfloat16"
    dtype = config.dtype
    if dtype == "auto":
        dtype = (half if spec.dtype == "float32" or not gpu_bf16 else spec.dtype) if on_gpu else "float32"
    longest = config.max_model_len or min(spec.max_position, pooling.max_tokens or spec.max_position)
    return replace(
        config,
        device=device,
        dtype=dtype,
        kv_cache_dtype=dtype,
        max_model_len=longest,
        max_num_seqs=config.max_num_seqs or (256 if on_gpu else 64),
        max_num_batched_tokens=max(config.max_num_batched_tokens or (16384 if on_gpu else 2048), longest),
        page_size=config.page_size or (64 if on_gpu else 16),
        quantization="none"
        if isinstance(spec, EncoderSpec)
        else resolve_quantization(asked_quantization(config), spec),
    )


def pooling_pages(config: EngineConfig) -> int:
    """KV pages that the texts of one step take at most: each but its last is full."""
    return config.max_num_batched_tokens // config.page_size + config.max_num_seqs


def plan_pooling(config: EngineConfig, spec: EncoderSpec | ModelSpec, memory: DeviceMemory) -> PoolingMemory:
    """What the model and a step take. Raises ConfigError, naming what to lower, where a GPU has less."""
    element, tokens = ITEM_BYTES[config.dtype], config.max_num_batched_tokens
    if isinstance(spec, EncoderSpec):
        weights = spec.parameter_bytes(config.dtype)
        workspace = tokens * (5 * spec.hidden + spec.working) * element + spec.rope_table_bytes
    else:
        weights = spec.parameter_bytes(config.dtype, config.quantization)
        # One layer's keys and values: the next layer overwrites them.
        pages = pooling_pages(config) * config.page_size * spec.caches * spec.kv_size
        workspace = activation_bytes(config, spec, tokens) + pages * element
        workspace += spec.rope_table_bytes(config.max_model_len)
    # States of all tokens in fp32, where they are averaged.
    workspace += tokens * spec.hidden * 4
    if config.device == "cuda":
        budget = budget_bytes(config, memory)
        if memory.used + weights + workspace + RESERVE_BYTES > budget:
            raise ConfigError(
                f"{weights / GIB:.2f} GiB of weights and {workspace / GIB:.2f} GiB for a step of {tokens} tokens do "
                f"not fit {(budget - memory.used) / GIB:.2f} GiB; lower --max-num-batched-tokens and --max-model-len.",
                param="max_num_batched_tokens",
            )
    return PoolingMemory(weights, workspace)
