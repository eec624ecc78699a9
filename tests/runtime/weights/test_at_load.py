"""Weights quantized at load, by `--isq` or `--quantization`: how little is in 16 bits meanwhile, what ranks make of
their parts, and what is refused.
"""

from __future__ import annotations

import json
import logging
import math
import random
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stoker_kernels.block_gemm import decode_piece, encode_blocks
from stoker_kernels.integer_gemm import dequantize_integers
from stoker_kernels.launch import cc
from stoker_kernels.quant import AnyWeight, BlockWeight, IntegerWeight, LinearWeight, dequantize, quantize_weight
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine import head_start
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.build import build_model
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import places
from stoker_runtime.weights import layout
from stoker_runtime.weights.block_plan import plan_blocks
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
HIDDEN, FFN, LAYERS = 256, 768, 14
needs_compiler = pytest.mark.skipif(cc.refusal("cpu_blocks") is not None, reason=f"{cc.refusal('cpu_blocks')}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in bf16 of many equal layers, by names alone."""
    found = tmp_path_factory.mktemp("sixteen")
    linears = {
        "self_attn.q": (HIDDEN, HIDDEN), "self_attn.k": (HIDDEN, HIDDEN), "self_attn.v": (HIDDEN, HIDDEN),
        "self_attn.o": (HIDDEN, HIDDEN), "mlp.gate": (FFN, HIDDEN), "mlp.up": (FFN, HIDDEN), "mlp.down": (HIDDEN, FFN),
    }  # fmt: skip
    tensors = {"lm_head.weight": torch.randn(70, HIDDEN), "model.embed_tokens.weight": torch.randn(70, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}{name}_proj.weight": 0.05 * torch.randn(shape) for name, shape in linears.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN)
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, found / "model.safetensors")
    settings = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 70,
        "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": 2,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    }  # fmt: skip
    (found / "config.json").write_text(json.dumps(settings))
    return found


