"""GGUF kept in its blocks: the same logits as decoded, no more memory than the file, and what is decoded is named."""

from __future__ import annotations

import json
import logging
import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tests.runtime.weights.gguf_file import write_out

from stoker_kernels.block_gemm import packing_refusal
from stoker_kernels.launch import cc
from stoker_kernels.quant import BLOCK_FORMATS, BlockWeight
from stoker_runtime import LLM, SamplingParams
from stoker_runtime.checkpoint.gguf_header import read_gguf_header
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.build import build_model
from stoker_runtime.executor.drafts.plan import read_draft_model
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.resolve import activation_bytes, resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.block_parts import PLANE_SCRATCH, PLANE_SUMS, BlockPart
from stoker_runtime.models.config_source import read_source
from stoker_runtime.parallel.place import places
from stoker_runtime.parallel.split import split_spec
from stoker_runtime.terminal.info import describe_model
from stoker_runtime.weights.block_plan import decoding_reason, plan_blocks

Kind = gguf.GGMLQuantizationType
VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 208, 256, 512, 4, 2, 64, 2
# Where each format's fp16 numbers stand in a block, and how large they are for weights of a few hundredths.
NUMBERS = {
    **dict.fromkeys(("Q8_0", "IQ4_NL"), ((0, 5e-4),)),
    **dict.fromkeys(("Q4_0", "Q5_0"), ((0, 5e-3),)),
    "Q4_1": ((0, 5e-3), (2, -0.04)),
    "Q5_1": ((0, 2e-3), (2, -0.03)),
    "IQ4_XS": ((0, 2e-5),),
    "Q2_K": ((80, 1e-3), (82, 1e-3)),
    "Q3_K": ((108, 4e-4),),
    **dict.fromkeys(("Q4_K", "Q5_K"), ((0, 1e-4), (2, 5e-4))),
    "Q6_K": ((208, 1e-5),),
}
needs_compiler = pytest.mark.skipif(cc.refusal("cpu_blocks") is not None, reason=f"{cc.refusal('cpu_blocks')}")


