"""Every format that weights may be in on a GPU, against the same engine on the CPU, whose oracles are the tests of each
format: logits of prompts, of decodes, and greedy tokens.

Widths are multiples of 128, so that a GPU's own kernels take them and not the general ones alone.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.models import test_fp8_checkpoint as fp8
from tests.runtime.weights import integer_forms as integers
from tests.runtime.weights import mixed_forms as mixed
from tests.runtime.weights import test_block_plan as blocks
from tests.runtime.weights import test_fp4_checkpoint as fp4
from tests.runtime.weights import test_int8_checkpoint as int8
from tests.runtime.weights.both_ways import random_qwen3
from tests.runtime.weights.integer_forms import AWQ_CONFIG, awq, compressed, compressed_config, gptq, gptq_config

from stoker_kernels.quant import BLOCK_FORMATS, IntegerWeight
from stoker_runtime.config import ISQ_KINDS, EngineConfig
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source

SEED = int(os.environ.get("SEED", random.randrange(2**32)))
SHAPE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "eos_token_id": 2,
}  # fmt: skip
PROMPTS = (40, 1, 150)
"""Tokens of each: beside one that is short, some that fill tiles."""
STEPS = 12
TOLERANCE, ROUNDED_TOLERANCE = 0.1, 0.2
"""Of the norm of a row of logits in bfloat16, as in `test_zoo_on_gpu.py`; a token may be so much behind another. More
where activations have eight bits, as a cache may there: a number on the border between two steps falls on either side.
"""
INTEGERS: dict[str, integers.Form] = {
    "awq": (AWQ_CONFIG | {"group_size": 128}, lambda w: awq(w, 128)),
    "awq-64": (AWQ_CONFIG | {"group_size": 64}, lambda w: awq(w, 64)),
    "gptq-symmetric": (gptq_config(128, sym=True), lambda w: gptq(w, 128, zeros=False)),
    "gptq-asymmetric": (gptq_config(128), lambda w: gptq(w, 128)),
    "gptq-act-order": (gptq_config(128, desc_act=True), lambda w: gptq(w, 128, act_order=True)),
    "gptq-8": (gptq_config(128, 8), lambda w: gptq(w, 128, 8)),
    "gptq-8-act-order": (gptq_config(64, 8, desc_act=True), lambda w: gptq(w, 64, 8, act_order=True)),
    "gptq-column": (gptq_config(0), lambda w: gptq(w, 0)),
    "w4a16": (compressed_config(128), lambda w: compressed(w, 128)),
    "w4a16-zeros": (compressed_config(32, zeros=True), lambda w: compressed(w, 32, zeros=True)),
    "w4a16-act-order": (compressed_config(128, actorder="group"), lambda w: compressed(w, 128, act_order=True)),
    "w8a16": (compressed_config(128, 8), lambda w: compressed(w, 128, 8)),
    "w8a16-channel": (compressed_config(0, 8), lambda w: compressed(w, 0, 8)),
}
WRITERS: dict[str, Callable[[Path, Path], Path]] = {}
"""Form → writes a checkpoint of a dense one into a folder."""
ISQ = [kind for kind in ISQ_KINDS if kind != "none"]


def writer(form: integers.Form) -> Callable[[Path, Path], Path]:
    return lambda dense, folder: integers.write(dense, folder, *form)[0]


def fp8_writer(name: str) -> Callable[[Path, Path], Path]:
    def write(dense: Path, folder: Path) -> Path:
        return fp8.write(folder, dense, fp8.quantized(dense, name)[0], fp8.FORMATS[name][0])

    return write


def mixed_writer(schemes: list[mixed.Scheme | None]) -> Callable[[Path, Path], Path]:
    def write(dense: Path, folder: Path) -> Path:
        rng = random.Random(SEED)
        chosen = mixed.choose(schemes, SHAPE["num_hidden_layers"], rng)
        return mixed.write(dense, folder, mixed.compressed_groups(chosen, rng), chosen)[0]

    return write


WRITERS |= {name: writer(form) for name, form in (INTEGERS | fp4.FORMATS).items()}
WRITERS |= {f"fp8-{name}": fp8_writer(name) for name in fp8.FORMATS}
WRITERS["w8a8"] = writer((int8.config(), int8.quantized))
WRITERS["mixed-integers"] = mixed_writer([mixed.packed(128, 4), mixed.packed(64, 8), mixed.packed(64, 4), None])
WRITERS["mixed-activations"] = mixed_writer([mixed.packed(128, 4), mixed.FP8, mixed.INT8, mixed.NVFP4])


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in fp32."""
    print(f"SEED={SEED}")
    return random_qwen3(tmp_path_factory.mktemp("dense"), SHAPE, SEED % 1000)


