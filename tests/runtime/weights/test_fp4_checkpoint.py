"""Checkpoints in NVFP4 and MXFP4 as compressed-tensors and ModelOpt write them: values, tokens, and errors that name
the tensor or the setting.

Files are packed here after the formats' definitions; what compressed-tensors' own decoder makes of its two is compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.weights.both_ways import assert_likeliest, random_qwen3
from tests.runtime.weights.integer_forms import SHAPE, damaged, load, write
from torch import Tensor

from stoker_kernels.fp4_gemm import dequantize_fp4
from stoker_kernels.fragment_gemm import fills_blocks
from stoker_kernels.quant import FP4_BLOCKS, Fp4Kind, Fp4Weight
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.kernel_names import refuse_variant
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source

Quantized = tuple[dict[str, Tensor], Tensor]
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def codes_of(cut: Tensor) -> Tensor:
    """The nearest codes of numbers between -6 and 6."""
    nearest = (cut.abs().unsqueeze(-1) - GRID).abs().argmin(-1)
    return (nearest + 8 * (cut < 0)).to(torch.uint8)


def values_of(codes: Tensor) -> Tensor:
    return GRID[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)


def packed(codes: Tensor) -> Tensor:
    return codes[:, 0::2] | codes[:, 1::2] << 4


def nvfp4(weight: Tensor, modelopt: bool, most: float = 0.0) -> Quantized:
    """`most`: the largest number that there is to be, by which all is scaled; 0: the largest that there is."""
    n, k = weight.shape
    cut = weight.view(n, k // 16, 16)
    multiplier = ((torch.tensor(most) if most else weight.abs().amax()) / (6 * 448)).float()
    scale = (cut.abs().amax(-1) / 6 / multiplier).clamp(0.01, 448).to(torch.float8_e4m3fn)
    divisor = multiplier.reciprocal()
    exact = scale.float() * multiplier if modelopt else scale.float() / divisor
    codes = codes_of(cut / exact.unsqueeze(-1))
    value = (values_of(codes) * exact.unsqueeze(-1)).view(n, k)
    if modelopt:
        beside = {"weight_scale": scale, "weight_scale_2": multiplier, "input_scale": torch.tensor(0.37)}
        return {"weight": packed(codes.view(n, k)), **beside}, value
    beside = {"weight_scale": scale, "weight_global_scale": divisor.view(1), "input_global_scale": torch.tensor([9.5])}
    return {"weight_packed": packed(codes.view(n, k)), **beside}, value


def mxfp4(weight: Tensor, name: str) -> Quantized:
    n, k = weight.shape
    cut = weight.view(n, k // 32, 32)
    exponent = cut.abs().amax(-1).clamp_min(1e-6).log2().floor() - 2
    codes = codes_of(cut / (2.0**exponent).unsqueeze(-1))
    value = (values_of(codes) * (2.0**exponent).unsqueeze(-1)).view(n, k)
    return {name: packed(codes.view(n, k)), "weight_scale": (exponent + 127).to(torch.uint8)}, value


def compressed_config(form: str, size: int, **changes: object) -> dict[str, Any]:
    strategy = "tensor_group" if size == 16 else "group"
    weights = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": strategy, "group_size": size} | changes
    lot = {"targets": ["Linear"], "weights": weights, "input_activations": {"num_bits": 4, "type": "float"}}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": lot}, "ignore": ["lm_head"],
    }  # fmt: skip


def modelopt_config(algorithm: str, **changes: object) -> dict[str, Any]:
    inner = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]} | changes
    return {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "quantization": inner}


FORMATS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Quantized]]] = {
    "compressed-nvfp4": (compressed_config("nvfp4-pack-quantized", 16), lambda w: nvfp4(w, modelopt=False)),
    "compressed-mxfp4": (compressed_config("mxfp4-pack-quantized", 32), lambda w: mxfp4(w, "weight_packed")),
    "modelopt-nvfp4": (modelopt_config("NVFP4", group_size=16), lambda w: nvfp4(w, modelopt=True)),
    "modelopt-mxfp4": (modelopt_config("MXFP4"), lambda w: mxfp4(w, "weight")),
}


# What a layer's matrices are made of.
MODULES = {
    "qkv": ("self_attn.q", "self_attn.k", "self_attn.v"), "output": ("self_attn.o",),
    "gate_up": ("mlp.gate", "mlp.up"), "down": ("mlp.down",),
}  # fmt: skip


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in fp32."""
    return random_qwen3(tmp_path_factory.mktemp("dense"), SHAPE, 12)


