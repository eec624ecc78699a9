"""Where weights rest: one allocation, and a view of it for every parameter of the spec.

Invariants: the arena is allocated once, by `memory/blocks.py`; nothing is copied when `assemble` hands the views to the
decoder.
Knows nothing of files and formats.
"""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.block_gemm import block_rows, encode_blocks, store_planes
from stoker_kernels.fp4_gemm import best_layout as best_fp4_layout
from stoker_kernels.fp4_gemm import store_fp4
from stoker_kernels.integer_gemm import best_layout, store_integers
from stoker_kernels.moe import ExpertKind, ExpertWeights, quantize_mxfp4, quantize_nvfp4
from stoker_kernels.quant import (
    BLOCK,
    WEIGHT_KINDS,
    AnyWeight,
    BlockRows,
    BlockWeight,
    Fp4Weight,
    Int8Weight,
    IntegerWeight,
    LinearWeight,
    PlaneRows,
    place_planes,
    quantize_integers,
    quantize_weight,
    scale_shape,
)
from stoker_runtime.models.decoder_weights import (
    DecoderWeights,
    LatentWeights,
    LayerWeights,
    MixtureWeights,
    StateWeights,
)
from stoker_runtime.models.parameter import Parameter, Role, stored_kind, stored_scheme
from stoker_runtime.models.quantization.fp4_scheme import EXPERTS_KIND, Fp4Scheme
from stoker_runtime.models.quantization.integer_scheme import IntegerScheme
from stoker_runtime.models.quantization.schemes import is_packed
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.expert_places import ROUNDED_AT_ONCE, ExpertPlace, Fp4Experts, IntegerExperts
from stoker_runtime.weights.memory.blocks import WeightMemory
from stoker_runtime.weights.routing import piece_rows, tensors_of

