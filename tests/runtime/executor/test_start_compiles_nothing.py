"""What the engine launches is among what is compiled ahead of time, for published models of every served architecture.

The steps run on the host with every launch replaced by a record of what it would need on SM 9.0, so tensors have their
real types, strides and alignments and no values.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.runtime.executor.published_configs import AT_NEED, OTHERS, PUBLISHED

from stoker_kernels.attention import choose, sm90_decode, sm90_mixed, sm90_prefill
from stoker_kernels.gemm import adapted, gated
from stoker_kernels.int8_gemm import triton_int8
from stoker_kernels.latent_attention import sm90_latent, triton_launch
from stoker_kernels.launch import aot, at_need, dispatch, pdl
from stoker_kernels.launch.aot_index import Cubin, Index, Wanted, sm_folder
from stoker_kernels.launch.rehearsal import Missing
from stoker_kernels.launch.triton_kernel import PrecompiledKernel
from stoker_kernels.moe import operands, triton_experts
from stoker_kernels.pages import copy_pages
from stoker_kernels.quant import Int8Weight, LinearWeight, Quantized, quantize_fp8, quantize_int8_rows
from stoker_kernels.sampling import best_peak, part_peaks, token_logprobs
from stoker_kernels.slots import apply_updates
from stoker_runtime.adapters.memory import AdapterMemory
from stoker_runtime.adapters.step import AdapterStep
from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.arena import KV_TORCH_DTYPES, kv_arena
from stoker_runtime.executor.drafts.open import open_drafter
from stoker_runtime.executor.drafts.plan import DraftHead, DraftModel
from stoker_runtime.executor.executor import MAX_UPDATES
from stoker_runtime.executor.graphs.step_shape import ShapeTable, StepShape
from stoker_runtime.executor.page_swap import by_page
from stoker_runtime.executor.rehearsal import rehearse_steps
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.executor.states.memory import StateCopies
from stoker_runtime.executor.step import StepBody
from stoker_runtime.models import decoder as decoder_module
from stoker_runtime.models import inputs
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.architectures.heads import read_eagle3
from stoker_runtime.models.architectures.table import ARCHITECTURES
from stoker_runtime.models.config_source import ModelSource, SourceKind, read_source
from stoker_runtime.models.decoder import Decoder
from stoker_runtime.models.draft_heads.spec import HeadSpec
from stoker_runtime.models.layers import mixture as mixture_module
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.quantization.fp4_checkpoint import read_modelopt
from stoker_runtime.models.quantization.int8_checkpoint import Int8Checkpoint
from stoker_runtime.models.quantization.integer_checkpoint import read_gptq
from stoker_runtime.models.quantized_head import with_head
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.place import even_part
from stoker_runtime.request import SamplingParams
from stoker_runtime.sampling.modes import ADJUST, GREEDY, SAMPLE, TYPICAL
from stoker_runtime.step.batch import Batch, SlotAssign
from stoker_runtime.weights.layout import TORCH_DTYPES, WeightArena

SM = 90
PAGES = 64
NVFP4_GROUP = 16
# Each published model with each page size, and in turn each way to store weights and cache; those with other kinds of
# layers with one.
STORED = tuple(itertools.product(("none", "fp8"), ("auto", "fp8")))
CHOICES = [
    (model, page, *STORED[(row + column) % len(STORED)])
    for row, model in enumerate(PUBLISHED)
    for column, page in enumerate((16, 32, 64, 128))
    if model not in AT_NEED and (model not in OTHERS or column == row % 4)
]


class Recorder:
    """Notes what launches would need."""

    def __init__(self) -> None:
        self.wanted: dict[str, Wanted] = {}
        self.kernels: dict[str, PrecompiledKernel] = {}

    def run(self, kernel: PrecompiledKernel, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        wanted = kernel.wanted(kernel.kinds(args), kwargs)
        self.wanted[str((wanted.kernel, str(wanted)))] = wanted
        self.kernels[wanted.kernel] = kernel

    def take(self) -> dict[str, Wanted]:
        """What was noted since the last time."""
        noted, self.wanted = self.wanted, {}
        return noted


@pytest.fixture(scope="module")
def index() -> Index:
    """The index that `python -m stoker_kernels.launch.aot` would write."""
    return Index(sm_folder(aot.aot_folder(), SM), map(described, aot.variants(SM)))


def described(variant: aot.Variant) -> Cubin:
    """What the index would say of a variant."""
    return Cubin(
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


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """Pretends that host tensors lie on an H200, and records launches instead of making them."""
    recorder = Recorder()
    # What other tests of this process chose for a CPU.
    dispatch._selected.clear()
    monkeypatch.setattr(PrecompiledKernel, "run", lambda self, *args, **kwargs: recorder.run(self, *args, **kwargs))
    monkeypatch.setattr(dispatch, "interpreting", lambda: True)
    seen_by = ("launch.pdl", "launch.triton_fp8", "attention.choose", "attention.triton_launch",
               "block_gemm.plane_launch")  # fmt: skip
    for module in (*seen_by, "latent_attention.triton_launch"):
        monkeypatch.setattr(f"stoker_kernels.{module}.sm_of", lambda device: SM)
    monkeypatch.setattr(torch, "zeros", small_zeros)
    # cuBLAS's products of latents: nothing reads them here.
    monkeypatch.setattr(torch, "bmm", lambda a, b, *, out: out)
    monkeypatch.setattr(torch, "mm", lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
    monkeypatch.setattr(torch.Tensor, "index_select", lambda self, _, rows: self.new_empty(len(rows), *self.shape[1:]))
    monkeypatch.setattr("stoker_runtime.models.attention_plan.plan_attention", choose.plan_attention)
    monkeypatch.setattr("stoker_runtime.executor.prefix.steps.sm_of", lambda device: SM)
    monkeypatch.setattr(sm90_decode, "launch_streams", lambda *_, **__: None)
    monkeypatch.setattr(sm90_mixed, "launch_mixed", lambda *_, **__: None)
    monkeypatch.setattr(sm90_decode, "sm_count", lambda device: 132)
    monkeypatch.setattr(decoder_module, "linear", record_linear)
    monkeypatch.setattr(gated, "linear", record_linear)
    monkeypatch.setattr(adapted, "linear", record_linear)
    monkeypatch.setattr(inputs, "linear", record_linear)
    monkeypatch.setattr(mixture_module, "linear", record_linear)
    monkeypatch.setattr(operands, "sm_count", lambda device: 132)
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
    x: Any, weight: LinearWeight | Int8Weight, *, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """cuBLAS's way for FP8 ends in a kernel of ours; everything else is not Triton's."""
    from stoker_kernels.gemm import triton_fp8_scale

    if isinstance(weight, Int8Weight):
        return triton_int8.int8_linear(x, weight, bias=bias, out=out)
    quantized = quantize_fp8(x) if isinstance(x, torch.Tensor) and weight.kind != "dense" else x
    rows = quantized.shape[0] if isinstance(quantized, torch.Tensor) else quantized.data.shape[0]
    dtype = x.dtype if isinstance(x, torch.Tensor) else torch.bfloat16
    y = torch.empty((rows, weight.out_features), dtype=dtype) if out is None else out
    if weight.scale is not None:
        raw = y if y.dtype is torch.bfloat16 else torch.empty_like(y, dtype=torch.bfloat16)
        triton_fp8_scale.scale(raw, quantized.scale, weight.scale, bias, y)
    return y


def record_both(x: Any, weight: LinearWeight | Int8Weight) -> Any:
    """Gate, up and activation by two kernels, and what follows on one."""
    if isinstance(x, Quantized):
        quantize = quantize_int8_rows if isinstance(weight, Int8Weight) else quantize_fp8
        quantize(torch.empty(x.data.shape[0], weight.out_features // 2, dtype=torch.bfloat16))
    return gated.linear_silu_mul(x, weight)


def make_spec(model: str) -> ModelSpec:
    with pytest.MonkeyPatch.context() as patch:
        config, layers = PUBLISHED[model], {"num_hidden_layers": 2}
        text = {"text_config": config["text_config"] | layers} if "text_config" in config else {}
        patch.setitem(SHAPES, "traced", config | layers | text)
        return build_spec(read_source("shape:traced"))


def with_packed_experts(spec: ModelSpec, group: int) -> ModelSpec:
    """Of a checkpoint whose experts alone are in four bits: integers, in groups of so many columns, or NVFP4, of 16."""
    dense = frozenset(each.name for each in spec.parameters() if each.role is Role.LINEAR)
    asked = {"bits": 4, "group_size": group, "quant_algo": "NVFP4"}
    read = read_modelopt if group == NVFP4_GROUP else read_gptq
    return replace(spec, checkpoint=read("traced", asked), dense_parameters=dense)


def make_body(
    model: str, page: int, quantization: str, kv: str, head: str = "none", group: int = 0, gated: bool = True,
    integers: bool = False, **adapters: Any,
) -> tuple[StepBody, ShapeTable]:  # fmt: skip
    """`adapters` are settings of a server that serves some; `group` > 0: of experts in four bits, `gated` or not;
    `integers`: of a checkpoint in those of eight bits on both sides.
    """
    spec = with_head(make_spec(model), head)
    spec = spec if gated else replace(spec, gated=False, activation="relu2")
    spec = with_packed_experts(spec, group) if group else spec
    spec = replace(spec, checkpoint=Int8Checkpoint()) if integers else spec
    asked = EngineConfig(
        model="shape:traced", device="cuda", dtype=spec.dtype, page_size=page, quantization=quantization,
        quantize_head=head, kv_cache_dtype=kv, max_model_len=spec.max_position, disable_cascade_attn=False, **adapters,
    )  # fmt: skip
    config = resolve(asked, spec, "cuda")
    device, dtype = torch.device("cpu"), TORCH_DTYPES[config.dtype]
    weights = WeightArena(spec, device, dtype, quantization).assemble()
    decoder = Decoder(spec, weights, device, dtype, max_model_len=config.max_model_len)
    shape = (len(spec.attending), spec.caches, PAGES, spec.kv_heads, config.page_size, spec.head_dim)
    step = AdapterStep(config, AdapterMemory(config, spec, dtype, device), device) if adapters else None
    arena = torch.empty(shape, dtype=KV_TORCH_DTYPES[config.kv_cache_dtype])
    body = StepBody(config, decoder, arena, device, adapters=step)
    table = ShapeTable(config.max_num_seqs, config.max_num_batched_tokens, spec.parameter_bytes("bfloat16") // 2,
                       padded=True)
    return body, table


def choose_attention(body: StepBody, streams: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the CUDA kernels of attention take what they can, or nothing."""
    group = body.decoder.spec.heads // body.decoder.spec.kv_heads
    possible = streams and body.decoder.spec.head_dim == 128 and group <= sm90_decode.MAX_GROUP
    monkeypatch.setattr(sm90_decode, "available", lambda *_: possible)
    monkeypatch.setattr(sm90_mixed, "refusal", lambda *_: None)
    monkeypatch.setattr(sm90_prefill, "refusal", lambda _: "recorded as Triton's")
    if streams:
        monkeypatch.setattr(triton_launch, "latent_attention", sm90_latent.latent_attention)
        monkeypatch.setattr(sm90_latent, "launch_parts", lambda *_: None)
        monkeypatch.setattr(sm90_latent, "launch_context", lambda *_: None)
        monkeypatch.setattr(sm90_latent, "sm_count", lambda device: 132)


