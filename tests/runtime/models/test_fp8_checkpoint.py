"""FP8 checkpoints in every form that is read: the numbers of dequantized weights, and errors that name the tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.weights.both_ways import random_qwen3
from torch import Tensor

from stoker_kernels.activation import silu_and_mul
from stoker_kernels.gemm import linear
from stoker_kernels.quant import LinearWeight, WeightKind, dequantize, quantize_fp8, quantize_weight
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.models import decoder
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 160,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def compressed(strategy: str, **changes: object) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group | changes},
        "ignore": ["lm_head"],
    }


BLOCK_CONFIG = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
# Name → (quantization_config, kind of the scales, their name, their dtype, their shape of [rows, columns of scales]).
FORMATS: dict[str, tuple[dict[str, Any], WeightKind, str, torch.dtype, Callable[[Tensor], Tensor]]] = {
    "tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "fp8_tensor", "weight_scale", torch.float32, lambda scale: scale.reshape(()),
    ),
    "tensor-of-one": (
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "fp8_tensor", "weight_scale_inv", torch.bfloat16, lambda scale: scale.reshape(1),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "fp8_channel", "weight_scale", torch.float32, lambda scale: scale,
    ),
    "compressed-channel": (
        compressed("channel"), "fp8_channel", "weight_scale", torch.bfloat16, lambda scale: scale.reshape(-1),
    ),
    "compressed-tensor": (compressed("tensor"), "fp8_tensor", "weight_scale", torch.float32, lambda scale: scale),
    "compressed-block": (compressed("block"), "fp8_block", "weight_scale", torch.float32, lambda scale: scale),
    "block": (BLOCK_CONFIG, "fp8_block", "weight_scale_inv", torch.float32, lambda scale: scale),
}  # fmt: skip
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in fp32."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    return random_qwen3(tmp_path_factory.mktemp("dense"), SHAPE, 5)


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(folder: Path, source: Path, tensors: dict[str, Tensor], quantization: object = None) -> Path:
    config = json.loads((source / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def quantized(source: Path, name: str, left: tuple[str, ...] = ()) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(the tensors of the checkpoint in this format, the same with every weight dequantized)."""
    _, kind, scale_name, scale_dtype, shaped = FORMATS[name]
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for key, tensor in load_file(source / "model.safetensors").items():
        stored[key] = plain[key] = tensor
        if is_linear(key) and not any(part in key for part in left):
            weight = quantize_weight(tensor, kind)
            assert weight.scale is not None
            # What is stored is rounded; its value is what the stored numbers say.
            scale = weight.scale.to(scale_dtype)
            stored[key] = weight.data
            stored[key.removesuffix("weight") + scale_name] = shaped(scale).clone()
            plain[key] = dequantize(LinearWeight(weight.data, scale.float(), kind))
            stored[key.removesuffix("weight") + "input_scale"] = torch.tensor(0.1)
    return stored, plain


@pytest.fixture
def make(dense: Path, tmp_path: Path) -> Make:
    """Writes a checkpoint in a format, changed by a function, and beside it the same dequantized."""

    def write_both(
        name: str,
        change: Callable[[dict[str, Tensor]], object] = lambda _: None,
        config: dict[str, Any] | None = None,
        left: tuple[str, ...] = (),
    ) -> Path:
        stored, plain = quantized(dense, name, left)
        change(stored)
        for folder in ("fp8", "plain"):
            (tmp_path / folder).mkdir()
        write(tmp_path / "plain", dense, plain)
        return write(tmp_path / "fp8", dense, stored, FORMATS[name][0] | (config or {}))

    return write_both


def load(path: Path) -> DecoderWeights:
    source = read_source(str(path))
    return load_weights(source, build_spec(source), CPU, torch.float32)


def prompt() -> list[int]:
    return torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize("name", FORMATS)
