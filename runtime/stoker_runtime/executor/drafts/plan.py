"""A second model that drafts, or a head that does: which one it is, how it runs, and what it takes of the device.

Its keys and values lie in pages of their own under the same numbers as the model's: a page is a page of both. So what
shares, copies, moves or keeps a page does so with both, and the sum counts both.

Invariants: pure; every refusal names the field and both sizes.
Knows nothing of how memory is allocated, and of how drafts are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from stoker_kernels.attention import attention_workspace_bytes
from stoker_runtime.checkpoint.safetensors_index import read_checkpoint_index
from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.settings import DRAFT_MODEL, MTP, NAME, DraftCosts, Drafting
from stoker_runtime.drafts.settings import EAGLE3 as EAGLE3_METHOD
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import Beside, activation_bytes, resolve_quantization, sampled_rows, verify_tokens
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.architectures.heads import is_eagle3, next_layer, read_eagle3
from stoker_runtime.models.config_source import ModelSource, read_source
from stoker_runtime.models.draft_heads.spec import HeadSpec, NextSpec
from stoker_runtime.models.parameter import ITEM_BYTES
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.block_plan import Decoded, decoding_reason, plan_blocks
from stoker_runtime.weights.head_ids import read_head_ids

TOKENS_PER_READING = {"cuda": 100, "cpu": 5}
"""Tokens that a device computes in about the time in which it reads a model's weights once."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """`config` is the engine's, resolved, but for what concerns the draft model's own weights; `decoded`
    is what of these was blocks in a GGUF file.
    """

    source: ModelSource
    spec: ModelSpec
    config: EngineConfig
    decoded: tuple[Decoded, ...] = field(default=(), kw_only=True)

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


@dataclass(frozen=True)
class DraftHead(DraftModel):
    """A head, which reads the model's states. `ids [drafted]`: the tokens of its rows; None: all of the vocabulary."""

    head: HeadSpec
    ids: Tensor | None

    @property
    def state(self) -> int:
        """And the states of a step, a page for padding, the logits of its own rows, and a pass's description."""
        config, spec, item = self.config, self.head, ITEM_BYTES[self.config.dtype]
        rows = sampled_rows(config)
        taken = config.max_num_batched_tokens * len(spec.taps) * spec.state + config.page_size * spec.hidden
        own = rows * spec.drafted * item + 8 * spec.drafted if self.ids is not None else 0
        return super().state + taken * item + own + 24 * rows

    @property
    def beside(self) -> Beside:
        """And a state a token; its passes read an embedding and a state, normed and side by side."""
        config, item = self.config, self.head.hidden * ITEM_BYTES[self.config.dtype]
        passes = super().beside
        wide = verify_tokens(config) if passes.graphs else 0
        return Beside(
            passes.kv_of_a_token + item,
            passes.workspace + 4 * config.max_num_batched_tokens * item,
            passes.graphs + 4 * wide * item,
        )

    def costs(self, target: ModelSpec, config: EngineConfig) -> DraftCosts:
        """What its passes cost beside steps of `target`: of an embedding they read a row a token."""
        own, spec = self.config, self.head
        read = spec.active_bytes(own.dtype, own.quantization)
        table = spec.vocab * spec.hidden * ITEM_BYTES[own.dtype]
        # Who has no output head reads the model's, which is as large.
        read += table if isinstance(spec, NextSpec) else -table if spec.own_table else 0
        share = read / target.active_bytes(config.dtype, config.quantization)
        return DraftCosts(share, share / TOKENS_PER_READING[config.device])

    def __str__(self) -> str:
        spec = self.head
        if isinstance(spec, NextSpec):
            return f"{self.source.name}: the model's own {spec.within.rstrip('.')}"
        reads = f"states before layers {', '.join(map(str, spec.taps))}"
        return f"{self.source.name}: EAGLE-3, hidden {spec.hidden}, {reads}, {spec.drafted} tokens"