def blocks(draw: np.random.Generator, name: str, rows: int, columns: int) -> np.ndarray[Any, Any]:
    width, size = BLOCK_FORMATS[name]
    found = draw.integers(0, 256, (rows * columns // width, size), dtype=np.uint8)
    for at, scale in NUMBERS[name]:
        numbers = (scale * draw.uniform(0.5, 1.5, len(found))).astype(np.float16)
        found[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return found.reshape(rows, -1)


def write(path: Path, kinds: dict[str, str], default: str, *, tied: bool = True) -> Path:
    """A Llama of random blocks; `kinds` by the tensor's word, F16 and F32 among them."""
    draw = np.random.default_rng()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(512)
    writer.add_token_list([f"t{at}" for at in range(VOCAB)])
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes = {"attn_q": (q, HIDDEN), "attn_k": (kv, HIDDEN), "attn_v": (kv, HIDDEN), "attn_output": (HIDDEN, q)}
    shapes |= {"ffn_gate": (FFN, HIDDEN), "ffn_up": (FFN, HIDDEN), "ffn_down": (HIDDEN, FFN)}
    tensors = {f"blk.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in shapes.items()}
    tensors |= {"token_embd": (VOCAB, HIDDEN)} | ({} if tied else {"output": (VOCAB, HIDDEN)})
    for name, (rows, columns) in tensors.items():
        kind = kinds.get(name.rpartition(".")[2], default)
        if kind in BLOCK_FORMATS:
            writer.add_tensor(f"{name}.weight", blocks(draw, kind, rows, columns), raw_dtype=Kind[kind])
        else:
            numbers = (0.04 * draw.standard_normal((rows, columns))).astype(np.float32)
            writer.add_tensor(f"{name}.weight", gguf.quantize(numbers, Kind[kind]), raw_dtype=Kind[kind])
    for name in ("output_norm", *(f"blk.{at}.{norm}_norm" for at in range(LAYERS) for norm in ("attn", "ffn"))):
        writer.add_tensor(f"{name}.weight", draw.uniform(0.5, 1.5, HIDDEN).astype(np.float32))
    write_out(writer)
    return path


def both(file: Path, paged_model: Any, **more: Any) -> tuple[Any, Any]:
    """The model with its blocks kept, and decoded."""
    return paged_model(str(file), quantization="gguf", **more), paged_model(str(file), **more)


def agree(kept: Any, decoded: Any, prompt: list[int]) -> None:
    ours, expected = (model.step([(0, prompt)], all_logits=True)[0] for model in (kept, decoded))
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=2e-4)


@needs_compiler
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_each_format_gives_the_logits_of_its_numbers(name: str, tmp_path: Path, paged_model: Any) -> None:
    file = write(tmp_path / "m.gguf", {}, name)
    kept, decoded = both(file, paged_model)
    assert isinstance(kept.decoder.weights.embed, BlockWeight)
    agree(kept, decoded, [random.randrange(VOCAB) for _ in range(5)])
    # Beyond the tokens from which on blocks are unpacked first.
    kept.forget(), decoded.forget()
    agree(kept, decoded, [random.randrange(VOCAB) for _ in range(50)])


@needs_compiler
def test_a_mixed_file_takes_no_more_memory_than_it_has_bytes(tmp_path: Path, paged_model: Any) -> None:
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q4_0", "output": "Q6_K", "attn_k": "Q8_0"}
    file = write(tmp_path / "m.gguf", kinds, "Q4_K", tied=False)
    kept, decoded = both(file, paged_model)
    held = kept.spec.parameter_bytes("float32")
    assert held <= 1.1 * file.stat().st_size
    assert held < decoded.spec.parameter_bytes("float32") / 4
    assert [piece.format for piece in kept.decoder.weights.layers[1].qkv.pieces] == ["Q4_K", "Q8_0", "Q6_K"]
    agree(kept, decoded, [random.randrange(VOCAB) for _ in range(40)])


def test_planes_of_a_mixed_file_take_no_more_memory_and_give_its_logits(tmp_path: Path, paged_model: Any) -> None:
    kinds = {"attn_v": "Q6_K", "ffn_down": random.choice(["Q5_K", "Q3_K", "IQ4_XS"]), "token_embd": "Q5_1"}
    file = write(tmp_path / "m.gguf", kinds | {"output": "Q2_K"}, random.choice(["Q4_K", "Q8_0"]), tied=False)
    decoded = paged_model(str(file))
    kept = paged_model(str(file), quantization="gguf", planes=True)
    assert kept.spec.parameter_bytes("float32") <= 1.1 * file.stat().st_size
    layer = kept.decoder.weights.layers[1]
    # Neighbours in one format are one piece, whose rows of pairs were brought to order by head.
    assert [piece.rows for piece in layer.qkv.planes] == [(HEADS + KV_HEADS) * HEAD_DIM, KV_HEADS * HEAD_DIM]
    assert [piece.rows for piece in layer.gate_up.planes] == [2 * FFN]
    assert kept.decoder.weights.embed.in_planes
    agree(kept, decoded, [random.randrange(VOCAB) for _ in range(40)])


def test_rows_that_are_decoded_have_their_memory() -> None:
    """As large as the largest matrix in planes, up to what is decoded at a time, and never less than sums take."""
    config = EngineConfig(model="m", dtype="bfloat16")
    whole, name = build_spec(read_source("shape:qwen3-0.6b")), f"layers.{random.randint(0, 27)}.gate_up"
    largest = 0
    for times, planes in ((8, ()), (1, (16,)), (random.randint(4, 9), (16,)), (50, (16,))):
        spec = replace(whole, blocks={name: (BlockPart("Q8_0", 1, 34, planes),)}, ffn=whole.ffn * times)
        largest = 2 * next(math.prod(each.shape) for each in spec.parameters() if each.name == name)
        assert activation_bytes(config, spec, 0) == (max(PLANE_SUMS, min(PLANE_SCRATCH, largest)) if planes else 0)
    assert largest > PLANE_SCRATCH


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_gpu_keeps_each_format(name: str, tmp_path: Path, paged_model: Any) -> None:
    file = write(tmp_path / "m.gguf", {"attn_v": "Q6_K"}, name)
    device = torch.device("cuda")
    kept = paged_model(str(file), quantization="gguf", device=device, dtype=torch.bfloat16)
    decoded = paged_model(str(file), device=device, dtype=torch.bfloat16)
    exact = paged_model(str(file), quantization="none", device=torch.device("cpu"), dtype=torch.float32)
    assert kept.decoder.weights.embed.in_planes
    prompt = [random.randrange(VOCAB) for _ in range(70)]
    for tokens in (prompt[:1], prompt):
        *found, right = (
            model.step([(0, tokens)], all_logits=True)[0].double().cpu() for model in (kept, decoded, exact)
        )
        # How far 16 bits are from the numbers differs from draw to draw.
        ours, theirs = ((each - right).norm() / right.norm() for each in found)
        assert ours < 1.3 * theirs + 1e-3
        for model in (kept, decoded, exact):
            model.forget()


@needs_compiler
def test_what_is_decoded_is_named(tmp_path: Path, paged_model: Any, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "m.gguf", {"attn_v": "F16", "ffn_down": "BF16"}, "Q4_0")
    with caplog.at_level(logging.INFO):
        kept, decoded = both(file, paged_model)
    assert "F16 is not multiplied as it is; decoded to the model's type: layers.0.qkv, layers.1.qkv" in caplog.text
    assert "BF16 is not multiplied as it is; decoded to the model's type: layers.0.down" in caplog.text
    assert "kept in the file's blocks: Q4_0" in caplog.text
    assert not isinstance(kept.decoder.weights.layers[0].qkv, BlockWeight)
    assert isinstance(kept.decoder.weights.layers[0].gate_up, BlockWeight)
    agree(kept, decoded, [3, 5, 8])


@needs_compiler
def test_the_engine_keeps_blocks_when_it_is_told_to(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {}, "Q6_K")
    config = EngineConfig(str(file), device="cpu", quantization="gguf", max_model_len=128, cpu_kv_gb=0.05)
    executor = build_model(config)
    try:
        assert executor.config.quantization == "gguf"
        assert executor.kernels()["block_linear"].startswith("compiled")
    finally:
        executor.close()


@pytest.mark.skipif(packing_refusal() is not None, reason=f"packed blocks: {packing_refusal()}")
@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 0.1), ("float32", 1e-3)])
def test_fast_formats_stay_unasked_and_give_the_logits_of_the_numbers(tmp_path: Path, dtype: str, atol: float) -> None:
    kinds = {"ffn_down": "Q6_K", "attn_k": "Q8_0", "token_embd": random.choice(["Q8_0", "Q4_0", "IQ4_NL"])}
    file = write(tmp_path / "m.gguf", kinds, "Q4_1")
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
    prompt, found = [random.randrange(VOCAB) for _ in range(40)], []
    for asked in ("auto", "none"):
        with LLM(str(file), device="cpu", dtype=dtype, quantization=asked, max_model_len=128) as llm:
            executor = llm.engine.executor
            assert isinstance(executor, Executor)
            assert executor.config.quantization == {"auto": "gguf", "none": "none"}[asked]
            weights = executor.body.decoder.weights
            kept = [isinstance(each, BlockWeight) and each.packed for each in (weights.head, weights.layers[1].qkv)]
            assert kept == [asked == "auto"] * 2
            assert weights.embed is weights.head or asked == "none"
            assert not isinstance(weights.layers[0].down, BlockWeight), "Q6_K is faster decoded"
            (told,) = llm.generate([{"prompt_token_ids": prompt}], wanted)
            assert told.prompt_logprobs is not None
            found.append([row[token].logprob for row, token in zip(told.prompt_logprobs[1:], prompt[1:], strict=True)])
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(found[1]), atol=atol, rtol=atol / 5)