def run_everything(body: StepBody, table: ShapeTable) -> None:
    """Each kind of step that the executor takes, and what it does between steps."""
    for shape in table.planned((GREEDY,)):
        body(shape)
        if body.sharing.space is not None and shape.prefills == 0 and shape.rows > 1:
            body(replace(shape, shared=True))
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
    attending = body.decoder.spec.attending
    layers, keys = len(attending), body.kv[attending[0]][0]
    arena = by_page(torch.empty((layers, body.decoder.spec.caches, *keys.shape), dtype=keys.dtype))
    lane = torch.empty((3, *arena.shape[1:]), dtype=arena.dtype)
    pairs = torch.zeros((4, 2), dtype=torch.int32)
    for source, target in ((arena, arena), (arena, lane), (lane, arena)):
        for at in range(4):
            copy_pages(source, target, pairs[at:])
    updates = torch.full((MAX_UPDATES, 3), -1, dtype=torch.int32)
    for rows in (1, 3, 16):
        apply_updates(updates[:rows], body.slots.page_table, body.slots.position, body.slots.last_token)
        logits = torch.empty((rows, body.decoder.spec.vocab), dtype=body.decoder.dtype)
        for top in (0, 1, 5, 16):
            token_logprobs(logits, body.ring[:rows], top)
            token_logprobs(logits, body.ring[1 : 1 + rows], top)


