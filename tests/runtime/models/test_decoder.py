"""The decoder against transformers, through pages: same logits, same greedy tokens, any way of cutting a prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.models.greedy import assert_greedy
from torch import Tensor

from stoker_kernels.activation import silu_and_mul
from stoker_kernels.gemm import linear, linear_silu_mul
from stoker_kernels.launch import dispatch
from stoker_kernels.launch.pdl import enable_pdl
from stoker_kernels.quant import LinearWeight, Quantized, dequantize, quantize_fp8, quantize_weight
from stoker_runtime.models import decoder
from stoker_runtime.models.decoder_weights import DecoderWeights

NAMES = [
    "llama",
    "llama-sharded",
    "llama-tied",
    "llama-bias",
    "llama-linear",
    "mistral",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen2-yarn",
    "qwen3",
]
Checkpoint = Callable[[str], Path]


def _prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in (1, 37, 16, 5, 70)]


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_ragged_batch_equal_transformers(
    name: str, tiny_checkpoint: Checkpoint, reference_model: Callable[[str], Any], paged_model: Any
) -> None:
    ours = paged_model(str(tiny_checkpoint(name))).step(list(enumerate(_prompts())), all_logits=True)
    for prompt, logits in zip(_prompts(), ours, strict=True):
        with torch.no_grad():
            expected = reference_model(name)(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_equal_transformers_over_64_steps(
    name: str, tiny_checkpoint: Checkpoint, reference_model: Callable[[str], Any], paged_model: Any
) -> None:
    prompts = _prompts()[1:4]
    ours = paged_model(str(tiny_checkpoint(name))).greedy(prompts, 64)
    for prompt, tokens in zip(prompts, ours, strict=True):
        assert_greedy(tokens, reference_model(name), prompt, 2e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "qwen3"])
def test_a_prompt_in_chunks_equals_the_prompt_at_once(name: str, tiny_checkpoint: Checkpoint, paged_model: Any) -> None:
    prompt, other = _prompts()[4], _prompts()[1]
    model = paged_model(str(tiny_checkpoint(name)))
    whole = model.step([(0, prompt)])[0]
    # The chunks share their steps with another sequence's prefill and decodes.
    model.step([(1, prompt[:33]), (2, other)])
    model.step([(2, [9]), (1, prompt[33:34])])
    model.step([(1, prompt[34:60]), (2, [11])])
    chunked = model.step([(2, [10]), (1, prompt[60:])])[1]
    torch.testing.assert_close(chunked, whole, atol=2e-4, rtol=1e-4)


def test_fp8_equals_its_definition(
    tiny_checkpoint: Checkpoint, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompt = str(tiny_checkpoint("qwen2")), _prompts()[4]
    quantized = paged_model(path, quantization="fp8").step([(0, prompt)], all_logits=True)[0]
    plain = paged_model(path).step([(0, prompt)], all_logits=True)[0]

    def by_definition(
        x: Tensor, weight: LinearWeight, *, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Weights per output channel and activations per token through e4m3; the output head stays as it is."""
        if weight.out_features != 128:
            x_rounded = quantize_fp8(x)
            x = x_rounded.data.float() * x_rounded.scale
            weight = LinearWeight(dequantize(quantize_weight(weight.data, "fp8_channel")))
        return linear(x, weight, bias=bias, out=out)

    monkeypatch.setattr(decoder, "linear", by_definition)
    monkeypatch.setattr(decoder, "linear_silu_mul", lambda x, weight: silu_and_mul(by_definition(x, weight)))
    expected = paged_model(path).step([(0, prompt)], all_logits=True)[0]
    # A value on the edge between two e4m3 numbers may fall either way.
    assert (quantized - expected).norm() < 0.02 * expected.norm()
    assert (quantized - plain).norm() > 0.05 * plain.norm()