class Sixteen(TorchDispatchMode):
    """Counts the bytes of bf16 matrices that are alive, those within the arena apart."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and made.dtype == torch.bfloat16 and made.dim() == 2:
            self.alive += made.nbytes
            self.most = max(self.most, self.alive)
            weakref.finalize(made, self._gone, made.nbytes)
        return made

    def _gone(self, nbytes: int) -> None:
        self.alive -= nbytes


def spec_for(folder: Path, kind: str, resting: str = "cpu") -> ModelSpec:
    """The spec of weights that become `kind` at load, on a device of type `resting`."""
    source = read_source(str(folder))
    return plan_blocks(build_spec(source), source, kind, resting).spec


@pytest.mark.parametrize("kind", ["fp8", "w4", "q8_0", "q4k"])
def test_few_matrices_are_in_16_bits_at_any_time(kind: str, folder: Path) -> None:
    source, spec = read_source(str(folder)), spec_for(folder, kind, random.choice(["cpu", "cuda"]))
    with Sixteen() as count:
        load_weights(source, spec, CPU, torch.bfloat16, kind)
    largest = 2 * 2 * FFN * HIDDEN
    # A quarter of what stays, the matrix that exceeds it, and the one that is rounded.
    bound = spec.parameter_bytes("bfloat16", kind) // 4 + 2 * largest
    sixteen = build_spec(source).parameter_bytes("bfloat16")
    assert largest <= count.most <= bound < 0.45 * sixteen
    assert count.alive == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "w4", "q8_0", "q4k"])
def test_the_gpu_never_has_the_model_in_16_bits(kind: str, folder: Path) -> None:
    source, device, spec = read_source(str(folder)), torch.device("cuda"), spec_for(folder, kind, "cuda")
    stays, whole = spec.parameter_bytes("bfloat16", kind), build_spec(source).parameter_bytes("bfloat16")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    load_weights(source, spec, device, torch.bfloat16, kind)
    peak = torch.cuda.max_memory_allocated() - before
    # Beside two matrices in 16 bits one in fp32, its codes, and what is made on the way.
    assert peak <= stays + stays // 4 + (2 * 2 + 6 * 4) * 2 * FFN * HIDDEN
    assert peak < stays + whole


def test_a_large_matrix_is_rounded_as_it_is_in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = build_spec(read_source(str(folder)))
    whole = torch.randn(2 * FFN, HIDDEN)
    found = []
    for at_once in (1 << 24, 200 * HIDDEN):
        monkeypatch.setattr("stoker_runtime.weights.layout.ROUNDED_AT_ONCE", at_once)
        arena = WeightArena(spec, CPU, torch.float32, "w4")
        arena.quantize("layers.1.gate_up", whole)
        found.append(dequantize_integers(arena.integers["layers.1.gate_up"], torch.float32))
    assert torch.equal(*found)


def value(weight: AnyWeight | None) -> Tensor:
    if isinstance(weight, IntegerWeight):
        return dequantize_integers(weight, torch.float32)
    if isinstance(weight, BlockWeight):
        return torch.cat([decode_piece(piece) for piece in weight.pieces])
    assert isinstance(weight, LinearWeight)
    return dequantize(weight)


@pytest.mark.parametrize("resting", ["cpu", "cuda"])
@pytest.mark.parametrize(("kind", "name"), [("q8_0", "Q8_0"), ("q4k", "Q4_K")])
def test_blocks_are_made_of_each_matrix(kind: str, name: str, resting: str, folder: Path) -> None:
    source, spec = read_source(str(folder)), spec_for(folder, kind, resting)
    made = load_weights(source, spec, CPU, torch.float32, kind)
    plain = load_weights(source, build_spec(source), CPU, torch.float32)
    for mine, theirs in zip(made.layers, plain.layers, strict=True):
        for got, exact in ((mine.qkv, theirs.qkv), (mine.output, theirs.output), (mine.down, theirs.down)):
            assert isinstance(got, BlockWeight)
            assert got.in_planes == (resting == "cuda")
            blocks = encode_blocks(value(exact), name).numpy()
            expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name])
            assert torch.equal(value(got), torch.from_numpy(expected))
    # Both ends of the model keep their type.
    assert isinstance(made.embed, Tensor)
    assert made.head.kind == "dense"


def test_rows_that_fill_no_block_get_a_smaller_one_or_none_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    source = read_source("shape:qwen2.5-7b")
    odd = replace(build_spec(source), hidden=608, ffn=1000, num_layers=1, windows=(0,))
    with caplog.at_level(logging.INFO):
        plan = plan_blocks(odd, source, "q4k", "cuda")
        plan.announce("bfloat16")
    made = plan.spec
    assert {part.format for parts in made.blocks.values() for part in parts} == {"Q4_K", "Q8_0"}
    assert "layers.0.down" not in made.blocks
    assert "rows fill no blocks of 256 (Q4_K); in Q8_0: layers.0.qkv, layers.0.gate_up" in caplog.text
    assert "rows fill no blocks of 256 (Q4_K); in the model's type: layers.0.down" in caplog.text


@needs_compiler
@pytest.mark.parametrize("kind", ["q8_0", "q4k"])
def test_blocks_made_at_load_are_multiplied_in_either_layout(kind: str, folder: Path, paged_model: Any) -> None:
    in_blocks = paged_model(str(folder), quantization=kind)
    in_planes = paged_model(str(folder), quantization=kind, planes=True)
    for prompt in ([3], [random.randrange(70) for _ in range(40)]):
        in_blocks.forget(), in_planes.forget()
        ours, theirs = (model.step([(0, prompt)], all_logits=True)[0] for model in (in_blocks, in_planes))
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["fp8", "w4", "q8_0"])
def test_ranks_round_their_parts(kind: str, folder: Path) -> None:
    source = read_source(str(folder))
    spec = build_spec(source)
    whole = load_weights(source, spec_for(folder, kind), CPU, torch.float32, kind).layers[3]
    plain = load_weights(source, spec, CPU, torch.float32).layers[3]
    for place in places(2, 1):
        cut = Cut(spec, place)
        part = plan_blocks(cut.spec, source, kind, "cpu").spec
        mine = load_weights(source, part, CPU, torch.float32, kind, cut=cut).layers[3]
        rows = slice(place.tensor * FFN // 2, (place.tensor + 1) * FFN // 2)
        gate_up = torch.cat([each[rows] for each in value(whole.gate_up).chunk(2)])
        assert torch.equal(value(mine.gate_up), gate_up)
        down = value(whole.down)[:, rows]
        if kind != "fp8":
            assert torch.equal(value(mine.down), down)
        else:
            # The part's scale is by its own largest values.
            exact = value(plain.down)[:, rows]
            assert float((value(mine.down) - exact).norm()) <= 1.02 * float((down - exact).norm())


@pytest.mark.parametrize("kind", ["fp8", "w4", "q8_0", "q4k"])
def test_isq_is_quantization_without_a_head_start(kind: str, folder: Path) -> None:
    spec = build_spec(read_source(str(folder)))
    asked = EngineConfig(str(folder), isq=kind)
    assert resolve(asked.validate(), spec, "cpu").quantization == kind
    assert head_start.begin(asked) is None


def test_what_isq_cannot_make_is_refused_by_name(folder: Path) -> None:
    def refused(problem: str, **fields: Any) -> None:
        with pytest.raises(ConfigError, match=problem) as raised:
            build_model(EngineConfig(**{"model": str(folder), "device": "cpu", **fields}))
        assert raised.value.param == "isq"

    refused("isq is q8_0, but quantization is gguf; give one of them", isq="q8_0", quantization="gguf")
    refused("isq is w4, but quantization is fp8; give one of them", isq="w4", quantization="fp8")
    refused("isq is 'q5_1'; it must be one of none, fp8, w4, q8_0, q4k", isq="q5_1")
    experts = build_spec(read_source("shape:qwen3-30b-a3b"))
    with pytest.raises(ConfigError, match="isq is q4k, but experts are not multiplied in blocks"):
        resolve(EngineConfig("shape:qwen3-30b-a3b", isq="q4k"), experts, "cuda")
    assert resolve(EngineConfig("shape:qwen3-30b-a3b", isq="w4"), experts, "cuda").quantization == "w4"


@pytest.mark.parametrize("rows", [384, 200])
def test_random_weights_take_the_scales_of_their_kind(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape in FP8 with a scale a block is filled block by block, whatever rows are quantized at once."""
    width = 260
    data = torch.empty((rows, width), dtype=torch.float8_e4m3fn)
    scale = torch.full((-(-rows // 128), -(-width // 128)), math.nan)
    monkeypatch.setattr(layout, "QUANTIZED_AT_ONCE", width * 130)
    arena = object.__new__(layout.WeightArena)
    arena.quantized = {"matrix": LinearWeight(data, scale, "fp8_block")}
    whole = torch.randn(rows, width) * torch.linspace(0.01, 3.0, rows)[:, None]
    arena._quantize_fp8("matrix", whole)
    expected = quantize_weight(whole, "fp8_block")
    assert torch.equal(data.float(), expected.data.float())
    assert expected.scale is not None
    assert torch.equal(scale, expected.scale)
