"""The kernels of a model's ops: what runs each, for the log, and what `--batch-invariant` refuses.

Invariants: only ops that a step has used are named. What is not refused runs by ops that say of themselves that they
are batch-invariant (`kernels/stoker_kernels/launch/dispatch.py`); one that does not is an error at its first use.
Knows nothing of steps, nor of how an op keeps its promise.
"""

from __future__ import annotations

import torch

from stoker_kernels.attention import attention_kernels
from stoker_kernels.gemm import shape_refusal
from stoker_kernels.launch import dispatch
from stoker_kernels.quant import FP8
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.models.parameter import Role, stored_kind
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.layout import TORCH_DTYPES

PARAM = "batch_invariant"
# How weights may rest: what else there is, is multiplied by kernels that choose by the number of tokens.
KINDS = {"cuda": ("dense", "fp8_channel"), "cpu": ("dense", "fp8_channel", "fp8_block")}
OPS = ("linear", "linear_silu_mul", "paged_attention", "qk_norm_rope_kv_write", "rms_norm", "embed", "token_logprobs")


def kernels_in_use(spec: ModelSpec, device: torch.device, kv_dtype: torch.dtype) -> dict[str, str]:
    """Op → implementation; of attention on a GPU the kernels that it stands for."""
    chosen = dispatch.chosen()
    if device.type == "cuda" and chosen.get("paged_attention") == "triton":
        group = spec.heads // spec.kv_heads
        chosen["paged_attention"] = attention_kernels(
            device, kv_dtype=kv_dtype, head_dim=spec.head_dim, group=group, softcap=spec.attention_softcap
        )
    return chosen


def refuse_settings(config: EngineConfig) -> None:
    """Raises ConfigError for settings that cannot go with `batch_invariant`."""
    if not config.batch_invariant:
        return
    clashes = (
        (config.enable_lora, "enable_lora", "a step with an adapter runs other kernels than one without"),
        (config.ranks > 1, "tensor_parallel_size and pipeline_parallel_size above 1",
         "sums over ranks are taken in an order that depends on their size"),
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
    for given, what in ((spec.moe is not None, "mixtures of experts"), (spec.latent is not None, "latent attention")):
        if given:
            _refuse(f"{what} ({spec.architecture}) so far")
    dense = TORCH_DTYPES[config.dtype]
    for each in spec.parameters():
        kind = stored_kind(each, config.quantization)
        if kind not in KINDS[device.type]:
            _refuse(f"weights in {kind} ({each.name}) so far")
        multiplied = each.role in (Role.LINEAR, Role.HEAD) or (each.role is Role.EMBEDDING and spec.shares_table)
        if device.type == "cuda" and multiplied and each.name != "positions":
            rows, columns = each.shape
            reason = shape_refusal(rows, columns, dense if kind == "dense" else FP8)
            if reason is not None:
                _refuse(f"{each.name} {list(each.shape)}: {reason}")
    try:
        dispatch.require(device, dense, OPS)
        if config.quantization == "fp8" or config.quantize_head == "fp8":
            dispatch.require(device, FP8, ("linear",))
    except dispatch.KernelUnavailable as error:
        raise ConfigError(f"batch_invariant: {error}; leave --batch-invariant out.", param=PARAM) from error


def _refuse(what: str) -> None:
    raise ConfigError(f"batch_invariant is not possible with {what}; leave --batch-invariant out.", param=PARAM)