@pytest.mark.parametrize("form", FORMATS)
def test_weights_are_those_of_the_definition_and_so_are_tokens(
    dense: Path, tmp_path: Path, form: str, paged_model: Any
) -> None:
    quantized, plain = write(dense, tmp_path, *FORMATS[form])
    ours, theirs = load(quantized), load(plain)
    for layer, expected in zip(ours.layers, theirs.layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            weight = getattr(layer, field)
            assert isinstance(weight, Fp4Weight)
            found, exact = dequantize_fp4(weight, torch.float32), getattr(expected, field).data
            if weight.kind == "mxfp4":
                assert torch.equal(found, exact), field
            else:
                # One number of a matrix may be divided or multiplied by.
                torch.testing.assert_close(found, exact, rtol=2.5e-7, atol=0.0)
    prompt = [5, 17, 80, 3, 44, 9]
    method = FORMATS[form][0]["quant_method"]
    tokens = paged_model(str(quantized), quantization=method, max_len=64).greedy([prompt], 40)
    assert_likeliest(plain, [prompt], tokens)


@pytest.mark.parametrize("form", FORMATS)
def test_weights_and_tokens_are_those_of_files_where_they_rest_in_fragments(
    tmp_path: Path, form: str, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Hopper, gate and up in turn: the CPU's reference reads that order too."""
    (tmp_path / "wide").mkdir()
    wide = random_qwen3(tmp_path / "wide", SHAPE | {"hidden_size": 128, "intermediate_size": 224}, 14)
    quantized, _ = write(wide, tmp_path, *FORMATS[form])
    plainly, method = load(quantized), FORMATS[form][0]["quant_method"]
    prompts = [[5, 17, 80, 3, 44], [90, 1, 2, 2, 30, 31, 32, 60, 61]]
    expected = paged_model(str(quantized), quantization=method, max_len=64).greedy(prompts, 30)

    def as_on_hopper(n: int, k: int, kind: Fp4Kind, *_: object, gated: bool = False) -> str:
        if not fills_blocks(n, k, FP4_BLOCKS[kind]):
            return "rows"
        return "pairs" if gated else "fragments"

    monkeypatch.setattr("stoker_runtime.weights.layout.best_fp4_layout", as_on_hopper)
    for layer, plain in zip(load(quantized).layers, plainly.layers, strict=True):
        assert isinstance(layer.gate_up, Fp4Weight)
        assert layer.gate_up.layout == "pairs"
        for field in ("output", "gate_up", "down"):
            found, want = (dequantize_fp4(getattr(each, field), torch.float32) for each in (layer, plain))
            assert torch.equal(found, want), field
    assert paged_model(str(quantized), quantization=method, max_len=64).greedy(prompts, 30) == expected


@pytest.mark.parametrize(("form", "bits", "words"), [
    ("compressed-mxfp4", 161, r"mlp.gate_proj or .*mlp.up_proj has a scale of 2\^34; the largest .* is 2\^33"),
    ("modelopt-nvfp4", 0x7F, "has a scale that is no number"),
])  # fmt: skip
def test_a_scale_that_the_kernels_of_hopper_do_not_take_is_named(
    tmp_path: Path, form: str, bits: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wide").mkdir()
    wide = random_qwen3(tmp_path / "wide", SHAPE | {"hidden_size": 128, "intermediate_size": 224}, 15)
    quantized, _ = write(wide, tmp_path, *FORMATS[form])
    name = "model.layers.1.mlp.gate_proj.weight_scale"
    monkeypatch.setattr("stoker_runtime.weights.layout.best_fp4_layout", lambda *_, gated: "pairs" if gated else "rows")
    with pytest.raises(ModelError, match=words):
        load(damaged(quantized, lambda tensors: tensors[name].view(torch.uint8)[3, 1].fill_(bits)))


@pytest.mark.parametrize("form", ["compressed-nvfp4", "compressed-mxfp4"])
def test_the_library_s_own_decoder_finds_the_same(dense: Path, tmp_path: Path, form: str) -> None:
    from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    config, quantize = FORMATS[form]
    quantized, _ = write(dense, tmp_path, config, quantize)
    weights = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    library = {16: NVFP4PackedCompressor, 32: MXFP4PackedCompressor}[weights.group_size or 0]
    stored = load_file(quantized / "model.safetensors")

    def decoded(module: str) -> Tensor:
        prefix = f"model.layers.1.{module}_proj."
        state = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
        return library.decompress(state, QuantizationScheme(targets=["Linear"], weights=weights))["weight"].float()

    layer = load(quantized).layers[1]
    for field, modules in MODULES.items():
        theirs, ours = torch.cat([decoded(module) for module in modules]), getattr(layer, field)
        torch.testing.assert_close(dequantize_fp4(ours, torch.float32), theirs, rtol=2.0**-8, atol=0.0)


def test_modelopt_s_own_file_is_read_where_config_json_says_nothing(dense: Path, tmp_path: Path) -> None:
    settings, quantize = FORMATS["modelopt-nvfp4"]
    quantized, plain = write(dense, tmp_path, settings, quantize)
    config = json.loads((quantized / "config.json").read_text())
    found = config.pop("quantization_config")
    found.pop("quant_method")
    found["quantization"]["exclude_modules"] = ["lm_head", "model.layers.0.mlp*"]
    (quantized / "config.json").write_text(json.dumps(config))
    (quantized / "hf_quant_config.json").write_text(json.dumps(found))
    restored = load_file(plain / "model.safetensors")

    def restore(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.0.mlp.")]:
            tensors.pop(name)
        tensors |= {name: tensor for name, tensor in restored.items() if name.startswith("model.layers.0.mlp.")}

    weights = load(damaged(quantized, restore))
    assert [layer.gate_up and layer.gate_up.kind for layer in weights.layers] == ["dense", "nvfp4"]


def test_modelopt_s_fp8_is_fp8(dense: Path, tmp_path: Path) -> None:
    def fp8(weight: Tensor) -> Quantized:
        scale = weight.abs().amax() / 448
        data = (weight / scale).to(torch.float8_e4m3fn)
        beside = {"weight_scale": scale, "input_scale": torch.tensor(0.02)}
        return {"weight": data, **beside}, data.float() * scale

    quantized, plain = write(dense, tmp_path, modelopt_config("FP8"), fp8)
    ours, theirs = load(quantized).layers[0].output, load(plain).layers[0].output
    assert ours.kind == "fp8_channel"
    assert ours.scale is not None
    torch.testing.assert_close(ours.data.float() * ours.scale, theirs.data)
    spec = build_spec(read_source(str(quantized)))
    for asked in ("modelopt", "fp8", "auto"):
        assert resolve(EngineConfig(str(quantized), quantization=asked), spec, "cpu").quantization == "fp8"


LAYER = "model.layers.1.self_attn."


@pytest.mark.parametrize(("form", "change", "words"), [
    ("compressed-nvfp4", lambda t: t.pop(f"{LAYER}k_proj.weight_global_scale"),
     r"lacks tensor model.layers.1.self_attn.k_proj.weight_global_scale \[\].* NVFP4 by compressed-tensors have "
     r"weight_packed \[80, 80\], weight_scale \[80, 10\]"),
    ("modelopt-nvfp4", lambda t: t.update({f"{LAYER}q_proj.weight_scale": torch.ones(160, 5).to(torch.float8_e4m3fn)}),
     r"q_proj.weight_scale is \[160, 5\]; the configuration asks for \[160, 10\]"),
    ("modelopt-nvfp4", lambda t: t.update({f"{LAYER}q_proj.weight": torch.ones(160, 160)}),
     "q_proj.weight is not quantized, but quantization_config says modelopt"),
    ("compressed-mxfp4", lambda t: t.update({f"{LAYER}v_proj.weight_scale": torch.ones(80, 5)}),
     "v_proj.weight_scale is F32; it must be U8, F8_E8M0"),
    ("compressed-nvfp4", lambda t: t[f"{LAYER}v_proj.weight_global_scale"].fill_(0.0),
     "v_proj.weight_global_scale holds 0; a scale is finite and above zero"),
])  # fmt: skip
def test_a_damaged_checkpoint_is_refused_by_name_before_memory_is_taken(
    dense: Path,
    tmp_path: Path,
    form: str,
    change: Callable[[dict[str, Tensor]], None],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    quantized, _ = write(dense, tmp_path, *FORMATS[form])
    monkeypatch.setattr("stoker_runtime.weights.load.WeightArena", None)
    with pytest.raises(ModelError, match=words):
        load(damaged(quantized, change))


@pytest.mark.parametrize(("config", "words"), [
    (compressed_config("nvfp4-pack-quantized", 16, group_size=64), "group_size 64 is not supported; it must be 16"),
    (compressed_config("nvfp4-pack-quantized", 16, strategy="channel"), "strategy 'channel'.*tensor_group with NVFP4"),
    (compressed_config("mxfp4-pack-quantized", 32, symmetric=False), "weights.symmetric False"),
    (compressed_config("float-quantized", 16), "format 'float-quantized'.*nvfp4-pack-quantized, mxfp4-pack-quantized"),
    (modelopt_config("NVFP4_AWQ"), "quant_algo 'NVFP4_AWQ' is not supported; it must be one of NVFP4"),
    (modelopt_config("MXFP4", group_size=16), "group_size 16 is not supported; it must be 32 with MXFP4"),
])  # fmt: skip
def test_a_setting_that_is_not_supported_is_named(
    dense: Path, tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    settings = json.loads((dense / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(ModelError, match=words):
        build_spec(read_source(str(tmp_path)))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("form", FORMATS)
def test_batch_invariance_refuses_them_by_name(form: str, device: str, dense: Path, tmp_path: Path) -> None:
    config, quantize = FORMATS[form]
    folder, _ = write(dense, tmp_path, config, quantize)
    asked = EngineConfig(str(folder), quantization=config["quant_method"], dtype="bfloat16", batch_invariant=True)
    spec = build_spec(read_source(str(folder)))
    kind = "nvfp4" if "nvfp4" in form else "mxfp4"
    with pytest.raises(ConfigError, match=rf"weights in {kind} \(layers\.0\.\w+\).*leave --batch-invariant out"):
        refuse_variant(asked, spec, torch.device(device))


def test_quantization_names_what_the_checkpoint_is(dense: Path, tmp_path: Path) -> None:
    settings = json.loads((dense / "config.json").read_text())
    config = FORMATS["modelopt-nvfp4"][0]
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    spec = build_spec(read_source(str(tmp_path)))
    good = resolve(EngineConfig(str(tmp_path), quantization="modelopt"), spec, "cuda")
    assert (good.quantization, good.dtype) == ("modelopt", "bfloat16")
    # Codes of half a byte, scales of a byte for 16 columns, a factor a row.
    rows = {each.name: each for each in spec.parameters()}
    assert spec.parameter_bytes("bfloat16", "modelopt") == sum(
        size(each.shape) if each.role == "linear" else -(-2 * each.elements // 256) * 256 for each in rows.values()
    )
    with pytest.raises(ConfigError, match=r"quantization is awq, but the checkpoint's weights are NVFP4 \(modelopt\)"):
        resolve(EngineConfig(str(tmp_path), quantization="awq"), spec, "cuda")


def size(shape: tuple[int, ...]) -> int:
    n, k = shape
    return sum(-(-each // 256) * 256 for each in (n * k // 2, n * k // 16, 4 * n))
