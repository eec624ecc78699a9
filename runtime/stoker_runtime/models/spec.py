"""The description of a decoder: sizes, rotary embedding, norms, biases and the parameters that follow from them.

Invariants: frozen plain data without torch, so that the fit arithmetic can use it; `parameters()` is the one list
of final tensors, which allocation, loading, random weights and byte counts all walk.
Knows nothing of checkpoints, of devices, or of how a parameter is computed with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from stoker_runtime.models.block_parts import BlockPart
from stoker_runtime.models.layer_specs.latent_spec import LatentSpec
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec
from stoker_runtime.models.layer_specs.sparse_spec import SparseSpec
from stoker_runtime.models.layer_specs.state_spec import Mixer, StateSpec
from stoker_runtime.models.moe_spec import MoeSpec
from stoker_runtime.models.parameter import EXACT, ITEM_BYTES, QUANTIZED, Parameter, Role, stored_bytes
from stoker_runtime.models.quantization.fp4_scheme import EXPERTS_KIND
from stoker_runtime.models.quantization.mixed_checkpoint import MixedCheckpoint, OneCheckpoint, Pieces, resting
from stoker_runtime.models.quantization.quantized_checkpoint import QuantizedCheckpoint
from stoker_runtime.models.quantization.schemes import is_packed


class Norm(StrEnum):
    """Which norm the layers of a model have: by the root of the mean square, or by mean and variance."""

    RMS = "rms"
    LAYER = "layer"


class QkNorm(StrEnum):
    """How queries and keys are normed, if they are, before they rotate.

    HEAD: RMS of each head, all heads with one weight `[D]`. LAYER: mean and variance of each head, a weight for each,
    `[heads, D]`. WHOLE: RMS over all heads together, `[heads · D]`. ROTATED: as HEAD, after they rotated.
    """

    NONE = ""
    HEAD = "head"
    LAYER = "layer"
    WHOLE = "whole"
    ROTATED = "rotated"


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of each matrix a rank's spec has, and what it leaves out (`parallel/split.py` makes them).

    It is part `tensor` of `tensors`; the first adds the biases of sums over ranks. `begins`: it embeds tokens; `ends`:
    it has the final norm and the head. All ranks choose the shapes of their steps by `step_parameters`, a rank's count.
    """

    tensor: int
    tensors: int
    begins: bool
    ends: bool
    step_parameters: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer with grouped-query or latent attention and a feed-forward.

    `windows[i]` is the number of keys a query of layer i sees, itself included; 0 = all of them.
    `checkpoint`: how its linears are quantized already, all but those in `dense_parameters`; `mixed`: in which of its
    schemes each is, or each of its pieces, where it has several; `requantized`: they become something else at load, and
    those with them. `blocks`: the matrices that rest as GGUF has them, as in a file or `made` at load. `dtype`
    is that of the rest. `max_position` is the longest context the rotary table is right for.

    Norms: `pre_norms` stand before attention and feed-forward, `post_norms` norm what these give before it is added to
    the residual stream. `norm_offset` is added to their weights, which then rest in fp32. `parallel`: attention and
    feed-forward read the same stream, each through its own norm, or both through one (`shared_norm`).
    Positions: layers in `unrotated` do not rotate; those with a window rotate by `local_rope` where there is one;
    `learned_positions` is a table that is added to the embedding; `slopes`, one a query head, are what a key's distance
    takes from its logit (ALiBi). `sparse`: the layers whose queries see some blocks of keys alone.
    `embedding_norm` norms the embedding before the first layer, `normed_head` each row of the output head at load.
    `latent`: one latent a token is cached in place of keys and values: of `head_dim` values, and of one head.
    `recurrent`: which layers keep a state for each sequence in place of its tokens, and which are a part of a layer.
    `attention_gate`: queries come with a gate as wide, whose sigmoid what was attended is multiplied with.
    `sinks`: each head has an extra logit that takes weight from its keys. `moe`: the layers whose feed-forward is a
    mixture of experts. `draft_layers` stand behind the last one in checkpoints, for the method mtp alone.
    Multipliers: of the embedding, of what is added to the residual stream, of attention's logits (0: head_dim^-½), and
    of the logits (`logit_scale`). A soft-cap c turns x into c·tanh(x/c); 0 is none. `activation_limit` bounds what an
    activation that has bounds is given. `unused_tokens` are in the vocabulary, and never written.
    `head_kind`: what the output head becomes at load; "": it stays as wide as the rest.
    `scores`: its files hold a head that scores texts, which is read apart.
    `part`: of a rank among several, whose layers, heads and feed-forward are those of this spec.
    """

    architecture: str
    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    rope: RopeSpec
    activation: str
    windows: tuple[int, ...]
    max_position: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    ffn_bias: bool = False
    head_bias: bool = False
    gated: bool = True
    norm: Norm = Norm.RMS
    norm_bias: bool = False
    norm_offset: float = 0.0
    pre_norms: bool = True
    post_norms: bool = False
    parallel: bool = False
    shared_norm: bool = False
    qk_norm: QkNorm = QkNorm.NONE
    local_rope: RopeSpec | None = None
    unrotated: frozenset[int] = frozenset()
    learned_positions: bool = False
    slopes: tuple[float, ...] = ()
    sparse: SparseSpec | None = None
    embedding_norm: bool = False
    normed_head: bool = False
    activation_limit: float = 0.0
    unused_tokens: tuple[int, ...] = ()
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 0.0
    attention_softcap: float = 0.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    sinks: bool = False
    moe: MoeSpec | None = None
    latent: LatentSpec | None = None
    recurrent: StateSpec | None = None
    attention_gate: bool = False
    draft_layers: int = 0
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    checkpoint: QuantizedCheckpoint | None = None
    dense_parameters: frozenset[str] = frozenset()
    mixed: Mapping[str, Pieces] = dataclasses.field(default_factory=dict, hash=False)
    requantized: bool = False
    blocks: Mapping[str, tuple[BlockPart, ...]] = dataclasses.field(default_factory=dict, hash=False)
    made: frozenset[str] = frozenset()
    part: Part | None = None
    head_kind: str = ""
    scores: bool = False

    @property
    def shares_table(self) -> bool:
        """Whether the output head is the embedding's own memory: a tied one that is quantized is not."""
        return self.tie_embeddings and not self.head_kind

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the output head that are there."""
        return self.vocab if self.part is None else -(-(self.vocab - self.part.tensor) // self.part.tensors)

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; the value heads are as wide."""
        return self.kv_heads * self.head_dim

    @property
    def caches(self) -> int:
        """Tensors that a layer caches: keys and values, or latents."""
        return 1 if self.latent else 2

    @property
    def attended_dim(self) -> int:
        """What attention gives of a head before it is projected: a value, or a weighed latent."""
        return self.latent.kv_lora_rank if self.latent else self.head_dim

    @property
    def attended_size(self) -> int:
        """Columns of the output projection: the values of all heads."""
        return self.heads * (self.latent.v_head_dim if self.latent else self.head_dim)

    @property
    def attention_scale(self) -> float:
        """What the product of a query and a key is multiplied with before the softmax."""
        return self.attention_multiplier or float(self.head_dim**-0.5)

    def rope_of(self, layer: int) -> RopeSpec:
        """How a layer rotates: not at all is a rotation of no dimensions."""
        if layer in self.unrotated:
            return RopeSpec(dim=0)
        return self.local_rope if self.local_rope is not None and self.windows[layer] else self.rope

    def of_layers(self, layers: Sequence[int]) -> ModelSpec:
        """The spec of a model of these layers alone, in this order."""
        return replace(
            self,
            num_layers=len(layers),
            windows=tuple(self.windows[layer] for layer in layers),
            unrotated=frozenset(place for place, layer in enumerate(layers) if layer in self.unrotated),
            moe=self.moe and self.moe.of_layers(layers),
            sparse=self.sparse and self.sparse.of_layers(layers),
            recurrent=self.recurrent and self.recurrent.of_layers(layers),
        )

    @property
    def has_dense_layer(self) -> bool:
        """Whether any layer has a feed-forward of width `ffn`."""
        return not all(self.is_sparse(layer) or not self.feeds(layer) for layer in range(self.num_layers))

    def sees_blocks(self, layer: int) -> bool:
        """Whether a layer's queries see some blocks of keys alone."""
        return self.sparse is not None and layer in self.sparse.layers

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.moe is not None and layer in self.moe.layers

    def mixer(self, layer: int) -> Mixer:
        """What of a layer brings tokens together."""
        return Mixer.ATTENTION if self.recurrent is None else self.recurrent.mixers[layer]

    def feeds(self, layer: int) -> bool:
        """Whether a layer has a feed-forward."""
        return self.recurrent is None or layer not in self.recurrent.unfed

    def layer_kind(self, layer: int) -> tuple[object, ...]:
        """What sets a layer apart from those that are not alike: all of one kind have the same parameters."""
        seen = (self.windows[layer], self.sees_blocks(layer), self.rope_of(layer))
        schemes = tuple((each.kind, each.scheme) for each in self.layer_parameters(layer)) if self.mixed else ()
        return (self.mixer(layer), self.feeds(layer), self.is_sparse(layer), *seen, schemes)

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers that attend, and so cache tokens."""
        return tuple(layer for layer in range(self.num_layers) if self.mixer(layer) is Mixer.ATTENTION)

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        """The parameters of one layer, in the order they are used."""
        qkv_size = self.latent.projected(self.heads) if self.latent else self.q_size + 2 * self.kv_size
        qkv_size += self.q_size if self.attention_gate else 0
        mixer = self.mixer(layer)
        attends, fed = mixer is Mixer.ATTENTION, self.feeds(layer)
        up_size = 2 * self.ffn if self.gated else self.ffn
        stream = (self.hidden,)
        feeds = self.pre_norms and not self.shared_norm and fed and mixer is not Mixer.NONE
        adds_bias = self.part is None or self.part.tensor == 0
        dense = not self.is_sparse(layer) and fed
        latents = self.latent.rows(self.heads) if self.latent and attends else ()
        holds = self.recurrent is not None and self.recurrent.kind is mixer
        states = self.recurrent.rows(self.hidden, adds_bias=adds_bias) if self.recurrent and holds else ()
        rows: list[tuple[str, tuple[int, ...], Role, bool]] = [
            ("input_norm", stream, Role.NORM, self.pre_norms),
            ("input_norm_bias", stream, Role.BIAS, self.pre_norms and self.norm_bias),
            ("qkv", (qkv_size, self.hidden), Role.LINEAR, attends),
            ("qkv_bias", (qkv_size,), Role.BIAS, attends and self.qkv_bias),
            ("q_norm", self._qk_norm_shape(self.heads), Role.NORM, attends and bool(self.qk_norm)),
            ("k_norm", self._qk_norm_shape(self.kv_heads), Role.NORM, attends and bool(self.qk_norm)),
            ("sinks", (self.heads,), Role.BIAS, attends and self.sinks),
            *((name, shape, Role(role), True) for name, shape, role in (*latents, *states)),
            ("output", (self.hidden, self.attended_size), Role.LINEAR, attends),
            ("output_bias", stream, Role.BIAS, attends and self.output_bias and adds_bias),
            ("attention_post_norm", stream, Role.NORM, self.post_norms),
            ("ffn_norm", stream, Role.NORM, feeds),
            ("ffn_norm_bias", stream, Role.BIAS, feeds and self.norm_bias),
            *(self._moe_rows(self.moe) if self.moe is not None and layer in self.moe.layers else ()),
            ("gate_up", (up_size, self.hidden), Role.LINEAR, dense),
            ("gate_up_bias", (up_size,), Role.BIAS, dense and self.ffn_bias),
            ("down", (self.hidden, self.ffn), Role.LINEAR, dense),
            ("down_bias", stream, Role.BIAS, dense and self.ffn_bias and adds_bias),
            ("ffn_post_norm", stream, Role.NORM, self.post_norms),
        ]
        for field, shape, role, present in rows:
            if present:
                yield self._parameter(f"layers.{layer}.{field}", shape, role)

    def _moe_rows(self, moe: MoeSpec) -> list[tuple[str, tuple[int, ...], Role, bool]]:
        """A mixture's parameters. Those of its experts are stacked: the rows of one lie behind the other's."""
        parts, shared = 2 if self.gated else 1, bool(moe.shared_ffn)
        up, down = len(moe.here) * parts * moe.ffn, len(moe.here) * self.hidden
        adds_bias = moe.held is not None or self.part is None or self.part.tensor == 0
        return [
            ("router", (moe.experts, self.hidden), Role.ROUTER, True),
            ("router_bias", (moe.experts,), Role.BIAS, moe.router_bias),
            ("correction_bias", (moe.experts,), Role.BIAS, moe.correction_bias),
            ("experts_gate_up", (up, self.hidden), Role.EXPERTS, True),
            ("experts_gate_up_bias", (up,), Role.BIAS, moe.expert_bias),
            ("experts_down", (down, moe.ffn), Role.EXPERTS, True),
            ("experts_down_bias", (down,), Role.BIAS, moe.expert_bias and adds_bias),
            ("shared_gate", (1, self.hidden), Role.ROUTER, shared and moe.shared_gate),
            ("shared_gate_up", (parts * moe.shared_ffn, self.hidden), Role.LINEAR, shared),
            ("shared_down", (self.hidden, moe.shared_ffn), Role.LINEAR, shared),
        ]

    def _parameter(self, name: str, shape: tuple[int, ...], role: Role) -> Parameter:
        kind = self._stored_kind(name, role) if role in QUANTIZED else ""
        own = self.checkpoint_of(name) if is_packed(kind) else None
        scheme = None if own is None else own.scheme
        # 1 + w keeps fewer digits of w in 16 bits than the checkpoint has.
        dtype = "float32" if role is Role.NORM and self.norm_offset else ""
        if name.endswith(EXACT):
            dtype = "float32"
        return Parameter(name, shape, role, kind, scheme, dtype)

    def _qk_norm_shape(self, heads: int) -> tuple[int, ...]:
        shapes = {QkNorm.LAYER: (heads, self.head_dim), QkNorm.WHOLE: (heads * self.head_dim,)}
        return shapes.get(self.qk_norm, (self.head_dim,))

    def _stored_kind(self, name: str, role: Role) -> str:
        if role is Role.EXPERTS and self.moe is not None and self.moe.packing:
            return EXPERTS_KIND
        if self.checkpoint is None or self.requantized:
            return ""
        own = None if name in self.dense_parameters else self.checkpoint_of(name)
        return "dense" if own is None else own.kind

    def pieces_of(self, name: str) -> Pieces:
        """How the checkpoint holds the pieces of a matrix: one scheme for all, or one for each; nothing: as numbers of
        16 or 32 bits.
        """
        if self.checkpoint is None:
            return ()
        return self.mixed.get(name, ()) if isinstance(self.checkpoint, MixedCheckpoint) else (self.checkpoint,)

    def checkpoint_of(self, name: str) -> OneCheckpoint | None:
        """How a matrix of the checkpoint rests, unless it becomes something else; None: in 16 or 32 bits."""
        pieces = self.pieces_of(name)
        return resting(pieces) if pieces else None

    def parameters(self) -> Iterator[Parameter]:
        """Every final tensor, in the order the forward pass uses them."""
        for each in self._unkept():
            yield replace(each, kind="blocks", blocks=parts) if (parts := self.blocks.get(each.name)) else each

    def _unkept(self) -> Iterator[Parameter]:
        """Every final tensor as if none stayed in blocks."""
        begins, ends = (self.part.begins, self.part.ends) if self.part else (True, True)
        if begins or (ends and self.shares_table):
            yield Parameter("embed", (self.vocab_rows, self.hidden), Role.EMBEDDING)
        if self.embedding_norm and begins:
            yield self._parameter("embed_norm", (self.hidden,), Role.NORM)
            yield Parameter("embed_norm_bias", (self.hidden,), Role.BIAS)
        if self.learned_positions and begins:
            yield Parameter("positions", (self.max_position, self.hidden), Role.EMBEDDING)
        for layer in range(self.num_layers):
            yield from self.layer_parameters(layer)
        if ends:
            yield from self._last_parameters()

    def _last_parameters(self) -> Iterator[Parameter]:
        yield self._parameter("final_norm", (self.hidden,), Role.NORM)
        if self.norm_bias:
            yield Parameter("final_norm_bias", (self.hidden,), Role.BIAS)
        if not self.shares_table:
            yield Parameter("head", (self.vocab_rows, self.hidden), Role.HEAD, at_load=self.head_kind)
        if self.head_bias:
            yield Parameter("head_bias", (self.vocab_rows,), Role.BIAS)

    def parameter_bytes(self, dtype: str, quantization: str = "none") -> int:
        """Device bytes of all weights, exactly as allocated: every tensor padded to ALIGNMENT."""
        return sum(stored_bytes(parameter, dtype, quantization) for parameter in self.parameters())

    def active_bytes(self, dtype: str, quantization: str = "none") -> int:
        """Bytes of the weights that one token reads: of experts those of as many as are chosen for it, of the embedding
        one row, unless it is the head, too. Of a dense model all.
        """
        if self.moe is None:
            return self.parameter_bytes(dtype, quantization)
        read = {Role.EXPERTS: self.moe.top_k / self.moe.experts}
        if not self.shares_table:
            read[Role.EMBEDDING] = 0.0
        parts = ((stored_bytes(each, dtype, quantization), each.role) for each in self.parameters())
        return round(sum(size * read.get(role, 1.0) for size, role in parts))

    @property
    def active_parameters(self) -> int:
        """The weights that one token reads, as `active_bytes` counts them."""
        return self.active_bytes("bfloat16") // ITEM_BYTES["bfloat16"]

    @property
    def step_parameters(self) -> int:
        """The same of the rank that holds this part of a model."""
        return self.active_parameters if self.part is None else self.part.step_parameters

    def kv_bytes_per_token(self, kv_dtype: str, layers: int | None = None) -> int:
        """Bytes of keys and values, or of latents, that one token holds over all layers that attend, or so many."""
        count = len(self.attending) if layers is None else layers
        return self.caches * count * self.kv_size * ITEM_BYTES[kv_dtype]

    def rope_table_bytes(self, max_model_len: int) -> int:
        """Bytes of the rotary tables for contexts of up to `max_model_len` tokens."""
        ropes = {self.rope_of(layer) for layer in range(self.num_layers)}
        grows = self.rope.query_growth and max_model_len > self.rope.original_max_position
        return max_model_len * (sum(rope.dim for rope in ropes) + bool(grows)) * ITEM_BYTES["float32"]