@pytest.mark.matrix("model", "streams")
@pytest.mark.parametrize("streams", [False, True], ids=["triton-attention", "cuda-attention"])
@pytest.mark.parametrize(("model", "page", "quantization", "kv"), CHOICES)
def test_every_launch_has_a_precompiled_variant(
    model: str,
    page: int,
    quantization: str,
    kv: str,
    streams: bool,
    recorder: Recorder,
    index: Index,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    body, table = make_body(model, page, quantization, kv)
    choose_attention(body, streams, monkeypatch)
    run_everything(body, table)
    launched = recorder.wanted.values()
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    assert len(recorder.wanted) > 12  # how many differ by alignment as well, which is the allocator's
    assert not missing, "\n".join(sorted(missing))


def test_every_architecture_has_a_published_model() -> None:
    asked = {config["architectures"][0] for config in PUBLISHED.values()}
    # One is another's under its name in transformers; of the other none is published but for tests.
    assert set(ARCHITECTURES) - asked == {
        "MptForCausalLM", "GraniteMoeSharedForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
    }  # fmt: skip


@pytest.mark.parametrize(("model", "quantization"), [("Danube3-4B", "none"), ("Falcon3-1B", "fp8")])
def test_a_head_in_8_bits_is_precompiled_too(model: str, quantization: str, recorder: Recorder, index: Index) -> None:
    body, table = make_body(model, 64, quantization, "auto", head="fp8")
    assert body.decoder.weights.head.kind == "fp8_channel"
    run_everything(body, table)
    launched = recorder.wanted.values()
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    assert {"quantize_fp8_kernel", "scale_kernel"} <= {wanted.kernel.rpartition(".")[2] for wanted in launched}
    assert not missing, "\n".join(sorted(missing))


@pytest.mark.parametrize("model", ["Danube3-4B", "Falcon3-1B", "Llama-2-7B", "OpenHermes-2.5-7B", "TinyLlama-1.1B"])
def test_integers_on_both_sides_are_precompiled_too(model: str, recorder: Recorder, index: Index) -> None:
    asked: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 16}
    body, table = make_body(model, 64, "compressed-tensors", "auto", integers=True, **asked)
    run_everything(body, table)
    for decodes, prefills, tokens in ((0, 1, 8192), (3, 1, 4099), (1000, 1, 1)):
        body(StepShape(decodes, prefills, tokens, GREEDY, adapters=True))
    launched = recorder.wanted.values()
    into = [wanted for wanted in launched if "*i8" in str(wanted)]
    names = {wanted.kernel.rpartition(".")[2] for wanted in into}
    assert {"int8_linear_kernel", "quantize_int8_kernel", "rms_norm_kernel", "lora_shrink_kernel"} <= names
    assert {"act_quant_kernel", "act_scaled_kernel"} <= names
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    assert not missing, "\n".join(sorted(missing))


