"""The kernels of a model's ops: what runs each, for the log, and what this kind of GPU and `--batch-invariant` refuse.

Invariants: only ops that a step has used are named. What is not refused runs by ops that say of themselves that they
are batch-invariant (`kernels/stoker_kernels/launch/dispatch.py`); one that does not is an error at its first use.
Knows nothing of steps, nor of how an op keeps its promise.
"""

from __future__ import annotations

from typing import Protocol

import torch

from stoker_kernels.attention import attention_kernels
from stoker_kernels.gemm import shape_refusal
from stoker_kernels.launch import dispatch
from stoker_kernels.launch.aot_index import compiled_at_start
from stoker_kernels.launch.chip import LEAST_SM
from stoker_kernels.quant import FP8
from stoker_runtime.adapters.memory import AdapterMemory
from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.settings import Drafting
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.cuda_graphs import StepGraphs
from stoker_runtime.executor.drafts.model import Drafter
from stoker_runtime.kvcache.sight import Sight
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.encoders.spec import EncoderSpec
from stoker_runtime.models.parameter import Parameter, Role, stored_kind
from stoker_runtime.models.quantization.fp4_scheme import EXPERTS_KIND
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.layout import TORCH_DTYPES

PARAM = "batch_invariant"
# How weights may rest: what else there is, is multiplied by kernels that choose by the number of tokens.
KINDS = {
    "cuda": ("dense", "fp8_channel", "int8_channel", "int4", "int8"),
    "cpu": ("dense", "fp8_channel", "fp8_block", "int4", "int8"),
}
EXPERT_KINDS = {"dense": None, "fp8_channel": FP8, "fp8_block": FP8} | dict.fromkeys(
    (EXPERTS_KIND, "mxfp4", "nvfp4"), torch.uint8
)
"""Likewise of experts, with the type that their kernels are chosen by; None: the model's."""
OPS = ("linear", "linear_silu_mul", "rms_norm", "embed", "token_logprobs")
ATTENTION, LATENTS = ("paged_attention", "qk_norm_rope_kv_write"), ("latent_attention", "latent_rope_write")


