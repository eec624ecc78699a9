"""The blocks of memory that a model's weights are given out of: on the device, and on the host for experts there.

Invariants: what is allocated is exactly `hosted_experts.device_bytes` and `hosted_bytes`, at once; what is given out
starts at a multiple of ALIGNMENT.
Knows nothing of how a parameter is laid out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.moe import ExpertWeights
from stoker_runtime.models.hosted_experts import device_bytes, hosted_bytes, staged_bytes
from stoker_runtime.models.parameter import Parameter, Role, aligned
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.cpu_order import in_large_pages
from stoker_runtime.weights.memory.host import host_memory


@dataclass
class Block:
    """Memory that is given out from its beginning on."""

    storage: Tensor
    used: int = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, num_bytes: int) -> Tensor:
        """A view of the next bytes."""
        view = self.storage[self.used : self.used + num_bytes].view(dtype).view(shape)
        self.used += aligned(num_bytes)
        return view


class WeightMemory:
    """All blocks of one model."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: str, quantization: str) -> None:
        """Allocate. Raises ConfigError where the host has not the memory."""
        size, staged, hosted = (
            count(spec, dtype, quantization) for count in (device_bytes, staged_bytes, hosted_bytes)
        )
        storage = in_large_pages(torch.empty(size, dtype=torch.uint8, device=device))
        self._stage = storage[size - staged :]
        self._device = Block(storage[: size - staged])
        self._host = Block(host_memory(hosted, device) if hosted else storage[:0])
        self._layers = {f"layers.{layer}" for layer in (spec.moe.hosted if spec.moe else ())}

    @property
    def num_bytes(self) -> int:
        """Of all weights, wherever they are."""
        return self._device.storage.numel() + self._host.storage.numel()

    @property
    def used(self) -> int:
        """What of it was given out."""
        return self._device.used + self._host.used

    def block_of(self, parameter: Parameter) -> Block:
        """What a parameter is given out of."""
        hosted = parameter.role is Role.EXPERTS and parameter.name.rpartition(".")[0] in self._layers
        return self._host if hosted else self._device

    def staged(self, weights: ExpertWeights) -> ExpertWeights | None:
        """The place on the device where experts that rest on the host are copied to, at the same distances from each
        other; None for those that do not.
        """
        if not weights.hosted:
            return None
        begin, end = weights.gate_up.data_ptr(), self._host.storage.data_ptr() + self._host.storage.numel()
        places: dict[str, Any] = {}
        for field in fields(ExpertWeights):
            value = getattr(weights, field.name)
            if isinstance(value, Tensor) and begin <= value.data_ptr() < end:
                at = value.data_ptr() - begin
                places[field.name] = self._stage[at : at + value.nbytes].view(value.dtype).view(value.shape)
        return replace(weights, hosted=False, **places)