@pytest.mark.parametrize("integers", [False, True], ids=["fp8", "int8"])
@pytest.mark.parametrize(
    "model", ["BLOOM-7B1", "Falcon-40B", "GPT-2", "Gemma-2-27B", "Gemma-3-1B", "Minitron-4B", "Nemotron-H-8B", "Phi-2",
              "Phi-3-small", "Pythia-1.4B", "StarCoder2-7B"],
)  # fmt: skip
def test_other_activations_than_swiglu_quantize_at_once(
    model: str, integers: bool, recorder: Recorder, index: Index
) -> None:
    """Where down reads eight bits: no quantization of what an activation gave is a launch of its own."""
    body, table = make_body(model, 64, "compressed-tensors" if integers else "fp8", "auto", integers=integers)
    run_everything(body, table)
    launched = recorder.wanted.values()
    names = {wanted.kernel.rpartition(".")[2] for wanted in launched}
    assert "act_quant_kernel" in names
    assert not names & {"act_and_mul_kernel", "act_kernel", "clamped_gelu_kernel"}
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    assert not missing, "\n".join(sorted(missing))


@pytest.mark.parametrize(
    ("model", "quantization", "group", "gated"),
    [
        ("Qwen3-30B-A3B", "gptq", 32, True),
        ("Mixtral-8x7B", "gptq", 128, True),
        ("Qwen3-30B-A3B", "gptq", 64, True),
        ("Qwen3-30B-A3B", "modelopt", NVFP4_GROUP, True),
        ("Mixtral-8x7B", "modelopt", NVFP4_GROUP, False),
        ("Qwen3-30B-A3B", "none", 0, False),
        ("Mixtral-8x7B", "fp8", 0, False),
    ],
)
def test_experts_of_other_kinds_are_precompiled_too(
    model: str, quantization: str, group: int, gated: bool, recorder: Recorder, index: Index
) -> None:
    body, table = make_body(model, 64, quantization, "auto", group=group, gated=gated)
    mixture = body.decoder.weights.layers[0].mixture
    assert mixture is not None
    assert mixture.experts.gated == gated
    kind = triton_experts.KINDS[mixture.experts.kind]
    assert (kind >= triton_experts.MXFP4) == (group > 0)
    run_everything(body, table)
    launched = [wanted for wanted in recorder.wanted.values() if wanted.constants.get("KIND") == kind]
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    # Of gate-up and down, by tokens a tile.
    assert len(launched) > 8
    assert not missing, "\n".join(sorted(missing))


