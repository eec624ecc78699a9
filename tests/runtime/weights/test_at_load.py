"""Weights quantized at load, by `--isq` or `--quantization`: how little is in 16 bits meanwhile, what ranks make of
their parts, and what is refused.
"""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stoker_kernels.integer_gemm import dequantize_integers
from stoker_kernels.quant import AnyWeight, IntegerWeight, LinearWeight, dequantize
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine import head_start
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.build import build_model
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import places
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
HIDDEN, FFN, LAYERS = 256, 768, 14


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


@pytest.mark.parametrize("kind", ["fp8", "w4"])
def test_few_matrices_are_in_16_bits_at_any_time(kind: str, folder: Path) -> None:
    source = read_source(str(folder))
    spec = build_spec(source)
    with Sixteen() as count:
        load_weights(source, spec, CPU, torch.bfloat16, kind)
    largest = 2 * 2 * FFN * HIDDEN
    # A quarter of what stays, the matrix that exceeds it, and the one that is rounded.
    bound = spec.parameter_bytes("bfloat16", kind) // 4 + 2 * largest
    assert largest <= count.most <= bound < 0.45 * spec.parameter_bytes("bfloat16")
    assert count.alive == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["fp8", "w4"])
def test_the_gpu_never_has_the_model_in_16_bits(kind: str, folder: Path) -> None:
    source, device = read_source(str(folder)), torch.device("cuda")
    spec = build_spec(source)
    stays, whole = spec.parameter_bytes("bfloat16", kind), spec.parameter_bytes("bfloat16")
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
    assert isinstance(weight, LinearWeight)
    return dequantize(weight)


@pytest.mark.parametrize("kind", ["fp8", "w4"])
def test_ranks_round_their_parts(kind: str, folder: Path) -> None:
    source = read_source(str(folder))
    spec = build_spec(source)
    whole = load_weights(source, spec, CPU, torch.float32, kind).layers[3]
    plain = load_weights(source, spec, CPU, torch.float32).layers[3]
    for place in places(2, 1):
        cut = Cut(spec, place)
        mine = load_weights(source, cut.spec, CPU, torch.float32, kind, cut=cut).layers[3]
        rows = slice(place.tensor * FFN // 2, (place.tensor + 1) * FFN // 2)
        gate_up = torch.cat([each[rows] for each in value(whole.gate_up).chunk(2)])
        assert torch.equal(value(mine.gate_up), gate_up)
        down = value(whole.down)[:, rows]
        if kind == "w4":
            assert torch.equal(value(mine.down), down)
        else:
            # The part's scale is by its own largest values.
            exact = value(plain.down)[:, rows]
            assert float((value(mine.down) - exact).norm()) <= 1.02 * float((down - exact).norm())


@pytest.mark.parametrize("kind", ["fp8", "w4"])
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

    refused("isq is q8_0, but blocks are multiplied as a .gguf file has them", isq="q8_0")
    refused("isq is q4k, but blocks", isq="q4k")
    refused("isq is w4, but quantization is fp8; give one of them", isq="w4", quantization="fp8")
    refused("isq is 'q5_1'; it must be one of none, fp8, w4, q8_0, q4k", isq="q5_1")
    with pytest.raises(ConfigError, match="experts are not multiplied in four bits"):
        resolve(EngineConfig("shape:qwen3-30b-a3b", isq="w4"), build_spec(read_source("shape:qwen3-30b-a3b")), "cuda")
