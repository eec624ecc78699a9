"""What the engine launches is among what is compiled ahead of time, for every model shape that is promised.

The steps run on the host with every launch replaced by a record of what it would need on SM 9.0, so tensors have their
real types, strides and alignments and no values.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stoker_kernels.attention import choose, sm90_decode, sm90_mixed, sm90_prefill
from stoker_kernels.gemm import gated
from stoker_kernels.launch import aot, dispatch, pdl
from stoker_kernels.launch.aot_index import Cubin, Index, Wanted, sm_folder
from stoker_kernels.launch.triton_kernel import PrecompiledKernel
from stoker_kernels.pages import copy_pages
from stoker_kernels.quant import LinearWeight, Quantized, quantize_fp8
from stoker_kernels.sampling import token_logprobs
from stoker_kernels.slots import apply_updates
from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.executor import KV_TORCH_DTYPES, MAX_UPDATES
from stoker_runtime.executor.page_swap import by_page
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.executor.step import StepBody
from stoker_runtime.executor.step_shape import ShapeTable, StepShape
from stoker_runtime.models import decoder as decoder_module
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.request import SamplingParams
from stoker_runtime.sampling.sampler import ADJUST, GREEDY, SAMPLE, TYPICAL
from stoker_runtime.step.batch import SlotAssign
from stoker_runtime.weights.layout import WeightArena

SM = 90
PAGES = 64
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
MODELS = ("qwen2.5-7b", "qwen2.5-1.5b", "qwen3-0.6b", "llama-3.1-8b", "smollm2-135m")
CHOICES = [(model, quantization, kv) for model in MODELS for quantization in ("none", "fp8") for kv in ("auto", "fp8")]


class Recorder:
    """Notes what launches would need."""

    def __init__(self) -> None:
        self.wanted: dict[str, Wanted] = {}

    def run(self, kernel: PrecompiledKernel, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        wanted = kernel.wanted(kernel.kinds(args), kwargs)
        self.wanted[str((wanted.kernel, str(wanted)))] = wanted


@pytest.fixture(scope="module")
def index() -> Index:
    """The index that `python -m stoker_kernels.launch.aot` would write."""
    cubins = [
        Cubin(
            file=variant.name,
            kernel=variant.spec.kernel.identity,
            source=variant.spec.kernel.source,
            entry="",
            threads=0,
            shared=0,
            launch_pdl=True,
            arguments=variant.arguments,
            constants=variant.constants,
            options=variant.spec.options,
        )
        for variant in aot.variants(SM)
    ]
    return Index(sm_folder(aot.aot_folder(), SM), cubins)


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Pretends that host tensors lie on an H200, and records launches instead of making them."""
    recorder = Recorder()
    monkeypatch.setattr(PrecompiledKernel, "run", lambda self, *args, **kwargs: recorder.run(self, *args, **kwargs))
    monkeypatch.setattr(dispatch, "interpreting", lambda: True)
    for module in ("launch.pdl", "launch.triton_fp8", "attention.choose"):
        monkeypatch.setattr(f"stoker_kernels.{module}.sm_of", lambda device: SM)
    monkeypatch.setattr(torch, "zeros", small_zeros)
    monkeypatch.setattr(torch.Tensor, "index_select", lambda self, _, rows: self.new_empty(len(rows), *self.shape[1:]))
    monkeypatch.setattr("stoker_runtime.executor.step.plan_attention", choose.plan_attention)
    monkeypatch.setattr(sm90_decode, "launch_streams", lambda *_, **__: None)
    monkeypatch.setattr(sm90_mixed, "launch_mixed", lambda *_, **__: None)
    monkeypatch.setattr(sm90_decode, "sm_count", lambda device: 132)
    monkeypatch.setattr(decoder_module, "linear", record_linear)
    monkeypatch.setattr(gated, "linear", record_linear)
    monkeypatch.setattr(decoder_module, "linear_silu_mul", record_both)
    pdl.enable_pdl(True)
    yield recorder
    pdl.enable_pdl(False)
    dispatch._selected.clear()
    gc.collect()


def small_zeros(*size: Any, **options: Any) -> torch.Tensor:
    """Zeros where they are few: the large ones would be written, gigabytes of them, and nothing reads them here."""
    tensor = torch.empty(*size, **options)
    return tensor.zero_() if tensor.numel() < 1 << 20 else tensor


