"""An output head in 8 bits by `--quantize-head`: what it gives and takes, how it is cut, where it is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stoker_kernels.launch import dispatch
from stoker_kernels.quant import LinearWeight, quantize_weight
from stoker_runtime.bench.engine_mode import default_tolerance
from stoker_runtime.bench.reference.model import reference_logits
from stoker_runtime.bench.rounds import Work, run_round
from stoker_runtime.bench.verify import verify_greedy
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.build import build_model
from stoker_runtime.executor.executor import Executor
from stoker_runtime.executor.resolve import head_bytes, resolve, workspace_bytes
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.quantized_head import with_head
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import places
from stoker_runtime.terminal.info import describe_model
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
Checkpoint = Callable[[str], Path]


def rounded(values: Tensor) -> Tensor:
    """Rows in e4m3 under a scale each, as numbers: by torch's own conversion."""
    scale = values.abs().amax(1, keepdim=True) / 448
    return (values / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_logits_are_those_of_both_sides_in_8_bits(
    name: str, tiny_checkpoint: Checkpoint, reference_model: Any, paged_model: Any
) -> None:
    ids = torch.randint(3, 128, (29,)).tolist()
    model = paged_model(str(tiny_checkpoint(name)), head="fp8")
    (got,) = model.step([(0, ids)], all_logits=True)
    theirs = reference_model(name)
    with torch.no_grad():
        states = theirs.model(torch.tensor([ids])).last_hidden_state[0]
    expected = rounded(states) @ rounded(theirs.lm_head.weight.detach()).t()
    # Two right states may round to neighbours, a sixteenth apart, here and there.
    apart = (got - expected).abs()
    assert float(apart.mean()) < 0.002 * float(expected.std())
    assert float(apart.max()) < 0.1 * float(expected.std())
    mine = reference_logits(model.spec, model.decoder.weights, ids, 0)
    assert float((got - mine).abs().mean()) < 0.05 * float(expected.std())


@pytest.mark.parametrize("tied", [False, True])
def test_memory_is_the_head_in_8_bits_beside_a_table_in_16(tied: bool) -> None:
    plain = replace(build_spec(read_source("shape:tiny")), tie_embeddings=tied)
    spec = with_head(plain, "fp8")
    arena, before = (WeightArena(each, CPU, torch.bfloat16, "none") for each in (spec, plain))
    # 260 rows of 64 columns, and a scale each, in places of 256 bytes; the table that is shared no more.
    head = 260 * 64 + 1280
    assert (
        arena.num_bytes == spec.parameter_bytes("bfloat16") == before.num_bytes + head - (0 if tied else 2 * 260 * 64)
    )
    weights = arena.assemble()
    assert isinstance(weights.embed, Tensor)
    assert (weights.embed.dtype, weights.head.kind) == (torch.bfloat16, "fp8_channel")
    assert with_head(plain, "none") is plain


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_have_their_rows_of_the_same_head(tied: bool, stages: int, tiny_checkpoint: Checkpoint) -> None:
    for name in ("shape:tiny", str(tiny_checkpoint("llama-tied" if tied else "llama"))):
        source = read_source(name)
        spec = with_head(replace(build_spec(source), tie_embeddings=tied), "fp8")
        whole = load_weights(source, spec, CPU, torch.float32)
        assert isinstance(whole.head, LinearWeight)
        if tied and isinstance(whole.embed, Tensor):
            assert torch.equal(whole.head.data, quantize_weight(whole.embed, "fp8_channel").data)
        at = 0
        for place in places(2, stages):
            cut = Cut(spec, place)
            mine = load_weights(source, cut.spec, CPU, torch.float32, cut=cut)
            head = mine.head
            assert isinstance(head, LinearWeight)
            if not place.is_last:
                assert head.out_features == 0
                continue
            rows = slice(at, at + head.out_features)
            assert torch.equal(head.data, whole.head.data[rows])
            assert head.scale is not None
            assert whole.head.scale is not None
            assert torch.equal(head.scale, whole.head.scale[rows])
            at = rows.stop
            assert isinstance(mine.embed, Tensor)
            # A last stage looks nothing up: of a tied head that stands apart it needs no table.
            assert len(mine.embed) == (head.out_features if place.is_first else 0)
        assert at == spec.vocab


def test_what_is_said_of_it() -> None:
    config = EngineConfig("shape:qwen3-0.6b", device="cpu", dtype="bfloat16", max_model_len=64, quantize_head="fp8")
    lines = dict(describe_model(config, CPU)[0])
    # 151,936 rows of 1,024 columns.
    assert lines["output head"] == (
        "fp8, 0.15 GiB of the weights; the embedding that it was tied to keeps 0.29 GiB for lookups"
    )
    assert "output head" not in dict(describe_model(replace(config, quantize_head="none"), CPU)[0])


def refused(problem: str, **fields: Any) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        build_model(EngineConfig(**{"model": "shape:tiny", "device": "cpu", "quantize_head": "fp8", **fields}))
    assert raised.value.param == "quantize_head"


def test_what_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    refused("quantize_head is 'int5'; it must be one of none, fp8", quantize_head="int5")
    refused("keeps the head in the file's blocks", quantization="gguf")
    refused("pools has no output head", runner="pooling")

    target = dispatch.Target("cuda", 80, torch.float8_e4m3fn)

    def absent(*_: Any) -> None:
        raise dispatch.KernelUnavailable("linear", target, {"cublas": "needs sm_89"})

    monkeypatch.setattr(dispatch, "require", absent)
    refused("this device does not multiply: .*needs sm_89")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_plan_counts_what_the_products_take(dtype: str) -> None:
    spec = build_spec(read_source("shape:qwen3-0.6b"))
    asked = EngineConfig("shape:qwen3-0.6b", dtype=dtype, max_num_seqs=300, max_model_len=512)
    plain = resolve(asked, spec, "cuda")
    head = with_head(spec, "fp8")
    sums = 0 if dtype == "bfloat16" else 2 * 151936
    assert head_bytes(plain, head, 300) == 300 * (1024 + 4 + sums)
    assert head_bytes(plain, spec, 300) == 0
    assert workspace_bytes(plain, head) > workspace_bytes(plain, spec)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "fp8", "w4"])
def test_tokens_on_a_gpu_are_the_references(quantization: str) -> None:
    config = EngineConfig(
        "shape:qwen3-0.6b", max_model_len=512, gpu_memory_utilization=0.3, quantization=quantization,
        quantize_head="fp8",
    )  # fmt: skip
    executor = build_model(config)
    assert isinstance(executor, Executor)
    work = Work.fixed(5, 40, 60)
    done = run_round(StepLoop(executor, executor.config), work, executor.vocab_size, seed=3)
    sequences = list(zip(done.prompts, done.outputs, strict=True))
    decoder = executor.decoder
    verdict = verify_greedy(decoder.spec, decoder.weights, sequences, default_tolerance(executor.config))
    executor.close()
    assert verdict.passed, verdict
