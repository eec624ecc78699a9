"""Loading safetensors and shapes: the right rows, the right dtype, and errors that name the tensor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stoker_kernels.quant import quantize_weight
from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights import copy_lanes, load
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
Checkpoint = Callable[[str], Path]
ATTENTION = "model.layers.1.self_attn"


def _load(
    path: Path, dtype: torch.dtype = torch.float32, quantization: str = "none"
) -> tuple[ModelSpec, DecoderWeights]:
    source = read_source(str(path))
    spec = build_spec(source)
    return spec, load_weights(source, spec, CPU, dtype, quantization)


def _edited(source: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pieces_are_stacked_by_rows_and_converted(tiny_checkpoint: Checkpoint, dtype: torch.dtype) -> None:
    path = tiny_checkpoint("llama-bias")
    raw = load_file(path / "model.safetensors")
    _, weights = _load(path, dtype)
    qkv = torch.cat([raw[f"{ATTENTION}.{name}_proj.weight"] for name in "qkv"])
    bias = torch.cat([raw[f"{ATTENTION}.{name}_proj.bias"] for name in "qkv"])
    gate_up = torch.cat([raw[f"model.layers.2.mlp.{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(weights.layers[1].qkv.data, qkv.to(dtype))
    layer_bias = weights.layers[1].qkv_bias
    assert layer_bias is not None
    assert torch.equal(layer_bias, bias.to(dtype))
    assert torch.equal(weights.layers[2].gate_up.data, gate_up.to(dtype))
    assert torch.equal(weights.head.data, raw["lm_head.weight"].to(dtype))


def test_small_chunks_give_the_same_weights(tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoint("llama-sharded")
    _, whole = _load(path, torch.bfloat16)
    monkeypatch.setattr(copy_lanes, "CHUNK_BYTES", 1000)
    _, chunked = _load(path, torch.bfloat16)
    for layer, other in zip(whole.layers, chunked.layers, strict=True):
        assert torch.equal(layer.down.data, other.down.data)
        assert torch.equal(layer.qkv.data, other.qkv.data)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_loading_in_inference_mode(quantization: str, tiny_checkpoint: Checkpoint) -> None:
    path = tiny_checkpoint("llama")
    _, outside = _load(path, torch.bfloat16, quantization)
    with torch.inference_mode():
        _, inside = _load(path, torch.bfloat16, quantization)
        assert torch.equal(inside.layers[2].down.data.float(), outside.layers[2].down.data.float())


def test_a_tied_head_is_the_embedding(tiny_checkpoint: Checkpoint) -> None:
    _, weights = _load(tiny_checkpoint("llama-tied"))
    assert weights.head.data.data_ptr() == weights.embed.data_ptr()


def test_the_arena_has_exactly_the_bytes_the_spec_counts(tiny_checkpoint: Checkpoint) -> None:
    spec = build_spec(read_source(str(tiny_checkpoint("qwen2"))))
    for dtype, name in [(torch.float32, "float32"), (torch.bfloat16, "bfloat16")]:
        for quantization in ("none", "fp8"):
            arena = WeightArena(spec, CPU, dtype, quantization)
            assert arena.num_bytes == spec.parameter_bytes(name, quantization)
            views = [*arena.dense.values(), *(weight.data for weight in arena.quantized.values())]
            views += [weight.scale for weight in arena.quantized.values() if weight.scale is not None]
            spans = sorted((view.data_ptr(), view.data_ptr() + view.nbytes) for view in views)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_fp8_is_quantize_weight_of_the_stacked_matrix(
    tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_checkpoint("qwen2")
    # So small that matrices are quantized while others are still being read.
    monkeypatch.setattr(load, "PENDING_BYTES", 100_000)
    _, dense = _load(path, torch.bfloat16)
    _, quantized = _load(path, torch.bfloat16, "fp8")
    assert quantized.head.kind == "dense"
    for layer, exact in zip(quantized.layers, dense.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            weight, expected = getattr(layer, name), quantize_weight(getattr(exact, name).data, "fp8_channel")
            assert weight.kind == "fp8_channel"
            assert torch.equal(weight.data.view(torch.uint8), expected.data.view(torch.uint8))
            assert torch.equal(weight.scale, expected.scale)


def test_a_missing_tensor_is_named(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.key_proj.weight"] = tensors.pop(f"{ATTENTION}.k_proj.weight")

    path = _edited(tiny_checkpoint("llama"), tmp_path, change)
    message = r"lacks tensor model\.layers\.1\.self_attn\.k_proj\.weight \[32, 64\].*nearest is .*key_proj"
    with pytest.raises(ModelError, match=message):
        _load(path)


def test_an_unknown_tensor_is_named(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = _edited(tiny_checkpoint("llama"), tmp_path, lambda t: t.update({f"{ATTENTION}.q_proj.bias": torch.ones(64)}))
    with pytest.raises(ModelError, match=r"self_attn\.q_proj\.bias has no place in a LlamaForCausalLM"):
        _load(path)


def test_a_misshaped_tensor_is_named_with_both_shapes(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = _edited(
        tiny_checkpoint("llama"), tmp_path, lambda t: t.update({f"{ATTENTION}.q_proj.weight": torch.ones(48, 64)})
    )
    with pytest.raises(ModelError, match=r"q_proj\.weight is \[48, 64\]; the configuration asks for \[64, 64\]"):
        _load(path)


def test_a_dtype_that_is_no_number_is_named(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = _edited(
        tiny_checkpoint("llama"),
        tmp_path,
        lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
    )
    with pytest.raises(ModelError, match=r"model\.norm\.weight is I32; supported are"):
        _load(path)


def test_harmless_extras_are_accepted(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        tensors["lm_head.weight"] = torch.zeros(128, 64)

    spec, weights = _load(_edited(tiny_checkpoint("llama-tied"), tmp_path, change))
    assert spec.tie_embeddings
    assert weights.head.data.abs().sum() > 0


def test_a_file_that_shrinks_while_it_is_read(tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = _edited(tiny_checkpoint("llama"), tmp_path, lambda t: None)
    source = read_source(str(path))
    spec = build_spec(source)
    routes, scales, *_ = load._routes(source.kind, path, spec)
    file = path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1000)
    arena = WeightArena(spec, CPU, torch.float32, "none")
    with (
        pytest.raises(ModelError, match=r"ended at byte \d+ while \d+ more were due"),
        copy_lanes.CopyLanes(CPU) as lanes,
    ):
        load._fill(arena, routes, scales, lanes)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_random_weights_repeat_by_seed(quantization: str) -> None:
    source = read_source("shape:tiny")
    spec = build_spec(source)
    first, again, other = (
        load_weights(source, spec, CPU, torch.bfloat16, quantization, seed=seed)
        .layers[0]
        .gate_up.data.view(torch.uint8)
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_random_weights_keep_deep_models_sane(quantization: str, paged_model: Any) -> None:
    model = paged_model("shape:tiny", layers=40, quantization=quantization)
    logits = model.step([(0, list(range(3, 100)))], all_logits=True)[0]
    assert 0.05 < float(logits.std()) < 5.0
    # Tokens differ from each other: the model neither dies nor saturates.
    assert len(set(logits.argmax(-1).tolist())) > 20


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gpu_gets_the_weights_of_the_cpu(
    dtype: torch.dtype, quantization: str, tiny_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Many small chunks, and matrices quantized while others are read into the memory that they leave.
    monkeypatch.setattr(copy_lanes, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(load, "PENDING_BYTES", 20_000)
    path = tiny_checkpoint("llama-sharded")
    _, expected = _load(path, dtype, quantization)
    source = read_source(str(path))
    gpu = load_weights(source, build_spec(source), torch.device("cuda"), dtype, quantization)
    for ours, theirs in zip(gpu.layers, expected.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            weight, reference = getattr(ours, name), getattr(theirs, name)
            assert torch.equal(weight.data.cpu().float(), reference.data.float())
            assert quantization == "none" or torch.equal(weight.scale.cpu(), reference.scale)


@pytest.mark.gpu
def test_loading_leaves_only_the_arena_on_the_gpu() -> None:
    source = read_source("shape:qwen3-0.6b")
    spec = build_spec(source)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    weights = load_weights(source, spec, torch.device("cuda"), torch.bfloat16, "fp8")
    # torch rounds the one block up to 2 MiB.
    extra = torch.cuda.memory_allocated() - before - spec.parameter_bytes("bfloat16", "fp8")
    assert 0 <= extra < 2 * 1024**2
    assert weights.layers[0].qkv.kind == "fp8_channel"