def read_draft_model(config: EngineConfig, target: ModelSpec) -> DraftModel | None:
    """The model or head that a resolved `config` names to draft beside `target`; None where it names none.

    Raises:
        ConfigError: one that cannot draft for `target`, with both sizes.
        ModelError: one that cannot be read.
    """
    drafting = config.drafting
    if drafting is None or drafting.method not in (DRAFT_MODEL, EAGLE3_METHOD, MTP):
        return None
    try:
        if drafting.method == MTP:
            source = read_source(config.model)
            head = next_layer(source, target)
            return DraftHead(source, head, _own(config, "none"), head, None)
        source = read_source(drafting.model)
        heads = is_eagle3(source.config)
        if heads != (drafting.method == EAGLE3_METHOD):
            raise _other_method(drafting, heads)
        if heads:
            return _read_head(config, source, target)
        spec = build_spec(source)
    except ModelError as error:
        raise ModelError(f"{NAME}: {error.message}", param=NAME) from error
    name = f"{NAME}: model {drafting.model!r}"
    _check_vocabulary(name, spec, target)
    if spec.max_position < config.max_model_len:
        raise ConfigError(
            f"{name} has positions up to {spec.max_position}, but max_model_len is {config.max_model_len}; set "
            f"--max-model-len to {spec.max_position} or less.",
            param=NAME,
        )
    if spec.recurrent is not None:
        raise ConfigError(
            f"{name} ({spec.architecture}) keeps a state for each sequence, which cannot go back to before a draft; "
            "a draft model needs attention in all its layers.",
            param=NAME,
        )
    refused = decoding_reason(_own(config, "auto"), spec, config.device)
    blocks = plan_blocks(spec, source, "auto", config.device, refused=refused)
    own = _own(config, resolve_quantization("auto", blocks.spec))
    return DraftModel(source, blocks.spec, own, decoded=blocks.decoded)


def _own(config: EngineConfig, quantization: str) -> EngineConfig:
    """`config` of what drafts."""
    return replace(config, quantization=quantization, isq="none", quantize_head="none", quantize_embedding="none",
                   enable_lora=False)  # fmt: skip


def _read_head(config: EngineConfig, source: ModelSource, target: ModelSpec) -> DraftHead:
    name = f"{NAME}: model {source.name!r}"
    if source.path is None or not source.path.is_dir():
        raise ModelError(f"{source.name}: a head is read from a folder of safetensors.", param=NAME)
    # `stoker info` may have fetched the description alone; who loads the head is told that its files are missing.
    files = any(source.path.glob("*.safetensors"))
    tensors = read_checkpoint_index(source.path) if files else {}
    own_table = any(each.endswith("embed_tokens.weight") for each in tensors)
    spec = read_eagle3(source, target, own_table=own_table)
    _check_vocabulary(name, spec, target)
    # Without an embedding of its own a head is as wide as the model.
    asked = int(source.config.get("target_hidden_size") or (spec.hidden if files and not own_table else target.hidden))
    if asked != target.hidden:
        raise ConfigError(
            f"{name} is for a model of hidden size {asked}, but this one's is {target.hidden}; give the head that was "
            "trained with this model.",
            param=NAME,
        )
    ids = read_head_ids(source.path, spec.drafted, target.vocab) if files else None
    return DraftHead(source, spec, _own(config, "none"), spec, ids)


def _check_vocabulary(name: str, spec: ModelSpec, target: ModelSpec) -> None:
    if spec.vocab != target.vocab:
        raise ConfigError(
            f"{name} has a vocabulary of {spec.vocab} tokens, but the model's has {target.vocab}; what drafts needs "
            "the same one.",
            param=NAME,
        )


def _other_method(drafting: Drafting, heads: bool) -> ConfigError:
    what, method = ("an EAGLE-3 head", EAGLE3_METHOD) if heads else ("a model of its own", DRAFT_MODEL)
    return ConfigError(
        f"{NAME}: method is {drafting.method!r}, but {drafting.model!r} is {what}; set method to {method!r}.",
        param=NAME,
    )
