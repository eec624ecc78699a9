"""The one decoder: attention, or a state in its place, and a feed-forward, for every architecture of the table.

Invariants: `forward` reads its inputs and what sequences keep and nothing else; it neither waits for the device nor
branches on values, so a CUDA graph may capture it. The residual stream is updated in place (`layers/stream.py`); of the
last layer only the sampled rows go beyond attention.
Knows nothing of requests, of sampling, of pages' owners, or of checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from stoker_kernels.activation import scale_and_cap, sigmoid_mul
from stoker_kernels.attention import BlockPattern
from stoker_kernels.block_gemm import block_rows
from stoker_kernels.embedding import embed
from stoker_kernels.gemm import linear, linear_silu_mul
from stoker_kernels.norm import layer_norm, rms_norm_columns
from stoker_kernels.quant import (
    AnyWeight,
    BlockWeight,
    Fp4Weight,
    Int8Weight,
    IntegerWeight,
    LinearWeight,
    Quantized,
    activation_type,
)
from stoker_kernels.rope import qk_norm_rope_kv_write
from stoker_runtime.models.decoder_weights import DecoderWeights, LayerWeights, linear_form
from stoker_runtime.models.inputs import AdapterInputs, ForwardInputs
from stoker_runtime.models.layers.activation import Activation
from stoker_runtime.models.layers.heads import Rare, attend_pages
from stoker_runtime.models.layers.latent import attend_latents
from stoker_runtime.models.layers.mixture import Mixture
from stoker_runtime.models.layers.query import Queries
from stoker_runtime.models.layers.state import pass_states
from stoker_runtime.models.layers.stream import Stream
from stoker_runtime.models.rope import rope_table
from stoker_runtime.models.spec import ModelSpec, QkNorm


class Decoder:
    """A model on one device. `kv` of `forward` is one `(k_cache, v_cache)` per layer, `[P, Hkv, B, D]` each, or of
    latents one `(cache,)`; of a layer with a state `(window, state)` by slot, behind them where drafts are verified
    what is kept of their tokens, and of one that feeds forward alone `()`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        device: torch.device,
        dtype: torch.dtype,
        *,
        max_model_len: int = 0,
    ) -> None:
        """`max_model_len` is the longest context that will run (0: `spec.max_position`); it sizes the rotary tables."""
        self.spec = spec
        self.weights = weights
        self.dtype = dtype
        self._stream = Stream(spec)
        self.mixture = None if spec.moe is None else Mixture(spec.moe, spec.num_layers, device)
        ropes = [spec.rope_of(layer) for layer in range(spec.num_layers)]
        longest = max_model_len or spec.max_position
        tables = {rope: rope_table(rope, longest, device) for rope in set(ropes)}
        self._queries = Queries(spec, longest, device, dtype)
        self._cos_sin = tuple(tables[rope] for rope in ropes)
        self._slopes = torch.tensor(spec.slopes, dtype=torch.float32, device=device) if spec.slopes else None
        self._patterns = tuple(_pattern(spec, layer) for layer in range(spec.num_layers))
        self._unused = torch.tensor(spec.unused_tokens, device=device) if spec.unused_tokens else None
        self._activation = Activation(spec)
        # In the dtype in which the model was trained to multiply.
        self._embedding_multiplier = float(torch.tensor(spec.embedding_multiplier, dtype=dtype))
        # Keys and values are of order one, so fp8 caches without calibrated scales use 1.
        self._unit_scale = torch.ones(spec.kv_heads, dtype=torch.float32, device=device)

    def renew(self, weights: DecoderWeights) -> None:
        """Run with other weights of the same shapes from now on."""
        self.weights = weights

    def of_layers(self, layers: Sequence[int]) -> Decoder:
        """The same model with these layers alone, in this order: same memory, other results."""
        few = copy(self)
        few.spec = self.spec.of_layers(layers)
        few._cos_sin = tuple(self._cos_sin[index] for index in layers)
        few._patterns = tuple(self._patterns[index] for index in layers)
        few.mixture = self.mixture and self.mixture.of_layers(layers)
        scales = self.weights.kv_scales
        few.weights = replace(
            self.weights,
            layers=tuple(self.weights.layers[index] for index in layers),
            kv_scales=None if scales is None else scales[list(layers)],
        )
        return few

    def unlike_layers(self) -> list[int]:
        """Layers that stand for all: the first of each kind with its successor, which norms in the form it reads."""
        first: dict[tuple[object, ...], int] = {}
        for index, layer in enumerate(self.weights.layers):
            kinds = (linear_form(linear) for linear in layer.linears)
            stacked = layer.mixture and layer.mixture.experts
            experts = stacked and (stacked.kind, stacked.group, stacked.hosted)
            parts = (experts, layer.state is None, layer.qkv is None, layer.feeds)
            seen = (self.spec.windows[index], self._patterns[index])
            kind = (*seen, self.spec.rope_of(index).dim, *parts, *kinds)
            first.setdefault(kind, index)
        successors = (min(index + 1, len(self.weights.layers) - 1) for index in first.values())
        return sorted({*first.values(), *successors})

    def forward(self, inputs: ForwardInputs, kv: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """Hidden states of the sampled rows after the final norm: `[S, H]`, model dtype. Writes the KV cache."""
        layers, stream, adapters = self.weights.layers, self._stream, inputs.adapters
        residual = self._enter(inputs)
        hidden = stream.enter(residual, layers[0])
        slots = inputs.slot_mapping
        for index, layer in enumerate(layers):
            last = index == len(layers) - 1
            if inputs.taps is not None:
                inputs.taps.take(index, residual)
            heads = self._mix(index, hidden, inputs, kv[index])
            if last and (rows := inputs.logits_rows) is not None:
                hidden = _rows(hidden, rows) if self.spec.parallel or heads is None else hidden
                heads = None if heads is None else heads.index_select(0, rows)
                residual = residual.index_select(0, rows)
                slots = slots.index_select(0, rows) if self.mixture is not None else slots
                adapters = adapters and adapters.beyond_attention
            update, beside = self._beyond_attention(index, heads, hidden, residual, slots, adapters)
            if not last:
                if inputs.images is not None and index < len(inputs.images.deeper):
                    residual.index_add_(0, inputs.images.rows, inputs.images.deeper[index])
                hidden = stream.to_next(update, residual, layer, layers[index + 1], beside)
        return self._leave(update, residual, beside)

    def _beyond_attention(
        self,
        index: int,
        heads: Tensor | None,
        hidden: Tensor | Quantized,
        residual: Tensor,
        slots: Tensor,
        adapters: AdapterInputs | None,
    ) -> tuple[Tensor, Tensor | None]:
        """What layer `index` adds to the stream last, of what its heads gave and what it read, and what beside it."""
        layer, stream = self.weights.layers[index], self._stream
        beside: Tensor | None = None
        if heads is not None and layer.output is not None:
            name = f"layers.{index}.{'output' if layer.state is None else 'state_out'}"
            update = self._adapted(heads, layer.output, layer.output_bias, name, adapters)
            update = self._whole(update)
            if self.spec.parallel:
                beside, hidden = update, stream.beside(residual, layer, hidden)
            elif layer.feeds:
                hidden = stream.to_ffn(update, residual, layer)
        if layer.feeds:
            update = self._whole(self._feed(index, hidden, slots, adapters))
        return update, beside

    def logits(self, hidden: Tensor, out: Tensor | None = None, adapters: AdapterInputs | None = None) -> Tensor:
        """`[S, H]` → `[S, V]` in the model's dtype; `out` is written and returned where it is given.

        `adapters` are those of the rows of `hidden`, planned in `rows`.
        """
        logits = self._scores(hidden, out, adapters)
        return logits if self._unused is None else logits.index_fill_(1, self._unused, -math.inf)

    def own_logits(self, hidden: Tensor, out: Tensor, adapters: AdapterInputs | None = None) -> Tensor:
        """What this rank has of the logits of `[S, H]` by itself, in memory of `out [S, V]`: of one rank all."""
        return self.logits(hidden, out, adapters)

    @property
    def rotary_table(self) -> Tensor:
        """That of the first layer, `[positions, D]` fp32."""
        return self._cos_sin[0]

    def _scores(self, hidden: Tensor, out: Tensor | None, adapters: AdapterInputs | None) -> Tensor:
        """`logits` of all tokens, of those too that are never written."""
        spec = self.spec
        head, bias = self.weights.head, self.weights.head_bias
        if adapters is None:
            logits = linear(hidden, head, bias=bias, out=out)
        else:
            logits = adapters.beyond_attention.linear(hidden, head, bias, "head", out)
        if spec.logit_scale != 1.0 or spec.logit_softcap:
            logits = scale_and_cap(logits, spec.logit_scale, spec.logit_softcap, out=logits)
        return logits

    def _enter(self, inputs: ForwardInputs) -> Tensor:
        """The residual stream `[T, H]` before the first layer."""
        stream = self._embedded(inputs)
        if inputs.images is not None:
            stream.index_copy_(0, inputs.images.rows, inputs.images.states)
        if self.weights.embed_norm is None:
            return stream
        return layer_norm(stream, self.weights.embed_norm, self.weights.embed_norm_bias, self.spec.eps)

    def token_rows(self, ids: Tensor) -> Tensor:
        """The rows of the embedding of `ids` `[T]`, as they are: `[T, H]`."""
        table = self.weights.embed
        return block_rows(ids, table, self.dtype) if isinstance(table, BlockWeight) else embed(ids, table)

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        """Tokens' rows of the embedding, at their positions where these are learned, and what adapters add."""
        placed, table = self.weights.positions, self.weights.embed
        if isinstance(table, BlockWeight):
            stream = block_rows(inputs.ids, table, self.dtype)
        else:
            positions = None if placed is None else inputs.positions
            scale = self._embedding_multiplier
            stream = embed(inputs.ids, table, scale=scale, positions=positions, position_table=placed)
        if inputs.adapters is not None:
            inputs.adapters.add_embedding(stream, inputs.ids)
        return stream

    def _whole(self, part: Tensor) -> Tensor:
        """What the stream is given, of a layer's part of heads or units: with one rank the part is the whole."""
        return part

    def _of_all(self, means: Tensor, sharing: int) -> Tensor:
        """Mean squares `[T, spans]` fp32 of a part → of all parts, with `sharing` ranks; one rank has the whole."""
        return means

    def _norm_together(self, qkv: Tensor, weights: tuple[Tensor, Tensor]) -> None:
        """Norm all query heads of `qkv` together, in place, and so all key heads."""
        rms_norm_columns(qkv, weights, self.spec.eps)

    def _leave(self, update: Tensor, residual: Tensor, beside: Tensor | None) -> Tensor:
        """What comes of the last layer: hidden states after the final norm."""
        return self._stream.leave(update, residual, self.weights.layers[-1], self.weights, beside)

    def _linear(
        self, x: Tensor | Quantized, weight: AnyWeight, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        return linear(x, weight, bias=bias, out=self._room(x, weight) if out is None else out)

    def _room(self, x: Tensor | Quantized, weight: AnyWeight) -> Tensor | None:
        """The place of a product with a quantized input, which has lost the model's dtype; else None."""
        if not isinstance(x, Quantized):
            return None
        return torch.empty((x.data.shape[0], weight.out_features), dtype=self.dtype, device=x.data.device)

    def _mix(
        self, index: int, hidden: Tensor | Quantized, inputs: ForwardInputs, kept: tuple[Tensor, ...]
    ) -> Tensor | None:
        """`[T, H]` → the heads' outputs side by side, before the output projection; None where nothing mixes tokens."""
        layer = self.weights.layers[index]
        if layer.qkv is None:
            return None
        state, adapters = layer.state, inputs.adapters
        name = f"layers.{index}.{'qkv' if state is None else 'state_in'}"
        projected = self._adapted(hidden, layer.qkv, layer.qkv_bias, name, adapters)
        if state is not None:
            gates = None
            if state.gates is not None:
                gates = self._adapted(hidden, state.gates, None, f"layers.{index}.state_gates", adapters)
            return pass_states(self.spec, state, projected, gates, inputs, kept, self._of_all)
        return self._attend(index, projected, inputs, kept)

    def _attend(self, index: int, qkv: Tensor, inputs: ForwardInputs, cache: tuple[Tensor, ...]) -> Tensor:
        """What was projected, `[T, qkv]` → the heads' outputs side by side `[T, Hq·D]`."""
        spec = self.spec
        layer = self.weights.layers[index]
        if layer.latent is not None:
            table, (scale, _) = self._cos_sin[index], self._cache_scales(index, cache[0])
            return attend_latents(spec, layer.latent, qkv, inputs, cache[0], table, self._linear, scale)
        gate = None
        if spec.attention_gate:
            qkv, gate = qkv.split((spec.q_size + 2 * spec.kv_size, spec.q_size), dim=1)
        k_cache, v_cache = cache
        pages = inputs.of_layer(index)
        k_scale, v_scale = self._cache_scales(index, k_cache)
        q_norm, k_norm = self._queries.norms(layer)
        if spec.qk_norm is QkNorm.WHOLE and q_norm is not None and k_norm is not None:
            self._norm_together(qkv, (q_norm, k_norm))
            q_norm = k_norm = None
        rotation = inputs.rotation
        positions = inputs.positions if rotation is None else rotation.positions
        table = self._cos_sin[index] if rotation is None or rotation.table is None else rotation.table
        query = qk_norm_rope_kv_write(
            qkv,
            positions,
            pages.slot_mapping,
            table,
            k_cache,
            v_cache,
            num_q_heads=spec.heads,
            num_kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=spec.eps,
            centred=spec.qk_norm is QkNorm.LAYER,
            interleaved=spec.rope.interleaved,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        self._queries.finish(query, inputs.positions, layer)
        rare = Rare(layer.sinks, self._slopes, self._patterns[index])
        output = attend_pages(spec, index, query, (k_cache, v_cache), inputs, rare, (k_scale, v_scale))
        heads = output.view(output.shape[0], spec.q_size)
        return heads if gate is None else sigmoid_mul(heads, gate)

    def _cache_scales(self, index: int, cache: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What the keys and the values of layer `index` are multiplied by, `[Hkv]` each; only e4m3 has scales."""
        if cache.dtype != torch.float8_e4m3fn:
            return None, None
        if self.weights.kv_scales is None:
            return self._unit_scale, self._unit_scale
        k_scale, v_scale = self.weights.kv_scales[index]
        return k_scale, v_scale

    def _feed(self, index: int, hidden: Tensor | Quantized, slots: Tensor, adapters: AdapterInputs | None) -> Tensor:
        """`[T, H]` → `[T, H]`; `slots` tells padding, which goes to no expert."""
        layer = self.weights.layers[index]
        if layer.mixture is None or self.mixture is None:
            return self._dense(layer, hidden) if adapters is None else self._adapted_dense(index, hidden, adapters)
        assert isinstance(hidden, Tensor), "a router reads the model's dtype"
        shared = None
        if layer.gate_up is not None:
            dense = partial(self._dense, layer, hidden)
            shared = dense if adapters is None else partial(self._adapted_dense, index, hidden, adapters)
        return self.mixture.forward(index, layer.mixture, hidden, slots, shared)

    def _dense(self, layer: LayerWeights, hidden: Tensor | Quantized) -> Tensor:
        assert layer.down is not None, "a layer has experts or a feed-forward of its own"
        return self._linear(self._gated(layer, hidden), layer.down, layer.down_bias)

    def _gated(self, layer: LayerWeights, hidden: Tensor | Quantized) -> Tensor | Quantized:
        """What the second product of a feed-forward reads."""
        gate_up, down = layer.gate_up, layer.down
        assert gate_up is not None, "a layer has experts or a feed-forward of its own"
        assert down is not None, "a layer has experts or a feed-forward of its own"
        dense = gate_up.kind == down.kind == "dense" and isinstance(hidden, Tensor)
        into = activation_type(down)
        quantized = isinstance(hidden, Quantized) and hidden.data.dtype == into and self.dtype == torch.bfloat16
        one_op = self._activation.swiglu and layer.gate_up_bias is None
        if one_op and (dense or quantized) and isinstance(gate_up, LinearWeight | Int8Weight):
            return linear_silu_mul(hidden, gate_up)
        kinds = IntegerWeight | Fp4Weight | BlockWeight
        packed = gate_up if isinstance(gate_up, kinds) and into is None else None
        if one_op and packed is not None and isinstance(hidden, Tensor):
            return linear_silu_mul(hidden, packed)
        return self._activation(self._linear(hidden, gate_up, layer.gate_up_bias), into)

    def _adapted(
        self, x: Tensor | Quantized, weight: AnyWeight, bias: Tensor | None, name: str, adapters: AdapterInputs | None
    ) -> Tensor:
        """`_linear`, with what adapters change in the parameter `name`."""
        if adapters is None:
            return self._linear(x, weight, bias)
        return adapters.linear(x, weight, bias, name, self._room(x, weight))

    def _adapted_dense(self, index: int, hidden: Tensor | Quantized, adapters: AdapterInputs) -> Tensor:
        """`_dense` where adapters add to gate and up before the activation."""
        layer = self.weights.layers[index]
        prefix = f"layers.{index}." if layer.mixture is None else f"layers.{index}.shared_"
        name = f"{prefix}gate_up"
        gate_up, down = layer.gate_up, layer.down
        assert gate_up is not None, "a layer has experts or a feed-forward of its own"
        assert down is not None, "a layer has experts or a feed-forward of its own"
        into = activation_type(down)
        one_op = self._activation.swiglu and layer.gate_up_bias is None and into is None
        product: Tensor | Quantized | None = None
        if one_op and isinstance(hidden, Tensor):
            product = adapters.silu_mul(hidden, gate_up, name)
        if product is None:
            both = self._adapted(hidden, gate_up, layer.gate_up_bias, name, adapters)
            product = self._activation(both, into)
        return self._adapted(product, down, layer.down_bias, f"{prefix}down", adapters)


def _pattern(spec: ModelSpec, layer: int) -> BlockPattern | None:
    """Which blocks of keys a layer's queries see, unless all."""
    if (sparse := spec.sparse) is None or layer not in sparse.layers:
        return None
    return BlockPattern(sparse.block, sparse.local, sparse.stride, sparse.step, sparse.first_head)


def _rows(hidden: Tensor | Quantized, rows: Tensor) -> Tensor | Quantized:
    """Some tokens' rows of what a layer reads."""
    if isinstance(hidden, Quantized):
        return Quantized(hidden.data.index_select(0, rows), hidden.scale.index_select(0, rows))
    return hidden.index_select(0, rows)
