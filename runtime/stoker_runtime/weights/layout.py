"""Where weights rest: one allocation, and a view of it for every parameter of the spec.

Invariants: the arena is allocated once, at exactly `spec.parameter_bytes(dtype, quantization)` bytes; every view
starts at a multiple of ALIGNMENT; nothing is copied when `assemble` hands the views to the decoder.
Knows nothing of files and formats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stoker_kernels.quant import WEIGHT_KINDS, LinearWeight, scale_shape
from stoker_runtime.models.decoder_weights import DecoderWeights, LayerWeights
from stoker_runtime.models.spec import ModelSpec, Parameter, aligned, stored_kind

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class WeightArena:
    """One block of device memory with a view per parameter.

    Dense parameters are read and written through `dense[name]`; quantized ones through `quantized[name]`, which
    holds fp8 data `[N, K]` and fp32 scales: `[N, 1]`, or one for each 128×128 block.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, quantization: str) -> None:
        """Allocate. `quantization` is "none" or "fp8"."""
        self.spec = spec
        self.device = device
        self.dtype = dtype
        self.quantization = quantization
        self.dense: dict[str, Tensor] = {}
        self.quantized: dict[str, LinearWeight] = {}
        dtype_name = str(dtype).removeprefix("torch.")
        self._storage = torch.empty(spec.parameter_bytes(dtype_name, quantization), dtype=torch.uint8, device=device)
        self._used = 0
        for parameter in spec.parameters():
            self._place(parameter)

    @property
    def num_bytes(self) -> int:
        """Size of the block."""
        return self._storage.numel()

    def store(self, name: str, weight: LinearWeight) -> None:
        """Copy a quantized weight to its place."""
        place = self.quantized[name]
        if place.scale is None or weight.scale is None or weight.kind != place.kind:
            raise ValueError(f"{name} is stored as {place.kind}, not as {weight.kind}")
        place.data.copy_(weight.data)
        place.scale.copy_(weight.scale)

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int) -> Tensor:
        view = self._storage[self._used : self._used + num_bytes].view(dtype).view(shape)
        self._used += aligned(num_bytes)
        return view

    def _place(self, parameter: Parameter) -> None:
        kind = next(each for each in WEIGHT_KINDS if each == stored_kind(parameter, self.quantization))
        scales = scale_shape(kind, *parameter.shape) if kind != "dense" else None
        if scales is None:
            num_bytes = parameter.elements * self.dtype.itemsize
            self.dense[parameter.name] = self._take(parameter.shape, self.dtype, num_bytes)
            return
        data = self._take(parameter.shape, torch.float8_e4m3fn, parameter.elements)
        scale = self._take(scales, torch.float32, scales[0] * scales[1] * 4)
        self.quantized[parameter.name] = LinearWeight(data=data, scale=scale, kind=kind)

    def _linear(self, name: str) -> LinearWeight:
        if name in self.quantized:
            return self.quantized[name]
        return LinearWeight(data=self.dense[name], scale=None, kind="dense")

    def _layer(self, layer: int) -> LayerWeights:
        def name(field: str) -> str:
            return f"layers.{layer}.{field}"

        return LayerWeights(
            input_norm=self.dense[name("input_norm")],
            qkv=self._linear(name("qkv")),
            output=self._linear(name("output")),
            post_norm=self.dense[name("post_norm")],
            gate_up=self._linear(name("gate_up")),
            down=self._linear(name("down")),
            qkv_bias=self.dense.get(name("qkv_bias")),
            q_norm=self.dense.get(name("q_norm")),
            k_norm=self.dense.get(name("k_norm")),
            output_bias=self.dense.get(name("output_bias")),
            gate_up_bias=self.dense.get(name("gate_up_bias")),
            down_bias=self.dense.get(name("down_bias")),
        )

    def assemble(self) -> DecoderWeights:
        """The views as the decoder takes them."""
        return DecoderWeights(
            embed=self.dense["embed"],
            layers=tuple(self._layer(layer) for layer in range(self.spec.num_layers)),
            final_norm=self.dense["final_norm"],
            head=self._linear("embed" if self.spec.tie_embeddings else "head"),
        )