# Values of a matrix that are quantized to FP8 together: in fp32 a GiB. Stacked experts are several times as large.
QUANTIZED_AT_ONCE = 1 << 28
# The projections of a layer with a state, by what they stand for.
STATE_LINEARS = (("qkv", "in"), ("output", "out"))
# What the rows of integers that are rounded together may be cut at.
ROW_BLOCK = 64
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightArena:
    """One block of device memory with a view per parameter.

    Dense parameters are read and written through `dense[name]`; quantized ones through `quantized[name]`, which
    holds fp8 or int8 data `[N, K]` and fp32 scales: `[N, 1]`, or one for each 128×128 block; or through
    `integers[name]`, `fp4[name]` or, as a GGUF file has them, `blocks[name]`. `experts[name]` are stacked experts in
    four bits.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, quantization: str) -> None:
        """Allocate. `quantization` is "none", "fp8" or "w4"; what shall be in blocks, the spec says."""
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.quantization = quantization
        self.dense: dict[str, Tensor] = {}
        self.quantized: dict[str, LinearWeight | Int8Weight] = {}
        self.integers: dict[str, IntegerWeight] = {}
        self.fp4: dict[str, Fp4Weight] = {}
        self.blocks: dict[str, BlockWeight] = {}
        self.experts: dict[str, ExpertPlace] = {}
        dtype_name = str(dtype).removeprefix("torch.")
        self._memory = WeightMemory(spec, device, dtype_name, quantization)
        for parameter in spec.parameters():
            self._take = self._memory.block_of(parameter).take
            self._place(parameter)

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return self._memory.num_bytes

    def quantize(self, name: str, whole: Tensor) -> None:
        """Quantize a 16- or 32-bit matrix [N, K] to its place."""
        if name in self.experts:
            self.experts[name].quantize(whole)
            return
        if name in self.fp4:
            self._quantize_fp4(name, whole)
            return
        if name in self.blocks:
            (piece,) = self.blocks[name].pieces
            rows = max(1, ROUNDED_AT_ONCE // whole.shape[1])
            for first in range(0, whole.shape[0], rows):
                self.store_blocks(name, first, encode_blocks(whole[first : first + rows], piece.format))
            return
        if name not in self.integers:
            self._quantize_fp8(name, whole)
            return
        place = self.integers[name]
        rows = max(1, ROUNDED_AT_ONCE // whole.shape[1] // ROW_BLOCK) * ROW_BLOCK
        for first in range(0, whole.shape[0], rows):
            codes, scale, zero = quantize_integers(whole[first : first + rows], place.bits, place.group)
            self.store_integers(name, first, codes, scale, zero)

    def table(self) -> Tensor:
        """The numbers of the embedding [V, H], in the model's type."""
        if "embed" not in self.blocks:
            return self.dense["embed"]
        ids = torch.arange(self.spec.vocab_rows, dtype=torch.int32, device=self.device)
        return block_rows(ids, self.blocks["embed"], self.dtype)

    def _quantize_fp4(self, name: str, whole: Tensor) -> None:
        factor = None
        if self.fp4[name].kind == "nvfp4":
            codes, scale, factor = quantize_nvfp4(whole)
        else:
            codes, scale = quantize_mxfp4(whole)
        self.store_fp4(name, 0, codes, scale.t(), factor)

    def _quantize_fp8(self, name: str, whole: Tensor) -> None:
        """Some rows at a time where each has scales of its own: stacked experts need not all be in fp32 at once."""
        place = self.quantized[name]
        if isinstance(place, Int8Weight):
            raise ValueError(f"{name} is stored in INT8, which is not made at load")
        assert place.scale is not None, "a weight in FP8 has a scale"
        # A scale a row, one for each rows of a block, or one for all.
        tall = -(-whole.shape[0] // place.scale.shape[0])
        tall = BLOCK if place.kind == "fp8_block" else tall
        rows = max(1, QUANTIZED_AT_ONCE // whole.shape[1] // tall) * tall
        for first in range(0, whole.shape[0], rows):
            made = quantize_weight(whole[first : first + rows], place.kind)
            assert made.scale is not None, "a weight in FP8 has a scale"
            place.data[first : first + rows].copy_(made.data)
            place.scale[first // tall : first // tall + len(made.scale)].copy_(made.scale)

    def store(self, name: str, weight: LinearWeight) -> None:
        """Copy a quantized weight to its place."""
        place = self.quantized[name]
        if place.scale is None or weight.scale is None or weight.kind != place.kind:
            raise ValueError(f"{name} is stored as {place.kind}, not as {weight.kind}")
        place.data.copy_(weight.data)
        place.scale.copy_(weight.scale)

    def store_integers(self, name: str, row: int, codes: Tensor, scale: Tensor, zero: Tensor | None) -> None:
        """Lay out rows from `row` on of an integer weight: uint8 codes [rows, K], scales and zero points [G, rows]."""
        store_integers(self.integers[name], row, codes, scale, zero)

    def store_blocks(self, name: str, row: int, data: Tensor) -> None:
        """Lay out rows from `row` on of a weight in GGUF's blocks: uint8 [rows, row bytes], of one format."""
        at = 0
        for piece in self.blocks[name].pieces:
            first, last = max(row, at), min(row + data.shape[0], at + piece.rows)
            part = data[first - row : max(first, last) - row]
            if isinstance(piece, PlaneRows):
                store_planes(piece, first - at, part)
            else:
                piece.data[first - at : max(first, last) - at].copy_(part)
            at += piece.rows

    def store_fp4(self, name: str, row: int, data: Tensor, scale: Tensor, factor: Tensor | None) -> None:
        """Lay out rows from `row` on of a weight in NVFP4 or MXFP4: codes uint8 [rows, K / 2], scales [G, rows], and
        the factor of these rows. Raises ValueError for scales that no kernel takes.
        """
        store_fp4(self.fp4[name], row, data, scale, factor)

    def _place(self, parameter: Parameter) -> None:
        stored = stored_kind(parameter, self.quantization)
        if stored == "blocks":
            self.blocks[parameter.name] = self._place_blocks(parameter)
            return
        if stored == EXPERTS_KIND or (is_packed(stored) and parameter.role is Role.EXPERTS):
            self.experts[parameter.name] = self._place_experts(parameter, stored)
            return
        if is_packed(stored):
            scheme = stored_scheme(parameter)
            if isinstance(scheme, Fp4Scheme):
                self.fp4[parameter.name] = self._place_fp4(parameter, scheme)
            else:
                self.integers[parameter.name] = self._place_integers(parameter, scheme)
            return
        if stored == "int8_channel":
            integers = self._take(parameter.shape, torch.int8, parameter.elements)
            channels = parameter.shape[0]
            scales_view = self._take((channels, 1), torch.float32, channels * 4)
            self.quantized[parameter.name] = Int8Weight(integers, scales_view)
            return
        kind = next(each for each in WEIGHT_KINDS if each == stored)
        scales = scale_shape(kind, *parameter.shape) if kind != "dense" else None
        if scales is None:
            dtype = TORCH_DTYPES[parameter.dtype] if parameter.dtype else self.dtype
            self.dense[parameter.name] = self._take(parameter.shape, dtype, parameter.elements * dtype.itemsize)
            return
        data = self._take(parameter.shape, torch.float8_e4m3fn, parameter.elements)
        scale = self._take(scales, torch.float32, scales[0] * scales[1] * 4)
        self.quantized[parameter.name] = LinearWeight(data=data, scale=scale, kind=kind)

    def _place_blocks(self, parameter: Parameter) -> BlockWeight:
        columns, parts = parameter.shape[1], parameter.blocks
        views = [(part, self._take((part.num_bytes,), torch.uint8, part.num_bytes)) for part in parts]
        if parts[0].planes:
            planes = (place_planes(part.format, part.rows, columns, view) for part, view in views)
            return BlockWeight(tuple(planes), columns)
        rows = (BlockRows(part.format, view.view(part.rows, -1)) for part, view in views)
        return BlockWeight(tuple(rows), columns)

    def _place_experts(self, parameter: Parameter, stored: str) -> ExpertPlace:
        assert self.spec.moe is not None, "experts are of a mixture"
        (n, k), count = parameter.shape, len(self.spec.moe.here)
        scheme = Fp4Scheme("mxfp4") if stored == EXPERTS_KIND else stored_scheme(parameter)
        if isinstance(scheme, Fp4Scheme):
            codes, scales, *factors = scheme.experts_sizes(n, k, self.dtype.itemsize)
            data = self._take((count, n // count, k // 2), torch.uint8, codes)
            scale = self._take((count, scales // (n * 8), n // count, 8), torch.uint8, scales)
            views = [self._take((count, n // count), torch.float32, size) for size in factors]
            return Fp4Experts(data, scale, *views)
        codes, scales = scheme.experts_sizes(n, k, self.dtype.itemsize)
        data = self._take((count, n // count, k * scheme.bits // 8), torch.uint8, codes)
        groups = -(-k // scheme.columns(k))
        settings = self._take((count, groups, n // count, 2), self.dtype, scales)
        return IntegerExperts(data, settings, scheme.group, scheme.bits)

    def _place_fp4(self, parameter: Parameter, scheme: Fp4Scheme) -> Fp4Weight:
        n, k = parameter.shape
        dtypes = {"data": torch.uint8, "scale": torch.uint8, "factor": torch.float32}
        found = {
            part: self._take(shape, dtypes[part], size)
            for (part, (shape, _)), size in zip(scheme.parts(n, k).items(), scheme.sizes(n, k, 1), strict=True)
        }
        factor = found["factor"].view(-1) if "factor" in found else None
        rows, gated = self._laid_out(parameter)
        layout = best_fp4_layout(rows, k, scheme.kind, self.dtype, self.device, gated=gated)
        return Fp4Weight(found["data"], found["scale"], factor, scheme.kind, layout)

    def _place_integers(self, parameter: Parameter, scheme: IntegerScheme) -> IntegerWeight:
        n, k = parameter.shape
        dtypes = {"data": torch.uint8, "scale": self.dtype, "zero": torch.uint8, "order": torch.int32}
        sizes = scheme.sizes(n, k, self.dtype.itemsize)
        found = {
            part: self._take(shape, dtypes[part], size)
            for (part, (shape, _)), size in zip(scheme.parts(n, k).items(), sizes, strict=True)
        }
        order = found["order"].view(-1) if "order" in found else None
        group = scheme.columns(k)
        rows, gated = self._laid_out(parameter)
        layout = best_layout(rows, k, scheme.bits, group, self.dtype, self.device, gated=gated)
        return IntegerWeight(found["data"], found["scale"], found.get("zero"), scheme.bits, group, order, layout)

    def _laid_out(self, parameter: Parameter) -> tuple[int, bool]:
        """What rows of a packed matrix are laid out together, and whether it is gate and up in turn: each piece of a
        merged one is laid out by itself.
        """
        field = parameter.name.rpartition(".")[2]
        two = field.endswith("gate_up")
        pieces = 2 if two else {"qkv": 2 if self.spec.latent else 3}.get(field, 1)
        if field in ("state_in", "state_gates"):
            pieces = tensors_of(self.spec, parameter.name)
        gated = two and self.spec.gated and self.spec.activation == "silu" and not self.spec.ffn_bias
        return parameter.shape[0] if gated else math.gcd(*piece_rows(self.spec, parameter, pieces)), gated

    def _linear(self, name: str) -> AnyWeight:
        if name in self.blocks:
            return self.blocks[name]
        if name in self.integers:
            return self.integers[name]
        if name in self.fp4:
            return self.fp4[name]
        if name in self.quantized:
            return self.quantized[name]
        return LinearWeight(data=self.dense[name], scale=None, kind="dense")

    def _layer(self, layer: int) -> LayerWeights:
        def name(field: str) -> str:
            return f"layers.{layer}.{field}"

        sparse = self.spec.is_sparse(layer)
        first, last = ("state_in", "state_out") if self._holds(name("state_in")) else ("qkv", "output")
        qkv, output = (self._linear(name(each)) if self._holds(name(each)) else None for each in (first, last))
        beside = ("shared_gate_up", "shared_down") if sparse else ("gate_up", "down")
        gate_up, down = (self._linear(name(field)) if self._holds(name(field)) else None for field in beside)
        mixture = self._mixture(layer) if sparse else None
        composed = ("mixture", "latent", "state")
        optional = (each.name for each in fields(LayerWeights) if each.default is None and each.name not in composed)
        others: dict[str, Any] = {field: self.dense.get(name(field)) for field in optional}
        if first == "state_in":
            others |= {f"{each}_bias": self.dense.get(name(f"state_{part}_bias")) for each, part in STATE_LINEARS}
            return LayerWeights(qkv, output, gate_up, down, mixture, None, self._state(layer), **others)
        latent = self._latent(layer) if self.spec.latent else None
        return LayerWeights(qkv, output, gate_up, down, mixture, latent, **others)

    def _state(self, layer: int) -> StateWeights:
        def name(field: str) -> str:
            return f"layers.{layer}.{field}"

        return StateWeights(
            conv=self.dense[name("conv")].flatten(1),
            a_log=self.dense[name("a_log")],
            dt_bias=self.dense[name("dt_bias")],
            norm=self.dense[name("state_norm")],
            conv_bias=self.dense.get(name("conv_bias")),
            skip=self.dense.get(name("skip")),
            gates=self._linear(name("state_gates")) if self._holds(name("state_gates")) else None,
        )

    def _latent(self, layer: int) -> LatentWeights:
        def name(field: str) -> str:
            return f"layers.{layer}.{field}"

        kv_b = self.dense[name("kv_b")]
        return LatentWeights(
            q_norm=self.dense.get(name("q_a_norm")),
            q_b=self._linear(name("q_b")) if self._holds(name("q_b")) else None,
            kv_norm=self.dense[name("kv_a_norm")],
            kv_b=kv_b.view(self.spec.heads, -1, kv_b.shape[1]),
        )

    def _holds(self, name: str) -> bool:
        return any(name in held for held in (self.dense, self.quantized, self.integers, self.fp4, self.blocks))

    def _mixture(self, layer: int) -> MixtureWeights:
        assert self.spec.moe is not None, "a sparse layer has a mixture"
        experts = len(self.spec.moe.here)

        def stack(field: str) -> tuple[Tensor, Tensor | None, ExpertKind, Tensor | None]:
            """Data [E, rows, columns], scales, their kind, and the bias [E, rows]."""
            name, bias = f"layers.{layer}.experts_{field}", self.dense.get(f"layers.{layer}.experts_{field}_bias")
            bias = None if bias is None else bias.view(experts, -1)
            if name in self.dense:
                return self.dense[name].view(experts, -1, self.dense[name].shape[1]), None, "dense", bias
            if name in self.experts:
                place = self.experts[name]
                return place.data, place.scale, place.kind, bias
            weight = self.quantized[name]
            assert weight.scale is not None, "a weight in FP8 has a scale"
            blocks = weight.kind == "fp8_block"
            scale = weight.scale.view(experts, -1, weight.scale.shape[1]) if blocks else weight.scale.view(experts, -1)
            data = weight.data.view(experts, -1, weight.in_features)
            if isinstance(weight, Int8Weight):
                return data, scale, "int8_channel", bias
            return data, scale, "fp8_block" if blocks else "fp8_channel", bias

        def dense(field: str) -> LinearWeight | None:
            data = self.dense.get(f"layers.{layer}.{field}")
            return None if data is None else LinearWeight(data)

        (up, up_scale, kind, up_bias), (down, down_scale, _, down_bias) = stack("gate_up"), stack("down")
        places = [self.experts.get(f"layers.{layer}.experts_{field}") for field in ("gate_up", "down")]
        up_factor, down_factor = (None if place is None else place.factor for place in places)
        group = places[1].group if places[1] else 0
        stacked = ExpertWeights(
            up, down, kind, up_scale, down_scale, up_bias, down_bias, group, up_factor, down_factor,
            hosted=layer in self.spec.moe.hosted,
        )  # fmt: skip
        return MixtureWeights(
            router=LinearWeight(self.dense[f"layers.{layer}.router"]),
            experts=stacked,
            router_bias=self.dense.get(f"layers.{layer}.router_bias"),
            correction_bias=self.dense.get(f"layers.{layer}.correction_bias"),
            shared_gate=dense("shared_gate"),
            staged=self._memory.staged(stacked),
        )

    def assemble(self) -> DecoderWeights:
        """The views as the decoder takes them."""
        # Of several ranks, those in the middle have neither end of the model.
        absent = torch.empty((0, self.spec.hidden), dtype=self.dtype, device=self.device)
        head = "embed" if self.spec.shares_table else "head"
        return DecoderWeights(
            embed=self.blocks["embed"] if "embed" in self.blocks else self.dense.get("embed", absent),
            layers=tuple(self._layer(layer) for layer in range(self.spec.num_layers)),
            final_norm=self.dense.get("final_norm", absent),
            head=self._linear(head) if self._holds(head) else LinearWeight(absent, None, "dense"),
            fuse=self._linear("fuse") if self._holds("fuse") else None,
            positions=self.dense.get("positions"),
            embed_norm=self.dense.get("embed_norm"),
            embed_norm_bias=self.dense.get("embed_norm_bias"),
            final_norm_bias=self.dense.get("final_norm_bias"),
            head_bias=self.dense.get("head_bias"),
        )
