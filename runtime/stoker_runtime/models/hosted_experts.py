"""Experts in host memory (`--cpu-offload-experts`): of which layers, and what that leaves on the device.

They are those of the last layers, whole layers of them, as many as the memory holds. Steps of few tokens read the
chosen ones where they are, over the device's link; for steps of many a layer's are copied to the device first, to a
place that all layers share.
Invariants: arithmetic without torch.
Knows nothing of how memory is allocated, nor of when experts are copied (`layers/staged.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.parameter import Role, stored_bytes
from stoker_runtime.models.spec import ModelSpec

GIB = 1024**3


def with_hosted(config: EngineConfig, spec: ModelSpec, free_memory: Callable[[], int]) -> ModelSpec:
    """`spec` with the layers whose experts rest in host memory, as a resolved `config` says, if it does.

    Raises ConfigError where there are no experts, no device beside the host, or not `free_memory()` bytes for them.
    """
    asked = config.cpu_offload_experts
    if not asked:
        return spec
    if config.device == "cpu":
        raise _refused(f"{asked:g}, but on a CPU all weights are in host memory; leave --cpu-offload-experts out")
    if spec.moe is None:
        raise _refused(f"{asked:g}, but {spec.architecture} has no experts; leave --cpu-offload-experts out")
    hosted, room, least = [], int(asked * GIB), 0
    for layer in sorted(spec.moe.layers, reverse=True):
        least = layer_bytes(spec, layer, config.dtype, config.quantization)
        if least > room:
            break
        hosted.append(layer)
        room -= least
    if least and not hosted:
        told = f"{asked:g} GiB, but the experts of a layer take {least / GIB:.3f}"
        raise _refused(f"{told}; raise --cpu-offload-experts to as much or more")
    needed, free = int(asked * GIB) - room, free_memory()
    if needed > free:
        told = f"{asked:g} GiB, of which experts take {needed / GIB:.2f}, but {free / GIB:.2f} of host memory are free"
        raise _refused(f"{told}; lower --cpu-offload-experts to {int(free / GIB * 10) / 10:g} or less")
    return replace(spec, moe=replace(spec.moe, hosted=frozenset(hosted)))


def layer_bytes(spec: ModelSpec, layer: int, dtype: str, quantization: str) -> int:
    """Bytes of a layer's experts, without their biases, as they are allocated."""
    experts = (each for each in spec.layer_parameters(layer) if each.role is Role.EXPERTS)
    return sum(stored_bytes(each, dtype, quantization) for each in experts)


def hosted_bytes(spec: ModelSpec, dtype: str, quantization: str) -> int:
    """Bytes of host memory that experts take."""
    return sum(_sizes(spec, dtype, quantization))


def staged_bytes(spec: ModelSpec, dtype: str, quantization: str) -> int:
    """Bytes of the place on the device that hosted experts are copied to: the largest layer's."""
    return max(_sizes(spec, dtype, quantization), default=0)


def device_bytes(spec: ModelSpec, dtype: str, quantization: str) -> int:
    """Bytes of the device that weights take, with that place."""
    hosted = hosted_bytes(spec, dtype, quantization)
    return spec.parameter_bytes(dtype, quantization) - hosted + staged_bytes(spec, dtype, quantization)


def _sizes(spec: ModelSpec, dtype: str, quantization: str) -> list[int]:
    return [layer_bytes(spec, layer, dtype, quantization) for layer in (spec.moe.hosted if spec.moe else ())]


def _refused(why: str) -> ConfigError:
    return ConfigError(f"cpu_offload_experts is {why}.", param="cpu_offload_experts")