@pytest.mark.parametrize(
    ("model", "quantization", "slots", "rank"),
    [("Danube3-4B", "none", 3, 16), ("Llama-2-7B", "fp8", 9, 24), ("TinyLlama-1.1B", "none", 40, 5)],
)
def test_steps_with_adapters_have_precompiled_variants(
    model: str, quantization: str, slots: int, rank: int, recorder: Recorder, index: Index
) -> None:
    asked: dict[str, Any] = {"enable_lora": True, "max_loras": slots, "max_lora_rank": rank}
    asked["lora_embeddings"] = quantization == "none"
    body, table = make_body(model, 64, quantization, "auto", **asked)
    assert body.adapters is not None
    recorder.take()
    for shape in table.planned((GREEDY,), adapters=True):
        body(shape)
    for decodes, prefills, tokens in ((0, 1, 8192), (3, 1, 4099), (1000, 1, 1)):
        body(StepShape(decodes, prefills, tokens, GREEDY, adapters=True))
    body.mixed(StepShape(1, 2, 300, GREEDY, adapters=True), 200, torch.arange(5))
    launched = recorder.take().values()
    names = {wanted.kernel.partition(".")[2] for wanted in launched}
    assert {"gather_adapters_kernel", "group_tokens_kernel", "lora_shrink_kernel", "lora_expand_kernel"} <= names
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    assert not missing, "\n".join(sorted(missing))