def record_linear(
    x: Any, weight: LinearWeight, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """cuBLAS's way for FP8 ends in a kernel of ours; everything else is not Triton's."""
    from stoker_kernels.gemm import triton_fp8_scale

    quantized = quantize_fp8(x) if isinstance(x, torch.Tensor) and weight.kind != "dense" else x
    rows = quantized.shape[0] if isinstance(quantized, torch.Tensor) else quantized.data.shape[0]
    y = torch.empty((rows, weight.out_features), dtype=torch.bfloat16) if out is None else out
    if weight.scale is not None:
        triton_fp8_scale.scale(y, quantized.scale, weight.scale, bias, y)
    return y


def record_both(x: Any, weight: LinearWeight) -> Any:
    """Gate, up and activation by two kernels, and what follows on one."""
    if isinstance(x, Quantized):
        quantize_fp8(torch.empty(x.data.shape[0], weight.out_features // 2, dtype=torch.bfloat16))
    return gated.linear_silu_mul(x, weight)


def make_spec(model: str) -> ModelSpec:
    shape = {**(SMOLLM2 if model.startswith("smollm2") else SHAPES[model]), "num_hidden_layers": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "traced", shape)
        return build_spec(read_source("shape:traced"))


def make_body(model: str, quantization: str, kv: str) -> tuple[StepBody, ShapeTable]:
    spec = make_spec(model)
    config = resolve(
        EngineConfig(model=f"shape:{model}", device="cuda", quantization=quantization, kv_cache_dtype=kv), spec, "cuda"
    )
    device = torch.device("cpu")
    weights = WeightArena(spec, device, torch.bfloat16, quantization).assemble()
    decoder = Decoder(spec, weights, device, torch.bfloat16, max_model_len=config.max_model_len)
    dtype = KV_TORCH_DTYPES[config.kv_cache_dtype]
    shape = (spec.num_layers, 2, PAGES, spec.kv_heads, config.page_size, spec.head_dim)
    body = StepBody(config, decoder, torch.empty(shape, dtype=dtype), device)
    table = ShapeTable(config.max_num_seqs, config.max_num_batched_tokens, spec.parameter_bytes("bfloat16") // 2,
                       padded=True)
    return body, table


def run_everything(body: StepBody, table: ShapeTable) -> None:
    """Each kind of step that the executor takes, and what it does between steps."""
    for shape in table.planned((GREEDY,)):
        body(shape)
    for mode in (SAMPLE, ADJUST):
        for shape in (StepShape(1, 0, 0, mode), StepShape(16, 0, 0, mode), StepShape(8, 8, 128, mode)):
            body(shape)
    for decodes, prefills, tokens in ((0, 1, 8192), (3, 1, 4099), (64, 5, 1000), (1000, 1, 1), (1, 1, 7191)):
        body(StepShape(decodes, prefills, tokens, GREEDY))
    extra = torch.arange(5)
    body.mixed(StepShape(1, 2, 300, GREEDY), 200, extra)
    params = SamplingParams(temperature=1.0, seed=1)
    body.sampler.assign([SlotAssign(slot, params, 1, (), (), 4) for slot in (0, 1)])
    body.sampler.assign([SlotAssign(0, SamplingParams(temperature=1.0, typical_p=0.5), 1, (), (), 4)])
    body(StepShape(4, 0, 0, TYPICAL))
    layers, (keys, _) = len(body.kv), body.kv[0]
    arena = by_page(torch.empty((layers, 2, *keys.shape), dtype=keys.dtype))
    lane = torch.empty((3, *arena.shape[1:]), dtype=arena.dtype)
    pairs = torch.zeros((4, 2), dtype=torch.int32)
    for source, target in ((arena, arena), (arena, lane), (lane, arena)):
        for at in range(4):
            copy_pages(source, target, pairs[at:])
    updates = torch.full((MAX_UPDATES, 3), -1, dtype=torch.int32)
    for rows in (1, 3, 16):
        apply_updates(updates[:rows], body.slots.page_table, body.slots.position, body.slots.last_token)
        logits = torch.empty((rows, body.decoder.spec.vocab), dtype=torch.bfloat16)
        for top in (0, 1, 5, 16):
            token_logprobs(logits, body.ring[:rows], top)
            token_logprobs(logits, body.ring[1 : 1 + rows], top)


@pytest.mark.parametrize("streams", [False, True], ids=["triton-attention", "cuda-attention"])
@pytest.mark.parametrize(("model", "quantization", "kv"), CHOICES)
def test_every_launch_has_a_precompiled_variant(
    model: str,
    quantization: str,
    kv: str,
    streams: bool,
    recorder: Recorder,
    index: Index,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body, table = make_body(model, quantization, kv)
    group = body.decoder.spec.heads // body.decoder.spec.kv_heads
    possible = streams and body.decoder.spec.head_dim == 128 and group <= sm90_decode.MAX_GROUP
    monkeypatch.setattr(sm90_decode, "available", lambda *_: possible)
    monkeypatch.setattr(sm90_mixed, "refusal", lambda *_: None)
    monkeypatch.setattr(sm90_prefill, "refusal", lambda _: "recorded as Triton's")
    run_everything(body, table)
    launched = recorder.wanted.values()
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    assert len(recorder.wanted) > 20
    assert not missing, "\n".join(sorted(missing))
