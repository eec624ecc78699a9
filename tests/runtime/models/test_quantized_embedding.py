"""An embedding in Q8_0 by `--quantize-embedding`: what it gives and takes, what a tied head becomes, who is refused."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from stoker_kernels.block_gemm import block_rows
from stoker_kernels.launch import cc
from stoker_kernels.quant import BlockWeight, LinearWeight
from stoker_runtime.bench.engine_mode import default_tolerance
from stoker_runtime.bench.rounds import Work, run_round
from stoker_runtime.bench.verify import verify_greedy
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.build import build_model
from stoker_runtime.executor.executor import Executor
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.terminal.info import describe_model
from stoker_runtime.weights.block_plan import plan_blocks

CPU = torch.device("cpu")
Checkpoint = Callable[[str], Path]
UNCOMPILED = cc.refusal("cpu_blocks")
needs_compiler = pytest.mark.skipif(UNCOMPILED is not None, reason=f"blocks on a CPU: {UNCOMPILED}")


def rounded(values: Tensor) -> Tensor:
    """What Q8_0 leaves of rows, by the gguf package."""
    kind = gguf.GGMLQuantizationType.Q8_0
    return torch.from_numpy(gguf.dequantize(gguf.quantize(values.float().numpy(), kind), kind))


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
@pytest.mark.parametrize("quantization", ["none", "fp8", "q8_0"])
def test_logits_are_those_of_a_rounded_table(
    name: str, quantization: str, tiny_checkpoint: Checkpoint, reference_model: Any, paged_model: Any
) -> None:
    ids = torch.randint(3, 128, (31,)).tolist()
    folder = str(tiny_checkpoint(name))
    model = paged_model(folder, quantization=quantization, embedding="q8_0")
    theirs = copy.deepcopy(reference_model(name))  # which other tests have, too
    table = model.decoder.weights.embed
    assert isinstance(table, BlockWeight)
    exact = theirs.model.embed_tokens.weight.detach()
    expected = rounded(exact)
    every = torch.arange(len(exact), dtype=torch.int32)
    assert torch.equal(block_rows(every, table, torch.float32), expected)
    head = model.decoder.weights.head
    assert (head is table) == (name == "llama-tied")
    assert isinstance(head, BlockWeight if name == "llama-tied" else LinearWeight)
    if quantization != "none":
        return
    with torch.no_grad():
        theirs.model.embed_tokens.weight.copy_(expected)
        if name == "llama-tied":
            theirs.lm_head.weight = theirs.model.embed_tokens.weight
        logits = theirs(torch.tensor([ids])).logits[0]
    (got,) = model.step([(0, ids)], all_logits=True)
    torch.testing.assert_close(got, logits, atol=2e-3, rtol=2e-3)


@needs_compiler
def test_a_file_s_embedding_becomes_another_one(tmp_path: Path) -> None:
    """Of a GGUF file's own blocks the numbers are rounded; the rest stays as it was planned."""
    from tests.runtime.weights.test_block_plan import write

    file = write(tmp_path / "model.gguf", {"token_embd": "Q4_K"}, "Q6_K")
    source = read_source(str(file))
    spec = build_spec(source)
    plain = plan_blocks(spec, source, "gguf", "cpu")
    plan = plan_blocks(spec, source, "gguf", "cpu", embedding="q8_0")
    assert {part.format for part in plain.spec.blocks["embed"]} == {"Q4_K"}
    assert {part.format for part in plan.spec.blocks["embed"]} == {"Q8_0"}
    assert plan.spec.made == {"embed"}
    others = {name: parts for name, parts in plan.spec.blocks.items() if name != "embed"}
    assert others == {name: parts for name, parts in plain.spec.blocks.items() if name != "embed"}
    decoded = plan_blocks(spec, source, "none", "cpu", embedding="q8_0")
    assert decoded.spec.blocks.keys() == {"embed"}
    assert all("embed" not in each.names for each in decoded.decoded)
    whole = plan_blocks(spec, source, "none", "cpu").decoded
    assert any("embed" in each.names for each in whole)


@needs_compiler
@pytest.mark.parametrize("tied", [False, True])
def test_memory_is_the_table_in_blocks(tied: bool) -> None:
    source = read_source("shape:qwen3-0.6b")
    plain = replace(build_spec(source), tie_embeddings=tied)
    made = plan_blocks(plain, source, "none", "cuda", embedding="q8_0").spec
    saved = plain.parameter_bytes("bfloat16") - made.parameter_bytes("bfloat16")
    assert saved == plain.vocab * (2 * plain.hidden - plain.hidden // 256 * 272)
    config = EngineConfig(
        "shape:qwen3-0.6b", device="cpu", dtype="bfloat16", max_model_len=64, quantize_embedding="q8_0"
    )
    lines = dict(describe_model(config, CPU)[0])
    assert lines["blocks"].startswith("Q8_0 ")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"embedding_multiplier": 12.0}, "scales its table"),
        ({"hidden": 1000}, "rows of 1000 fill no blocks of 32"),
        ({"part": object()}, "several ranks share the table"),
    ],
)
def test_a_table_that_cannot_be_in_blocks_is_refused(changes: dict[str, Any], says: str) -> None:
    source = read_source("shape:tiny")
    spec = build_spec(source)
    with pytest.raises(ConfigError, match=says) as raised:
        plan_blocks(replace(spec, **changes), source, "none", "cuda", embedding="q8_0")
    assert raised.value.param == "quantize_embedding"


@pytest.mark.parametrize(
    ("says", "fields"),
    [
        ("quantize_embedding is 'q5_1'; it must be one of none, q8_0", {"quantize_embedding": "q5_1"}),
        ("weights in blocks", {"batch_invariant": True}),
        ("makes blocks for models that generate", {"runner": "pooling"}),
    ],
)
@needs_compiler
def test_what_cannot_go_with_it_is_refused(says: str, fields: dict[str, Any]) -> None:
    given = {"model": "shape:tiny", "device": "cpu", "max_model_len": 64, "quantize_embedding": "q8_0", **fields}
    with pytest.raises(ConfigError, match=says):
        build_model(EngineConfig(**given).validate())


@pytest.mark.parametrize(
    ("device", "shape"),
    [
        pytest.param("cpu", "tiny", marks=needs_compiler),
        pytest.param("cuda", "qwen3-0.6b", marks=pytest.mark.gpu),
        pytest.param("cuda", "qwen2.5-7b@2", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("more", [{}, {"quantize_head": "fp8"}, {"isq": "w4"}], ids=["alone", "head", "layers"])
def test_tokens_are_the_reference_s(device: str, shape: str, more: dict[str, Any]) -> None:
    """Tied (0.6B) and not (7B), beside a head and layers that become something else."""
    config = EngineConfig(
        f"shape:{shape}", device=device, max_model_len=256, gpu_memory_utilization=0.3, quantize_embedding="q8_0",
        dtype="bfloat16" if device == "cuda" else "float32", enable_prefix_caching=False, **more,
    )  # fmt: skip
    executor = build_model(config.validate())
    assert isinstance(executor, Executor)
    executor.capture()
    assert isinstance(executor.decoder.weights.embed, BlockWeight)
    loop = StepLoop(executor, executor.config)
    found = run_round(loop, Work.fixed(3, 40, 20), executor.vocab_size, random.randrange(1 << 20))
    decoder, sequences = executor.decoder, list(zip(found.prompts, found.outputs, strict=True))
    verdict = verify_greedy(decoder.spec, decoder.weights, sequences, default_tolerance(executor.config), 256)
    assert verdict.passed, verdict