@pytest.mark.parametrize("streams", [False, True], ids=["triton-attention", "cuda-attention"])
@pytest.mark.parametrize(
    ("model", "page", "kv"),
    [("Llama-2-7B", 16, "auto"), ("TinyLlama-1.1B", 128, "fp8"), ("Danube3-4B", 32, "fp8"), ("Falcon3-1B", 64, "auto")],
)
def test_steps_with_a_shared_prefix_have_precompiled_variants(
    model: str, page: int, kv: str, streams: bool, recorder: Recorder, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    body, table = make_body(model, page, "none", kv)
    choose_attention(body, streams, monkeypatch)
    recorder.take()
    for rows in (2, 7, 33, 250, 1000):
        for mode in (GREEDY, SAMPLE):
            body(table.decode(rows, mode, shared=True))
    launched = recorder.take().values()
    names = {wanted.kernel.partition(".")[2] for wanted in launched}
    assert {"cut_prefix_kernel", "shared_prefix_kernel"} <= names
    own = [wanted.constants["BEFORE"] for wanted in launched if wanted.kernel.endswith(".decode_kernel")]
    assert all(own)
    assert streams or own
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    assert not missing, "\n".join(sorted(missing))


def head_beside(target: ModelSpec) -> HeadSpec:
    """An EAGLE-3 head as wide as `target`, of a quarter of its tokens."""
    own = {"draft_vocab_size": target.vocab // 4, "eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    sizes = PUBLISHED["Llama-2-7B"] | {"num_hidden_layers": 1, "hidden_size": target.hidden} | own
    return read_eagle3(ModelSource("head", SourceKind.FOLDER, None, sizes), target, own_table=False)


@pytest.mark.parametrize(
    ("target", "draft"), [("Llama-2-7B", "TinyLlama-1.1B"), ("TinyLlama-1.1B", "Danube3-4B"), ("TinyLlama-1.1B", "")]
)
def test_passes_of_a_draft_model_have_precompiled_variants(
    target: str, draft: str, recorder: Recorder, index: Index
) -> None:
    asked = EngineConfig(
        model="shape:traced", device="cuda", dtype="bfloat16", page_size=64, max_model_len=2048,
        speculative_config='{"model": "shape:drafts", "num_speculative_tokens": 5}',
    )  # fmt: skip
    spec, device, source = make_spec(target), torch.device("cpu"), ModelSource("drafts", SourceKind.SHAPE, None, {})
    small = make_spec(draft) if draft else head_beside(spec)
    config = resolve(asked, spec, "cuda")
    weights, own = (WeightArena(each, device, torch.bfloat16, "none").assemble() for each in (spec, small))
    decoder = Decoder(spec, weights, device, torch.bfloat16, max_model_len=2048)
    model = DraftModel(source, small, config)
    if isinstance(small, HeadSpec):
        model = DraftHead(source, small, config, small, torch.arange(small.drafted) * 3)
    drafter = open_drafter(model, own, decoder, PAGES)
    body = StepBody(config, decoder, kv_arena(config, spec, PAGES, device), device, drafter=drafter)
    recorder.take()
    for rows, drafts, mode in ((1, 1, GREEDY), (1, 5, SAMPLE), (2, 3, ADJUST), (16, 5, GREEDY), (42, 5, GREEDY)):
        body(StepShape(rows, 0, 0, mode, drafts=drafts))
    for rows, tokens in ((1, 1), (1, 16), (3, 77), (40, 900), (1, 8192)):
        body.catch_up(StepShape(0, rows, tokens, GREEDY), -(-tokens // rows))
    launched = recorder.take().values()
    names = {wanted.kernel.partition(".")[2] for wanted in launched}
    assert {"describe_draft_kernel", "expand_drafts_kernel"} <= {name.lstrip("_") for name in names}, names
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    assert not missing, "\n".join(sorted(missing))


@pytest.mark.parametrize("model", ["Nemotron-H-8B", "Qwen3-Next-80B-A3B", "Granite-4.0-h-small", "Qwen3.5-9B"])
def test_tries_of_layers_with_a_state_have_precompiled_variants(model: str, recorder: Recorder, index: Index) -> None:
    asked = EngineConfig(
        model="shape:traced", device="cuda", dtype="bfloat16", page_size=64, max_model_len=2048, max_num_seqs=64,
        speculative_config='{"method": "ngram", "num_speculative_tokens": 3}', enable_lora=True,
    )  # fmt: skip
    spec, device = make_spec(model), torch.device("cpu")
    config = resolve(asked, spec, "cuda")
    decoder = Decoder(
        spec, WeightArena(spec, device, torch.bfloat16, "none").assemble(), device, torch.bfloat16, max_model_len=2048
    )
    step = AdapterStep(config, AdapterMemory(config, spec, torch.bfloat16, device), device)
    body = StepBody(config, decoder, kv_arena(config, spec, PAGES, device), device, adapters=step)
    recorder.take()
    for rows, drafts, mode in ((1, 1, GREEDY), (1, 3, SAMPLE), (2, 3, ADJUST), (16, 3, GREEDY), (64, 3, GREEDY)):
        body(StepShape(rows, 0, 0, mode, drafts=drafts))
        body(StepShape(rows, 0, 0, mode, adapters=True, drafts=drafts))
        body(StepShape(rows, 0, 0, mode, adapters=True))
    body(StepShape(3, 1, 4099, GREEDY, adapters=True))
    StateCopies(body.states).run(Batch(0, (), state_saves=((0, 64),), state_loads=((65, 3),)))
    launched = recorder.take().values()
    names = {wanted.kernel.partition(".")[2] for wanted in launched}
    kind = "delta" if "Qwen" in model else "mamba2"
    assert {"try_conv_kernel", f"try_{kind}_kernel", "settle_conv_kernel", f"settle_{kind}_kernel"} <= names
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    assert not missing, "\n".join(sorted(missing))


# Sizes that no list of published models has, and that nothing is compiled ahead for.
STRANGE = {
    "many queries a key": {"hidden_size": 2560, "num_attention_heads": 40, "num_key_value_heads": 1, "head_dim": 64},
    "wide heads": {"hidden_size": 1536, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 384},
    "partial rotation": {"hidden_size": 2048, "num_attention_heads": 16, "head_dim": 96, "partial_rotary_factor": 0.75},
    "wide rows": {"hidden_size": 20480, "num_attention_heads": 80, "num_key_value_heads": 10, "head_dim": 128},
}
ONLY_AT_NEED = (*STRANGE, *AT_NEED)


@pytest.mark.parametrize("streams", [False, True], ids=["triton-attention", "cuda-attention"])
@pytest.mark.parametrize("model", [*ONLY_AT_NEED, "Danube3-4B", "Falcon3-1B", "Llama-2-7B", "OpenHermes-2.5-7B"])
def test_what_a_rehearsal_finds_serves_every_step(
    model: str, streams: bool, recorder: Recorder, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels compiled for the launches of a rehearsal, and no others, fit whatever an engine launches later."""
    sizes = {"intermediate_size": 5120, "vocab_size": 50257} | STRANGE.get(model, {})
    if model in STRANGE:
        monkeypatch.setitem(PUBLISHED, model, PUBLISHED["TinyLlama-1.1B"] | sizes)
    body, table = make_body(model, 32, "none", "fp8" if model == "Falcon3-1B" else "auto")
    choose_attention(body, streams, monkeypatch)
    pages = by_page(torch.empty((2, 2, *body.kv[0][0].shape), dtype=body.kv[0][0].dtype))
    rehearse_steps(body, table, 8192, [pages], torch.full((MAX_UPDATES, 3), -1, dtype=torch.int32))
    rehearsed = recorder.take()
    absent = [wanted for wanted in rehearsed.values() if index.find(wanted) is None]
    assert bool(absent) == (model in ONLY_AT_NEED), "the test has to meet both kinds"
    compiled = [at_need.variant_of(Missing(recorder.kernels[each.kernel], each, SM, "")) for each in rehearsed.values()]
    ready = Index(index.folder, map(described, compiled))
    run_everything(body, table)
    launched = recorder.take().values()
    missing = [f"{wanted.kernel}: {ready.reason(wanted)}" for wanted in launched if ready.find(wanted) is None]
    assert not missing, "\n".join(sorted(missing))


@pytest.mark.parametrize("parts", [2, 4, 7])
@pytest.mark.parametrize("vocab", [151_936, 128_009])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_ranks_that_sample_together_compile_nothing(
    dtype: torch.dtype, vocab: int, parts: int, recorder: Recorder, index: Index
) -> None:
    """Their peaks are found by kernels that are compiled ahead, whichever part is whose."""
    for part in range(parts):
        columns = even_part(vocab, parts, part)
        for rows in (1, 5):
            best_peak(part_peaks(torch.empty((rows, len(columns)), dtype=dtype), columns.start, part, parts))
    launched = recorder.wanted.values()
    missing = [f"{wanted.kernel}: {index.reason(wanted)}" for wanted in launched if index.find(wanted) is None]
    names = {wanted.kernel.rpartition(".")[2] for wanted in launched}
    assert names == {"tile_max_kernel", "part_peak_kernel", "best_peak_kernel"}
    assert not missing, "\n".join(sorted(missing))