def test_weights_stay_in_fp8_and_mean_what_the_checkpoint_says(name: str, make: Make) -> None:
    path = make(name)
    ours, plain = load(path), load(path.parent / "plain")
    expected_kind = "fp8_block" if "block" in name else "fp8_channel"
    for layer, exact in zip(ours.layers, plain.layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            weight = getattr(layer, field)
            assert (weight.kind, weight.data.dtype) == (expected_kind, torch.float8_e4m3fn)
            torch.testing.assert_close(dequantize(weight), getattr(exact, field).data, rtol=1e-6, atol=0.0)
    assert ours.head.kind == "dense"


@pytest.mark.parametrize("name", ["tensor", "compressed-channel", "block"])
def test_logits_are_those_of_the_dequantized_weights_and_rounded_activations(
    name: str, make: Make, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(name)
    ours = paged_model(str(path), quantization="fp8").step([(0, prompt())], all_logits=True)[0]
    exact = paged_model(str(path.parent / "plain")).step([(0, prompt())], all_logits=True)[0]

    def by_definition(
        x: Tensor, weight: LinearWeight, *, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Activations per token through e4m3, except before the output head."""
        if weight.out_features != SHAPE["vocab_size"]:
            rounded = quantize_fp8(x)
            x = rounded.data.float() * rounded.scale
        return linear(x, weight, bias=bias, out=out)

    monkeypatch.setattr(decoder, "linear", by_definition)
    monkeypatch.setattr(decoder, "linear_silu_mul", lambda x, weight: silu_and_mul(by_definition(x, weight)))
    expected = paged_model(str(path.parent / "plain")).step([(0, prompt())], all_logits=True)[0]
    # A value on the edge between two e4m3 numbers may fall either way, and norms sum in another order where they round.
    assert (ours - expected).norm() < 0.03 * expected.norm()
    assert (ours - exact).norm() > 0.03 * exact.norm()


def test_block_weights_are_those_that_transformers_dequantizes(make: Make) -> None:
    import transformers

    path = make("block", lambda tensors: [tensors.pop(name) for name in list(tensors) if "input_scale" in name])
    # transformers wants whole blocks; the shape here has one that is cut, which its rule cannot read.
    rule = transformers.integrations.finegrained_fp8.Fp8Dequantize(None)
    stored = load_file(path / "model.safetensors")
    ours = load(path)
    checked = 0
    for index, layer in enumerate(ours.layers):
        for name, weight in (("mlp.down_proj", layer.down), ("self_attn.o_proj", layer.output)):
            key = f"model.layers.{index}.{name}.weight"
            padded = torch.zeros(256, 256).to(torch.float8_e4m3fn)
            rows, columns = stored[key].shape
            padded[:rows, :columns] = stored[key]
            expected = rule.convert({"weight": padded, "weight_scale_inv": stored[f"{key}_scale_inv"]})["weight"]
            torch.testing.assert_close(dequantize(weight), expected[:rows, :columns])
            checked += 1
    assert checked == 4


def test_modules_that_are_left_alone(make: Make, paged_model: Any) -> None:
    left = {"modules_to_not_convert": ["lm_head", "model.layers.1.mlp", "model.layers.0.self_attn.o_proj"]}
    path = make("block", config=left, left=("layers.1.mlp", "layers.0.self_attn.o_proj"))
    first, second = load(path).layers
    assert [weight.kind for weight in (first.qkv, first.output, first.gate_up, first.down)] == [
        "fp8_block", "dense", "fp8_block", "fp8_block",
    ]  # fmt: skip
    assert [weight.kind for weight in (second.qkv, second.output, second.gate_up, second.down)] == [
        "fp8_block", "fp8_block", "dense", "dense",
    ]  # fmt: skip
    logits = paged_model(str(path)).step([(0, prompt())])[0]
    plain = paged_model(str(path.parent / "plain")).step([(0, prompt())])[0]
    assert torch.nn.functional.cosine_similarity(logits, plain, dim=0) > 0.99


def test_a_regular_expression_leaves_modules_alone(make: Make) -> None:
    ignored = {"ignore": ["lm_head", r"re:.*layers\.1\.self_attn.*"]}
    path = make("compressed-channel", config=ignored, left=("layers.1.self_attn",))
    first, second = load(path).layers
    assert (first.qkv.kind, second.qkv.kind, second.output.kind, second.down.kind) == (
        "fp8_channel", "dense", "dense", "fp8_channel",
    )  # fmt: skip


def test_bytes_are_counted_as_they_are_allocated(make: Make) -> None:
    path = make("block")
    spec = build_spec(read_source(str(path)))
    weights = load(path)
    storage = weights.layers[0].down.data.untyped_storage()
    assert storage.nbytes() == spec.parameter_bytes("float32", "fp8") == spec.parameter_bytes("float32", "none")


def test_quantization_is_decided_by_the_checkpoint(make: Make) -> None:
    spec = build_spec(read_source(str(make("fbgemm"))))
    assert [resolve(EngineConfig("m", quantization=asked), spec, "cpu").quantization for asked in ("auto", "fp8")] == [
        "fp8",
        "fp8",
    ]
    with pytest.raises(ConfigError, match="weights are FP8"):
        resolve(EngineConfig("m", quantization="none"), spec, "cpu")


Q = "model.layers.1.self_attn.q_proj"


def set_to(name: str, value: Tensor | None) -> Callable[[dict[str, Tensor]], object]:
    """A change of one tensor; None takes it away."""
    return lambda tensors: tensors.pop(name) if value is None else tensors.update({name: value})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("tensor", set_to(f"{Q}.weight_scale", None), f"lacks {Q}.weight_scale"),
        ("block", set_to(f"{Q}.weight_scale", torch.ones(2, 2)), f"both forms of {Q}.weight_scale"),
        (
            "tensor",
            set_to(f"{Q}.weight_scale", torch.ones(3)),
            rf"{Q}.weight_scale is \[3\].*one number, or \[256, 1\]",
        ),
        ("fbgemm", set_to(f"{Q}.weight_scale", torch.ones(1, 256)), rf"{Q}.weight_scale is \[1, 256\]"),
        ("block", set_to(f"{Q}.weight_scale_inv", torch.ones(2, 1)), r"is \[2, 1\].*asks for \[2, 2\]"),
        ("block", set_to(f"{Q}.weight_scale_inv", torch.ones(2, 2, dtype=torch.int32)), "weight_scale_inv is I32"),
        ("tensor", set_to(f"{Q}.weight", torch.ones(256, 160)), f"{Q}.weight is F32, but quantization_config says"),
        ("tensor", set_to("lm_head.weight", torch.ones(128, 160).to(torch.float8_e4m3fn)), "lm_head.weight is F8_E4M3"),
        ("tensor", set_to("model.norm.weight_scale", torch.ones(1)), "model.norm.weight_scale is the scale of no"),
        ("tensor", set_to(f"{Q}.weight_zero_point", torch.ones(1)), "weight_zero_point has no place"),
    ],
)
def test_a_scale_that_is_missing_or_misshaped_is_named(
    name: str, change: Callable[[dict[str, Tensor]], object], message: str, make: Make
) -> None:
    with pytest.raises(ModelError, match=message):
        load(make(name, change))


def test_blocks_that_cannot_be_joined_are_named(dense: Path, tmp_path: Path) -> None:
    config = json.loads((dense / "config.json").read_text()) | {"num_key_value_heads": 1}
    tensors, _ = quantized(dense, "block")
    for key in list(tensors):
        if ".k_proj.weight" in key or ".v_proj.weight" in key:
            tensors[key] = tensors[key][:64] if key.endswith("weight") else tensors[key][:1]
    write(tmp_path, dense, {key: tensor.clone() for key, tensor in tensors.items()})
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": BLOCK_CONFIG}))
    with pytest.raises(ModelError, match=r"k_proj.weight has 64 rows, not a multiple of 128"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "aqlm", "bits": 4}, "'aqlm' are not supported; known are fp8, fbgemm_fp8"),
        ({"bits": 4}, "'unnamed'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 128]}, r"weight_block_size \[64, 128\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme 'none'"),
        (compressed("group"), "weights.strategy 'group'"),
        (compressed("channel", input_activations=None), "weights alone in FP8"),
        (compressed("channel", targets=["Linear", "Attention"]), "target 'Attention' is not supported"),
        (compressed("channel", weights={"num_bits": 4, "type": "int", "strategy": "group"}), "weights 'int4'"),
        (compressed("block", weights={"num_bits": 8, "type": "float", "strategy": "block"}), "block_structure None"),
        ({"quant_method": "compressed-tensors"}, "no config_groups"),
        (BLOCK_CONFIG | {"ignored_layers": [f"{Q}"]}, r"layers.1.qkv is one matrix here.*q_proj is not, .*k_proj is"),
    ],
)
def test_what_is_not_understood_is_refused(config: dict[str, Any], message: str, dense: Path, tmp_path: Path) -> None:
    write(tmp_path, dense, {"x": torch.ones(1)}, config)
    with pytest.raises(ModelError, match=message):
        build_spec(read_source(str(tmp_path)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_a_gpu_gives_the_logits_of_the_reference(name: str, make: Make, paged_model: Any) -> None:
    path = str(make(name))
    cpu = paged_model(path, quantization="fp8").step([(0, prompt())], all_logits=True)[0]
    gpu = paged_model(path, quantization="fp8", dtype=torch.bfloat16, device=torch.device("cuda"))
    logits = gpu.step([(0, prompt())], all_logits=True)[0].float().cpu()
    assert torch.nn.functional.cosine_similarity(logits, cpu, dim=1).min() > 0.98