def mixed(path: Path) -> Path:
    """The types of a Q4_K_M file, with an output head of its own or without."""
    kinds = dict.fromkeys(("attn_v", "ffn_down", "token_embd", "output"), "Q6_K")
    return write(path, kinds, "Q4_K", tied=random.random() < 0.5)


def test_a_gpu_keeps_a_mixed_file_unasked(tmp_path: Path) -> None:
    file = mixed(tmp_path / "m.gguf")
    source, config = read_source(str(file)), EngineConfig(str(file), dtype=random.choice(["auto", "float16"]))
    spec = build_spec(source)
    plan = plan_blocks(spec, source, "auto", "cuda", refused=decoding_reason(config, spec, "cuda"))
    assert not plan.decoded
    assert plan.spec.parameter_bytes("bfloat16") <= 1.1 * file.stat().st_size
    assert resolve(config, plan.spec, "cuda").quantization == "gguf"
    kept = {part.format for parts in plan.spec.blocks.values() for part in parts}
    assert kept == {"Q4_K", "Q6_K"}


@pytest.mark.parametrize(
    ("fields", "device", "reason"),
    [
        ({"dtype": "float32"}, "cuda", "no kernel for a GPU multiplies blocks in float32"),
        ({"batch_invariant": True}, "cuda", "--batch-invariant was given"),
        ({"quantize_head": "fp8"}, "cpu", "--quantize-head was given"),
        ({"tensor_parallel_size": 2}, "cuda", "blocks are not shared among several ranks"),
        ({"quantization": "none"}, "cuda", "--quantization none was given"),
    ],
)
def test_a_file_that_is_decoded_is_named_with_the_reason_and_both_sizes(
    fields: dict[str, Any], device: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = mixed(tmp_path / "m.gguf")
    source, config = read_source(str(file)), EngineConfig(str(file), **fields)
    whole = build_spec(source)
    spec = split_spec(whole, next(iter(places(config.tensor_parallel_size, 1))))
    refused = decoding_reason(config, spec, device)
    plan = plan_blocks(spec, source, config.quantization, device, refused=refused, whole=whole)
    assert plan.spec is spec
    with caplog.at_level(logging.INFO):
        plan.announce("float16")
    (told,) = caplog.records
    assert told.levelname == ("INFO" if config.quantization == "none" else "WARNING")
    in_blocks = [each for each in whole.parameters() if len(each.shape) == 2]
    there = sum(tensor.num_bytes for tensor in read_gguf_header(file).tensors.values() if len(tensor.shape) == 2)
    here = 2 * sum(each.elements for each in in_blocks)
    sizes = f"({there / 2**20:.1f} MiB of the file, {here / 2**20:.1f} in float16)"
    assert reason in told.message
    assert told.message.endswith(sizes)


@needs_compiler
def test_a_cpu_keeps_unasked_what_is_fast_there_and_names_the_rest(tmp_path: Path) -> None:
    """Blocks that are not packed take several times as long as numbers, but a table's rows are looked up as fast."""
    file = write(tmp_path / "m.gguf", {"attn_v": "Q6_K", "ffn_down": "Q8_0", "token_embd": "Q5_K"}, "Q4_K", tied=False)
    source, config = read_source(str(file)), EngineConfig(str(file), device="cpu")
    spec = build_spec(source)
    plan = plan_blocks(spec, source, "auto", "cpu", refused=decoding_reason(config, spec, "cpu"))
    assert plan.spec.blocks.keys() == {"embed", *(f"layers.{layer}.down" for layer in range(LAYERS))}
    reasons = {each.reason: each.names for each in plan.decoded}
    slower = "is multiplied slower in blocks on a CPU (--quantization gguf keeps it)"
    assert reasons[f"Q4_K, Q6_K {slower}"] == ("layers.0.qkv", "layers.1.qkv")
    assert set(reasons[f"Q4_K {slower}"]) >= {"head", "layers.0.output", "layers.1.gate_up"}
    # A tied table is multiplied, too.
    tied = write(tmp_path / "t.gguf", {"token_embd": "Q5_K"}, "Q4_K")
    source = read_source(str(tied))
    assert not plan_blocks(build_spec(source), source, "auto", "cpu").spec.blocks


def test_info_says_what_is_kept_and_what_is_not(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", {"ffn_down": "Q6_K", "token_embd": "IQ4_NL"}, "Q4_0")
    config = EngineConfig(str(file), device="cpu", dtype="float32", max_model_len=64, cpu_kv_gb=0.1)
    configs = (replace(config, quantization=asked) for asked in ("auto", "gguf", "none"))
    auto, kept, decoded = (describe_model(each, torch.device("cpu"))[0] for each in configs)
    formats = [re.findall(r"(\w+) \d+ MiB", dict(lines).get("blocks", "")) for lines in (auto, kept, decoded)]
    assert formats == [["IQ4_NL", "Q4_0"], ["IQ4_NL", "Q4_0", "Q6_K"], []]
    assert "Q6_K is multiplied slower" in dict(auto)["decoded"]
    assert dict(decoded)["decoded"].startswith("--quantization none was given")
    assert "decoded" not in dict(kept)


def test_a_file_that_drafts_is_kept_likewise(tmp_path: Path) -> None:
    file = mixed(tmp_path / "m.gguf")
    drafting = json.dumps({"model": str(file), "num_speculative_tokens": 2})
    target = build_spec(read_source(str(file)))
    for device in ("cpu", "cuda"):
        config = EngineConfig("target", device=device, max_model_len=64, speculative_config=drafting)
        draft = read_draft_model(resolve(config.validate(), target, device), target)
        assert draft is not None
        assert draft.config.quantization == ("gguf" if device == "cuda" or not target.tie_embeddings else "none")
        assert bool(draft.decoded) == (device == "cpu")
        assert (draft.weights <= 1.1 * file.stat().st_size) == (device == "cuda")


def test_a_model_that_pools_names_its_file_as_decoded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "m.gguf", {}, random.choice(["Q5_1", "Q3_K"]))
    build_model(EngineConfig(str(file), device="cpu", runner="pooling", max_model_len=64)).close()
    assert "a model that pools keeps no blocks; decoded to the model's type: embed, layers.0.qkv" in caplog.text


def test_what_cannot_be_kept_is_refused(
    tmp_path: Path, tiny_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_source(str(tiny_checkpoint("llama")))
    with pytest.raises(ConfigError, match=r"is no \.gguf file"):
        plan_blocks(build_spec(source), source, "gguf", "cpu")
    source = read_source(str(write(tmp_path / "m.gguf", {}, "Q4_0")))
    spec = build_spec(source)
    assert plan_blocks(spec, source, random.choice(["fp8", "w4"]), "cpu").spec is spec
    plan = plan_blocks(spec, source, "gguf", "cuda")
    assert plan.spec.parameter_bytes("bfloat16") < spec.parameter_bytes("bfloat16")
    assert plan.sizes.startswith("Q4_0 ")
    monkeypatch.setattr(cc, "refusal", lambda _: "needs a C compiler (cc), which is not installed")
    with pytest.raises(ConfigError, match="gguf, but its kernel needs a C compiler"):
        plan_blocks(spec, source, "gguf", "cpu")
    with pytest.raises(ConfigError, match="not shared among ranks"):
        plan_blocks(replace(spec, part=object()), source, "gguf", "cpu")  # type: ignore[arg-type]
    pooling = EngineConfig(str(source.path), device="cpu", quantization="gguf", runner="pooling")
    with pytest.raises(ConfigError, match="keeps blocks for models that generate"):
        build_model(pooling)
