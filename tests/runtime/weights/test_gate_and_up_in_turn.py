"""Gate and up of models of few bits with their rows in turn, as they rest on Hopper: on a CPU, whose reference reads
that order too, weights are those of the checkpoint and tokens those of the order of files.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.parallel import test_quantized_cut as cut
from tests.runtime.weights import integer_forms as integers
from tests.runtime.weights.both_ways import random_qwen3
from tests.runtime.weights.integer_forms import FORMATS, write

from stoker_kernels.fragment_gemm import fills_blocks
from stoker_kernels.integer_gemm import dequantize_integers
from stoker_kernels.quant import IntegerWeight
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.weights.layout import WeightArena

CPU = torch.device("cpu")
HIDDEN, FFN = 192, 224  # seven half blocks of gate, and of up
SHAPE = integers.SHAPE | {"hidden_size": HIDDEN, "intermediate_size": FFN}
FORMS = [
    *("awq", "gptq", "gptq-symmetric", "gptq-act-order", "gptq-column", "compressed", "compressed-zeros"),
    *("gptq-8", "compressed-8", "compressed-8-channel"),
]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in fp32 whose gate and up fill blocks together."""
    return random_qwen3(tmp_path_factory.mktemp("dense"), SHAPE, 31)


def as_on_hopper(n: int, k: int, bits: int, group: int, *_: object, gated: bool = False) -> str:
    """`best_layout` of a GPU that has our kernels."""
    if not fills_blocks(n, k, group):
        return "rows"
    return "pairs" if gated else "fragments"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker_runtime.weights.layout.best_layout", as_on_hopper)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_the_checkpoint(dense: Path, tmp_path: Path, form: str) -> None:
    quantized, plain = write(dense, tmp_path, *FORMATS[form])
    for layer, expected in zip(integers.load(quantized).layers, integers.load(plain).layers, strict=True):
        weight = layer.gate_up
        assert isinstance(weight, IntegerWeight)
        assert weight.layout == "pairs"
        assert torch.equal(integers.dense_value(weight), expected.gate_up.data)  # type: ignore[union-attr]


@pytest.mark.parametrize("form", ["awq", "gptq-act-order", "compressed-zeros", "gptq-8"])
def test_tokens_are_those_of_the_order_of_files(
    dense: Path, tmp_path: Path, form: str, paged_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, _ = write(dense, tmp_path, *FORMATS[form])
    prompts, method = [[5, 17, 80, 3, 44], [90, 1, 2, 2, 30, 31, 32, 60, 61]], FORMATS[form][0]["quant_method"]
    plainly = paged_model(str(quantized), quantization=method, max_len=128)
    expected = plainly.greedy(prompts, 48)
    monkeypatch.setattr("stoker_runtime.weights.layout.best_layout", as_on_hopper)
    paired = paged_model(str(quantized), quantization=method, max_len=128)
    layouts = [[layer.gate_up.layout for layer in each.decoder.weights.layers] for each in (plainly, paired)]
    assert layouts == [["rows"] * 2, ["pairs"] * 2]
    assert paired.greedy(prompts, 48) == expected


@pytest.mark.parametrize("rows", [64, 320])
def test_rows_that_are_rounded_together_may_be_of_gate_and_up(
    dense: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At load, by lots that end in the middle of gate, and that hold the last of gate and the first of up."""
    spec, whole = build_spec(read_source(str(dense))), torch.randn(2 * FFN, HIDDEN)
    found = []
    for layout, at_once in ((None, 1 << 24), (as_on_hopper, rows * HIDDEN)):
        if layout is not None:
            monkeypatch.setattr("stoker_runtime.weights.layout.best_layout", layout)
        monkeypatch.setattr("stoker_runtime.weights.layout.ROUNDED_AT_ONCE", at_once)
        arena = WeightArena(spec, CPU, torch.float32, "w4")
        arena.quantize("layers.1.gate_up", whole)
        found.append(arena.integers["layers.1.gate_up"])
    assert [weight.layout for weight in found] == ["rows", "pairs"]
    assert torch.equal(*(dequantize_integers(weight, torch.float32) for weight in found))


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("form", ["awq", "gptq-symmetric", "compressed-zeros", "compressed-8-channel"])
def test_ranks_have_their_own_rows_in_turn(tmp_path: Path, form: str) -> None:
    (tmp_path / "plain").mkdir()
    quantized, exact = write(cut.random_model(tmp_path / "plain"), tmp_path, *FORMATS[form])
    assert [weights.layers[0].gate_up.layout for weights in cut.ranks(quantized)] == ["pairs"] * 2  # type: ignore[union-attr]
    cut.assert_parts_are_alike(quantized, exact)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "layout"),
    [({}, "pairs"), ({"activation": "gelu_tanh"}, "fragments"), ({"ffn_bias": True}, "fragments")],
)  # fmt: skip
def test_what_is_not_swiglu_keeps_its_rows(dense: Path, changes: dict[str, Any], layout: str) -> None:
    spec = build_spec(replace(source := read_source(str(dense)), config=source.config | {"intermediate_size": 256}))
    arena = WeightArena(replace(spec, **changes), CPU, torch.float32, "w4")
    assert arena.integers["layers.0.gate_up"].layout == layout