def test_the_feed_forward_is_linear_and_activation_to_the_bit(
    tiny_checkpoint: Checkpoint, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, prompt = str(tiny_checkpoint("qwen2")), _prompts()[4]
    by_op = paged_model(path).step([(0, prompt)], all_logits=True)[0]
    assert dispatch.chosen()["linear_silu_mul"] == "split"
    calls = []

    def by_hand(x: Tensor, weight: LinearWeight) -> Tensor:
        calls.append(weight)
        return silu_and_mul(linear(x, weight))

    monkeypatch.setattr(decoder, "linear_silu_mul", by_hand)
    assert torch.equal(paged_model(path).step([(0, prompt)], all_logits=True)[0], by_op)
    assert calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_quantized_feed_forward_keeps_the_models_dtype(
    dtype: torch.dtype, tiny_checkpoint: Checkpoint, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = []

    def recorded(x: Quantized, weight: LinearWeight) -> Tensor | Quantized:
        inputs.append(x)
        return linear_silu_mul(x, weight)

    monkeypatch.setattr(decoder, "linear_silu_mul", recorded)
    model = paged_model(str(tiny_checkpoint("qwen2")), dtype=dtype, quantization="fp8")
    model.step([(0, _prompts()[4])])
    # `linear_silu_mul` of quantized values rounds to bf16 in between; other models take two kernels.
    assert [type(x) for x in inputs] == ([Quantized] * model.spec.num_layers if dtype == torch.bfloat16 else [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_single(dtype: torch.dtype, tiny_checkpoint: Checkpoint, paged_model: Any) -> None:
    path, prompt = str(tiny_checkpoint("qwen3")), _prompts()[4]
    exact = paged_model(path).step([(0, prompt)], all_logits=True)[0]
    half = paged_model(path, dtype=dtype).step([(0, prompt)], all_logits=True)[0]
    assert half.dtype == dtype
    assert (half.float() - exact).norm() < 0.1 * exact.norm()


def test_an_fp8_cache_stays_near_a_full_one(tiny_checkpoint: Checkpoint, paged_model: Any) -> None:
    path, prompt = str(tiny_checkpoint("llama")), _prompts()[4]
    exact = paged_model(path).step([(0, prompt)], all_logits=True)[0]
    model = paged_model(path, kv_dtype=torch.float8_e4m3fn)
    rounded = model.step([(0, prompt)], all_logits=True)[0]
    assert 0.0 < (rounded - exact).norm() < 0.2 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("shape", ["qwen2.5-1.5b", "qwen3-0.6b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_the_gpu_gives_the_logits_of_the_reference(shape: str, quantization: str, paged_model: Any) -> None:
    """Random weights of a real shape, few layers: every kernel at the sizes that it serves."""
    from stoker_runtime.models.config_source import read_source
    from stoker_runtime.weights.load import load_weights

    gpu = torch.device("cuda")
    model = paged_model(f"shape:{shape}", device=gpu, dtype=torch.bfloat16, layers=3, quantization=quantization)
    host = paged_model(f"shape:{shape}", dtype=torch.bfloat16, layers=3, quantization=quantization)
    theirs = load_weights(read_source(f"shape:{shape}"), model.spec, gpu, torch.bfloat16, quantization)
    host.decoder.weights = _to_host(theirs)
    prompts = [[3 + (7 * i * slot + i) % 1000 for i in range(length)] for slot, length in enumerate((40, 1, 150))]
    # W8A8 rounds activations to 3 bits: a bf16 rounding apart, a value may fall into the next of them, 6 to 12% away.
    tolerance = 0.03 if quantization == "none" else 0.15
    # Of two experts that a router finds as good, rounding chooses: a fraction of the layer's output.
    tolerance *= 1 if model.spec.moe is None else 3
    for work in (list(enumerate(prompts)), [(0, [5]), (1, [6]), (2, [7])], [(0, [8]), (2, list(range(20)))]):
        for ours, expected in zip(model.step(work), host.step(work), strict=True):
            assert (ours.cpu().float() - expected.float()).norm() < tolerance * expected.float().norm()


@pytest.fixture
def dependent_launches() -> Iterator[None]:
    """Kernels start while their predecessors drain, as they do in an engine."""
    enable_pdl(True)
    yield
    enable_pdl(False)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("shape", ["qwen2.5-1.5b", "qwen3-0.6b"])
def test_any_way_through_a_gpu_gives_the_logits_of_one_prompt(
    shape: str, quantization: str, kv_dtype: torch.dtype | None, paged_model: Any, dependent_launches: None
) -> None:
    """Random mixes of decodes and chunks of many lengths, back to back, twice: the same bit for bit, and at the end
    near what each sequence gives as one prompt of its own.
    """
    mixed, again, whole = (
        paged_model(
            f"shape:{shape}", device=torch.device("cuda"), dtype=torch.bfloat16, kv_dtype=kv_dtype, layers=3,
            quantization=quantization, max_len=1024,
        )
        for _ in range(3)
    )  # fmt: skip
    vocab = mixed.spec.vocab
    tolerance = 0.03 if quantization == "none" and kv_dtype is None else 0.15
    for seed in range(12):
        rng = random.Random(seed)
        tokens: list[list[int]] = [[] for _ in range(6)]
        last: dict[int, Tensor] = {}
        for model in (mixed, again, whole):
            model.forget()
        for _ in range(12):
            work = [
                (slot, [rng.randrange(vocab) for _ in range(rng.choice([1, 1, 1, 2, 7, 20, 40, 65]))])
                for slot in rng.sample(range(6), rng.randint(1, 6))
            ]
            for (slot, ids), first, second in zip(work, mixed.step(work), again.step(work), strict=True):
                assert torch.equal(first, second), f"seed {seed}, rows of {[len(ids) for _, ids in work]}"
                tokens[slot] += ids
                last[slot] = first.float()
        for slot, ours in last.items():
            expected = whole.step([(slot, tokens[slot])])[0].float()
            difference = float((ours - expected).norm() / expected.norm())
            assert difference < tolerance, f"seed {seed}, slot {slot} of {len(tokens[slot])} tokens: {difference:.3f}"


def _to_host(weights: DecoderWeights) -> DecoderWeights:
    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.cpu()
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{field.name: move(getattr(value, field.name)) for field in fields(value)})
        return value

    layers = tuple(move(layer) for layer in weights.layers)
    return DecoderWeights(move(weights.embed), layers, move(weights.final_norm), move(weights.head))
