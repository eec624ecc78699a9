"""A second model that drafts: which one it is, how it runs, and what it takes of the device.

Its keys and values lie in pages of their own under the same numbers as the model's: a page is a page of both. So what
shares, copies, moves or keeps a page does so with both, and the sum counts both.

Invariants: pure; every refusal names the field and both sizes.
Knows nothing of how memory is allocated, and of how drafts are made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker_kernels.attention import attention_workspace_bytes
from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.settings import NAME, DraftCosts
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import Beside, activation_bytes, resolve_quantization, sampled_rows, verify_tokens
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import ModelSource, read_source
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.spec import ModelSpec

TOKENS_PER_READING = {"cuda": 100, "cpu": 5}
"""Tokens that a device computes in about the time in which it reads a model's weights once."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """`config` is the engine's, resolved, but for what concerns the draft model's own weights."""

    source: ModelSource
    spec: ModelSpec
    config: EngineConfig

    @property
    def weights(self) -> int:
        """Bytes of its weights on the device."""
        return self.spec.parameter_bytes(self.config.dtype, self.config.quantization)

    @property
    def state(self) -> int:
        """Bytes that rest on the device beside weights and KV."""
        config, spec = self.config, self.spec
        rows = sampled_rows(config)
        return (
            rows * (spec.vocab * ITEM_BYTES[config.dtype] + 12)
            + attention_workspace_bytes(rows, spec.heads, spec.attended_dim)
            + spec.rope_table_bytes(config.max_model_len)
            + 4 * config.max_num_seqs
        )

    @property
    def beside(self) -> Beside:
        """What it adds to a page, and what its largest passes take."""
        config, spec = self.config, self.spec
        graphed = config.device != "cpu" and not config.enforce_eager
        return Beside(
            spec.kv_bytes_per_token(config.kv_cache_dtype),
            activation_bytes(config, spec, config.max_num_batched_tokens),
            activation_bytes(config, spec, verify_tokens(config)) if graphed else 0,
        )

    def costs(self, target: ModelSpec, config: EngineConfig) -> DraftCosts:
        """What its passes cost beside steps of `target`, which runs as `config` says."""
        read = self.spec.active_bytes(self.config.dtype, self.config.quantization)
        share = read / target.active_bytes(config.dtype, config.quantization)
        return DraftCosts(share, share / TOKENS_PER_READING[config.device])

    def __str__(self) -> str:
        spec = self.spec
        return f"{self.source.name}: {spec.architecture}, {spec.num_layers} layers, hidden {spec.hidden}"


def read_draft_model(config: EngineConfig, target: ModelSpec) -> DraftModel | None:
    """The draft model that a resolved `config` names beside `target`; None where it names none.

    Raises:
        ConfigError: one that cannot draft for `target`, with both sizes.
        ModelError: one that cannot be read.
    """
    drafting = config.drafting
    if drafting is None or not drafting.model:
        return None
    name = f"{NAME}: model {drafting.model!r}"
    try:
        source = read_source(drafting.model)
        spec = build_spec(source)
    except ModelError as error:
        raise ModelError(f"{NAME}: {error.message}", param=NAME) from error
    if spec.vocab != target.vocab:
        raise ConfigError(
            f"{name} has a vocabulary of {spec.vocab} tokens, but the model's has {target.vocab}; a draft model needs "
            "the same one.",
            param=NAME,
        )
    if spec.max_position < config.max_model_len:
        raise ConfigError(
            f"{name} has positions up to {spec.max_position}, but max_model_len is {config.max_model_len}; set "
            f"--max-model-len to {spec.max_position} or less.",
            param=NAME,
        )
    if spec.latent is not None and config.kv_cache_dtype == "fp8":
        raise ConfigError(
            f"{name} has latent attention, which reads no fp8 cache; leave --kv-cache-dtype out.", param=NAME
        )
    own = replace(config, quantization="auto", isq="none", quantize_head="none", enable_lora=False)
    return DraftModel(source, spec, replace(own, quantization=resolve_quantization("auto", spec)))
