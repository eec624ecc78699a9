"""Quantized checkpoints cut into ranks: what a rank's codes and scales stand for is its part of what the whole's do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.runtime.models import test_fp8_checkpoint as fp8
from tests.runtime.weights import integer_forms as integers
from tests.runtime.weights import test_fp4_checkpoint as fp4
from tests.runtime.weights import test_int8_checkpoint as int8
from torch import Tensor

from stoker_kernels.fp4_gemm import dequantize_fp4
from stoker_kernels.quant import AnyWeight, Fp4Weight, Int8Weight, IntegerWeight, LinearWeight, dequantize
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.resolve import resolve_quantization
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import places
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
# Parts of blocks of 128, and of groups of 32: each of two ranks has one key-value head.
SHAPE: dict[str, Any] = {
    "vocab_size": 66, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": False, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("dense"))


def random_model(folder: Path) -> Path:
    """A random Qwen3 in fp32, by names alone."""
    hidden, ffn, width = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["head_dim"]
    q, kv, layer = SHAPE["num_attention_heads"] * width, SHAPE["num_key_value_heads"] * width, "model.layers.0."
    linears = {
        "self_attn.q": (q, hidden), "self_attn.k": (kv, hidden), "self_attn.v": (kv, hidden),
        "self_attn.o": (hidden, q), "mlp.gate": (ffn, hidden), "mlp.up": (ffn, hidden), "mlp.down": (hidden, ffn),
    }  # fmt: skip
    shapes = {f"{layer}{name}_proj.weight": shape for name, shape in linears.items()}
    shapes |= {"lm_head.weight": (66, hidden), "model.embed_tokens.weight": (66, hidden)}
    tensors = {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    norms = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    tensors |= {f"{layer}{name}.weight": torch.ones(width) for name in norms}
    tensors["model.norm.weight"] = torch.ones(hidden)
    save_file(tensors, folder / "model.safetensors")
    settings = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "torch_dtype": "float32", **SHAPE}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def ranks(folder: Path) -> list[DecoderWeights]:
    source = read_source(str(folder))
    spec = build_spec(source)
    quantization = resolve_quantization(EngineConfig(str(folder)).quantization, spec)
    cuts = [Cut(spec, place) for place in places(2, 1)]
    return [load_weights(source, cut.spec, CPU, torch.float32, quantization, cut=cut) for cut in cuts]


def value(weight: AnyWeight) -> Tensor:
    if isinstance(weight, IntegerWeight):
        return integers.dense_value(weight)
    if isinstance(weight, Fp4Weight):
        return dequantize_fp4(weight, torch.float32)
    if isinstance(weight, Int8Weight):
        return weight.data.float() * weight.scale
    assert isinstance(weight, LinearWeight)
    return weight.data if weight.kind == "dense" else dequantize(weight)


def assert_parts_are_alike(quantized: Path, plain: Path) -> None:
    for ours, theirs in zip(ranks(quantized), ranks(plain), strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            mine, exact = getattr(ours.layers[0], field), getattr(theirs.layers[0], field)
            assert mine.kind != "dense"
            torch.testing.assert_close(value(mine), value(exact), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", sorted(integers.FORMATS.keys() - set(integers.ORDERED)))
def test_integers(form: str, dense: Path, tmp_path: Path) -> None:
    assert_parts_are_alike(*integers.write(dense, tmp_path, *integers.FORMATS[form]))


@pytest.mark.parametrize("form", ["compressed-nvfp4", "modelopt-nvfp4", "compressed-mxfp4"])
def test_floats_of_four_bits(form: str, dense: Path, tmp_path: Path) -> None:
    assert_parts_are_alike(*integers.write(dense, tmp_path, *fp4.FORMATS[form]))


def test_integers_on_both_sides(dense: Path, tmp_path: Path) -> None:
    assert_parts_are_alike(*integers.write(dense, tmp_path, int8.config(), int8.quantized))


@pytest.mark.parametrize("form", integers.ORDERED)
def test_columns_in_an_order_of_their_own_are_refused(form: str, dense: Path, tmp_path: Path) -> None:
    quantized, _ = integers.write(dense, tmp_path, *integers.FORMATS[form])
    with pytest.raises(ConfigError, match="act-order"):
        ranks(quantized)


def in_floats(form: str, dense: Path, folder: Path) -> tuple[Path, Path]:
    """In FP8, and of the values that it stands for."""
    stored, plain = fp8.quantized(dense, form)
    for name in ("q", "d"):
        (folder / name).mkdir()
    quantized = fp8.write(folder / "q", dense, stored, fp8.FORMATS[form][0])
    return quantized, fp8.write(folder / "d", dense, plain)


@pytest.mark.parametrize("form", fp8.FORMATS)
def test_floats(form: str, dense: Path, tmp_path: Path) -> None:
    assert_parts_are_alike(*in_floats(form, dense, tmp_path))


READ = [*sorted(integers.FORMATS.keys() - set(integers.ORDERED)), "compressed-nvfp4", "compressed-mxfp4", *fp8.FORMATS]


@pytest.mark.parametrize("form", READ)
def test_each_rank_reads_its_slices_alone(
    form: str, dense: Path, tmp_path: Path, bytes_read: Callable[[], int]
) -> None:
    """Codes and their scales; what is small both have."""
    if form in fp8.FORMATS:
        quantized, _ = in_floats(form, dense, tmp_path)
    else:
        quantized, _ = integers.write(dense, tmp_path, *(integers.FORMATS | fp4.FORMATS)[form])
    bytes_read()
    source = read_source(str(quantized))
    spec = build_spec(source)
    kept, each = resolve_quantization(EngineConfig(str(quantized)).quantization, spec), []
    for place in places(2, 1):
        cut = Cut(spec, place)
        load_weights(source, cut.spec, CPU, torch.float32, kept, cut=cut)
        each.append(bytes_read())
    size = sum(file.stat().st_size for file in quantized.glob("*.safetensors"))
    assert 0.9 * size < sum(each) < 1.1 * size, (each, size)
    assert max(each) < 0.58 * size