def method(folder: Path) -> str:
    """What a start makes of `--quantization auto`."""
    spec = build_spec(read_source(str(folder)))
    return resolve(EngineConfig(model=str(folder)), spec, "cpu").quantization


def tolerance_of(model: Any) -> float:
    """By whether any product reads activations in eight bits."""
    kinds = {each.kind for layer in model.decoder.weights.layers for each in layer.linears}
    return ROUNDED_TOLERANCE if kinds & {"fp8_channel", "fp8_block", "int8_channel"} else TOLERANCE


def assert_alike(model: Any, host: Any, vocab: int) -> None:
    """Logits of prompts and of decodes are the host's, and each greedy token is the host's likeliest, or as likely."""
    rng, tolerance = random.Random(SEED), tolerance_of(model)
    prompts = [[rng.randrange(3, vocab) for _ in range(count)] for count in PROMPTS]
    for work in (list(enumerate(prompts)), [(0, [5]), (1, [6]), (2, [7])], [(0, [8]), (2, prompts[0])]):
        for ours, expected in zip(model.step(work), host.step(work), strict=True):
            ours, expected = ours.float().cpu(), expected.float().cpu()
            assert (ours - expected).norm() < tolerance * expected.norm()
    model.forget()
    host.forget()
    found = model.greedy(prompts, STEPS)
    whole = [(slot, prompt + tokens[:-1]) for slot, (prompt, tokens) in enumerate(zip(prompts, found, strict=True))]
    for prompt, tokens, logits in zip(prompts, found, host.step(whole, all_logits=True), strict=True):
        rows = logits.float().cpu()[len(prompt) - 1 :]
        assert len(tokens) == len(rows) == STEPS
        behind = rows.amax(1) - rows[torch.arange(STEPS), torch.tensor(tokens)]
        assert (behind < tolerance * rows.norm(dim=1)).all()
        assert int((behind == 0).sum()) > STEPS // 2


def engines(path: Path, paged_model: Any, quantization: str, host: str, device: str = "cuda") -> tuple[Any, Any]:
    """The model on the device, and on the host with the value `host` of `--quantization`."""
    gpu = paged_model(str(path), quantization=quantization, dtype=torch.bfloat16, device=torch.device(device))
    return gpu, paged_model(str(path), quantization=host, dtype=torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRITERS)
def test_a_checkpoint_gives_the_hosts_logits_and_tokens(
    name: str, dense: Path, tmp_path: Path, paged_model: Any
) -> None:
    folder = WRITERS[name](dense, tmp_path)
    gpu, host = engines(folder, paged_model, method(folder), method(folder))
    if name in INTEGERS and torch.cuda.get_device_capability()[0] == 9:
        weights = [each for layer in gpu.decoder.weights.layers for each in layer.linears]
        own = {each.layout != "rows" for each in weights if isinstance(each, IntegerWeight) and each.bits == 4}
        assert own <= {True}, "four bits of these widths are Hopper's own kernels'"
    assert_alike(gpu, host, SHAPE["vocab_size"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_blocks_give_the_hosts_logits_and_tokens(name: str, tmp_path: Path, paged_model: Any) -> None:
    file = blocks.write(tmp_path / "m.gguf", {}, name)
    gpu, host = engines(file, paged_model, "gguf", "none")
    assert all(each.kind == "blocks" for layer in gpu.decoder.weights.layers for each in layer.linears)
    assert_alike(gpu, host, blocks.VOCAB)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ISQ)
def test_what_is_quantized_at_load_gives_the_hosts_logits_and_tokens(
    kind: str, dense: Path, paged_model: Any
) -> None:
    gpu, host = engines(dense, paged_model, kind, kind)
    assert all(each.kind != "dense" for layer in gpu.decoder.weights.layers for each in layer.linears)
    assert_alike(gpu, host, SHAPE["vocab_size"])


def test_another_checkpoint_is_not_alike(dense: Path, tmp_path: Path, paged_model: Any) -> None:
    """What the others hold on to: one matrix of another scale is noticed, and the same model is not."""
    folder = WRITERS["mixed-integers"](dense, tmp_path)
    one, other = engines(folder, paged_model, method(folder), method(folder), device="cpu")
    assert_alike(one, other, SHAPE["vocab_size"])
    one.forget()
    other.forget()
    weight = one.decoder.weights.layers[0].down
    (weight.data if weight.kind == "dense" else weight.scale).mul_(1.5)
    with pytest.raises(AssertionError):
        assert_alike(one, other, SHAPE["vocab_size"])