def kernels_in_use(spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> dict[str, str]:
    """Op → implementation; of attention on a GPU the kernels that it stands for."""
    chosen = dispatch.chosen()
    if device.type == "cuda" and chosen.get("paged_attention") == "triton":
        group = spec.heads // spec.kv_heads
        chosen["paged_attention"] = attention_kernels(
            device, kv_dtype=kv_dtype, head_dim=spec.head_dim, group=group, softcap=spec.attention_softcap,
            slopes=bool(spec.slopes), patterns=spec.sparse is not None,
        )
    return chosen


class Described(Protocol):
    """What an executor is known by."""

    config: EngineConfig
    decoder: Decoder
    device: torch.device
    num_pages: int
    page_size: int
    host_pages: int
    sight: Sight | None
    drafting: Drafting | None
    drafter: Drafter | None
    adapters: AdapterMemory | None
    graphs: StepGraphs
    sees: bool
    start_seconds: dict[str, float]

    def kernels(self) -> dict[str, str]:
        """Op → implementation."""
        ...


def description(executor: Described) -> dict[str, str]:
    """What the start-up log and `/version` say of one rank."""
    config, device = executor.config, executor.device
    rare = {
        "output_head": config.quantize_head if config.quantize_head != "none" else "",
        "batch_invariant": "yes" if config.batch_invariant else "",
        "window": str(executor.sight.window) if executor.sight is not None else "",
        "images": "yes" if executor.sees else "",
        "speculation": str(executor.drafting or ""),
        "draft_model": str(executor.drafter.model) if executor.drafter is not None else "",
        "adapter_slots": str(executor.adapters.slots) if executor.adapters is not None else "",
    }
    return {
        "model": config.model,
        "architecture": executor.decoder.spec.architecture,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "quantization": config.quantization,
        "pages": str(executor.num_pages),
        "page_size": str(executor.page_size),
        "host_pages": str(executor.host_pages),
        **{name: value for name, value in rare.items() if value},
        "graphs": str(executor.graphs.captured),
        **{f"kernel.{op}": kernel for op, kernel in executor.kernels().items()},
        **{f"compiled.{kernel}": reason for kernel, reason in compiled_at_start().items()},
        **{f"seconds.{phase}": f"{seconds:.2f}" for phase, seconds in executor.start_seconds.items()},
    }


def refuse_kind(config: EngineConfig, spec: ModelSpec | EncoderSpec, device: torch.device) -> None:
    """Raises ConfigError for what nothing multiplies on this kind of GPU, with what to do instead, before any weight is
    read. `config` is resolved, and `--kernel` is applied.
    """
    if device.type != "cuda":
        return
    sm = dispatch.sm_of(device)
    if sm < LEAST_SM:
        raise ConfigError(
            f"this GPU is of sm_{sm}, and kernels are for sm_{LEAST_SM} (Turing) and newer; use another one, or "
            "--device cpu.",
            param="device",
        )
    dense = TORCH_DTYPES[config.dtype]
    reason = dispatch.refusal("linear", device, dense)
    if reason is not None:
        raise ConfigError(
            f"dtype is {config.dtype}, which this GPU does not multiply: {reason}. Leave --dtype out, or give it as "
            "float16.",
            param="dtype",
        )
    if isinstance(spec, EncoderSpec):
        return
    if spec.latent is not None:
        reason = dispatch.refusal("latent_attention", device, dense)
        if reason is not None:
            raise ConfigError(
                f"{spec.architecture} has latent attention, which this GPU does not compute: {reason}. It wants "
                "Ampere or newer.",
                param="model",
            )
    for each in spec.parameters():
        kind = stored_kind(each, config.quantization)
        op, dtype, newer = _multiplied_by(each, kind, dense)
        reason = dispatch.refusal(op, device, dtype) if op else None
        if reason is not None:
            asked = "isq" if config.isq != "none" else "quantization"
            raise ConfigError(
                f"{each.name} rests in {kind}, which this GPU does not multiply: {reason}. {newer}; on this one "
                f"serve weights in 16 bits, or in four, multiplied in {config.dtype} (AWQ, GPTQ, --{asked} w4).",
                param="model" if spec.checkpoint is not None and not spec.requantized else asked,
            )


def _multiplied_by(parameter: Parameter, kind: str, dense: torch.dtype) -> tuple[str, torch.dtype, str]:
    """(op, type, who has it) of what multiplies a parameter in 8 bits; "" for all others."""
    if kind in ("fp8_channel", "fp8_block"):
        op = "experts" if parameter.role is Role.EXPERTS else "linear"
        return op, FP8, "FP8 products want Ada, Hopper or newer"
    if kind == "int8_channel":
        return "int8_linear", dense, "INT8 products want Ampere or newer"
    return "", dense, ""


def refuse_settings(config: EngineConfig) -> None:
    """Raises ConfigError for settings that cannot go with `batch_invariant`."""
    if not config.batch_invariant:
        return
    clashes = (
        (config.enable_lora, "enable_lora", "a step with an adapter runs other kernels than one without"),
        (config.runner == "pooling", "runner pooling", "it serves models that generate"),
        (bool(config.kernels), "kernel", "it chooses the implementation of every op itself"),
        (config.tune, "tune", "its tiles are the same for any number of tokens"),
    )  # fmt: skip
    for given, name, why in clashes:
        if given:
            raise ConfigError(f"batch_invariant cannot go with {name}: {why}; leave one of them out.", param=PARAM)


def refuse_variant(config: EngineConfig, spec: ModelSpec, device: torch.device) -> None:
    """Raises ConfigError for a model, or a device, that has no batch-invariant kernels. `config` is resolved."""
    if not config.batch_invariant:
        return
    if spec.recurrent is not None:
        _refuse(f"layers with a state ({spec.architecture}) so far")
    dense = TORCH_DTYPES[config.dtype]
    needed = {(op, dense) for op in (*OPS, *(LATENTS if spec.latent is not None else ATTENTION))}
    for each in spec.parameters():
        kind = stored_kind(each, config.quantization)
        if each.role is Role.EXPERTS and kind in EXPERT_KINDS:
            needed |= {("route", dense), ("experts", EXPERT_KINDS[kind] or dense)}
            continue
        if kind not in KINDS[device.type] or each.role is Role.EXPERTS:
            _refuse(f"weights in {kind} ({each.name}) so far")
        _refuse_shape(spec, each, kind, device, dense)
        if kind in ("int4", "int8"):
            needed |= {("integer_linear", dense), ("integer_silu_mul", dense)}
        elif kind == "int8_channel":
            needed |= {("int8_product", dense), ("int8_silu_mul", dense)}
        elif kind != "dense":
            needed.add(("linear", FP8))
    demanded = dispatch.invariance_demanded()
    dispatch.demand_invariance(True)
    try:
        for op, dtype in sorted(needed, key=str):
            dispatch.require(device, dtype, (op,))
    except dispatch.KernelUnavailable as error:
        raise ConfigError(f"batch_invariant: {error}; leave --batch-invariant out.", param=PARAM) from error
    finally:
        dispatch.demand_invariance(demanded)


def _refuse_shape(spec: ModelSpec, parameter: Parameter, kind: str, device: torch.device, dense: torch.dtype) -> None:
    """Raises ConfigError for a matrix that a GPU multiplies in no batch-invariant way."""
    multiplied = parameter.role in (Role.LINEAR, Role.HEAD, Role.ROUTER)
    multiplied |= parameter.role is Role.EMBEDDING and spec.shares_table and parameter.name != "positions"
    if device.type != "cuda" or not multiplied or kind in ("int4", "int8"):
        return
    rows, columns = parameter.shape
    reason = shape_refusal(rows, columns, dense if kind == "dense" else FP8)
    if reason is not None:
        _refuse(f"{parameter.name} {list(parameter.shape)}: {reason}")


def _refuse(what: str) -> None:
    raise ConfigError(f"batch_invariant is not possible with {what}; leave --batch-invariant out.", param=PARAM)
