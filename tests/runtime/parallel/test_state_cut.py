"""Layers with a state cut into ranks: every value is where its heads are, whatever checkpoint it comes from; what a
rank keeps of a sequence; and what cannot be cut is refused by name.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.models import test_nemotron_mixtures as nemotron
from tests.runtime.models import test_quantized_hybrid as qwen
from tests.runtime.models.test_zoo import SEED, save_random
from torch import Tensor

from stoker_kernels.quant import AnyWeight
from stoker_runtime.bench.reference.mixture import expert_values
from stoker_runtime.bench.reference.weights import values_of
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.arena import state_arena
from stoker_runtime.executor.resolve import resolve, resolve_quantization
from stoker_runtime.executor.state import sequence_state_bytes
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.layer_specs.state_spec import Mixer, StateSpec
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import Place, places
from stoker_runtime.parallel.split import split_spec
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
EVEN = {"hidden_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 60, "head_dim": 20}
MAMBA = EVEN | {"mamba_num_heads": 8, "mamba_head_dim": 6, "ssm_state_size": 10, "n_groups": 4}
DELTA = EVEN | {
    "linear_num_key_heads": 2, "linear_num_value_heads": 12, "linear_key_head_dim": 10, "linear_value_head_dim": 6,
    "head_dim": 24, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 20,
}  # fmt: skip
DENSE_DELTA = {key: value for key, value in DELTA.items() if not key.startswith(("moe_", "shared_"))}
GRANITE = {
    "hidden_size": 72, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_head": 18,
    "shared_intermediate_size": 28,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "groups": ("NemotronHForCausalLM", MAMBA, 2),
    "shared-group": ("NemotronHForCausalLM-biased", MAMBA | {"n_groups": 2}, 4),
    "key-heads": ("Qwen3NextForCausalLM", DELTA, 2),
    "shared-key-heads": ("Qwen3NextForCausalLM", DELTA, 4),
    "tensors-apart": ("Qwen3_5MoeForConditionalGeneration", DELTA, 2),
    "shared-key-heads-apart": ("Qwen3_5ForCausalLM", DENSE_DELTA, 4),
    "granite": ("GraniteMoeHybridForCausalLM-dense", GRANITE, 4),
}


def load(folder: Path | str, place: Place | None = None) -> DecoderWeights:
    source = read_source(str(folder))
    spec = build_spec(source)
    quantization = resolve_quantization("auto", spec)
    cut = Cut(spec, place) if place is not None else None
    return load_weights(source, cut.spec if cut else spec, CPU, torch.float32, quantization, cut=cut)


def rows(things: Iterable[int], size: int, first: int = 0) -> Tensor:
    """The rows of things of `size` rows each, counted from row `first`."""
    return torch.cat([torch.arange(size) + first + each * size for each in things])


def own_rows(state: StateSpec, place: Place) -> dict[str, Tensor]:
    """Which rows of each field a rank has, head by head."""
    each, per_group = state.heads // place.tensors, state.heads // state.groups
    heads = range(place.tensor * each, (place.tensor + 1) * each)
    groups = sorted({head // per_group for head in heads})
    inner, keys = state.heads * state.head_dim, state.groups * state.size
    mamba = state.kind is Mixer.MAMBA2
    if mamba:
        conv = [(heads, state.head_dim), (groups, state.size), (groups, state.size)]
        sizes = [inner, keys, keys]
        read, lengths = [(heads, state.head_dim), *conv, (heads, 1)], [inner, *sizes, state.heads]
    else:
        conv = [(groups, state.size), (groups, state.size), (heads, state.head_dim)]
        sizes = [keys, keys, inner]
        read, lengths = [*conv, (heads, state.head_dim), (heads, 1), (heads, 1)], [*sizes, inner, *[state.heads] * 2]

    def behind(parts: list[tuple[Any, int]], sizes: list[int]) -> Tensor:
        starts = [sum(sizes[:at]) for at in range(len(sizes))]
        return torch.cat([rows(*part, first) for part, first in zip(parts, starts, strict=True)])

    return {
        "in": behind(read, lengths), "conv": behind(conv, sizes), "heads": rows(heads, 1),
        "out": rows(heads, state.head_dim),
    }  # fmt: skip


def numbers(weight: AnyWeight | None) -> Tensor:
    assert weight is not None
    return values_of(weight)


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_has_the_rows_of_its_heads_and_their_groups(name: str, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    row, sizes, tensors = MODELS[name]
    save_random(row, tmp_path, **sizes)
    whole, spec = load(tmp_path), build_spec(read_source(str(tmp_path)))
    state = spec.recurrent
    assert state is not None
    for place in places(tensors, 1):
        mine, own = load(tmp_path, place), own_rows(state, place)
        for layer, theirs in zip(mine.layers, whole.layers, strict=True):
            if layer.state is None or theirs.state is None:
                continue
            assert torch.equal(numbers(layer.qkv), numbers(theirs.qkv)[own["in"]])
            assert torch.equal(numbers(layer.output), numbers(theirs.output)[:, own["out"]])
            assert torch.equal(layer.state.conv, theirs.state.conv[own["conv"]])
            norm = theirs.state.norm if state.kind is Mixer.GATED_DELTA else theirs.state.norm[own["out"]]
            assert torch.equal(layer.state.norm, norm)
            for field in ("a_log", "dt_bias", "skip"):
                given, expected = getattr(layer.state, field), getattr(theirs.state, field)
                assert given is expected is None or torch.equal(given, expected[own["heads"]])
            if theirs.qkv_bias is not None:
                assert layer.qkv_bias is not None
                assert torch.equal(layer.qkv_bias, theirs.qkv_bias[own["in"]])
                assert (layer.output_bias is None) == (place.tensor > 0)
            if theirs.state.conv_bias is not None:
                assert layer.state.conv_bias is not None
                assert torch.equal(layer.state.conv_bias, theirs.state.conv_bias[own["conv"]])


@pytest.mark.parametrize("name", MODELS)
def test_what_is_drawn_is_cut_as_what_is_read(name: str, tmp_path: Path) -> None:
    """Of random weights, too, a rank has what one rank alone would draw for its heads."""
    row, sizes, tensors = MODELS[name]
    save_random(row, tmp_path, **sizes)
    spec = build_spec(read_source(str(tmp_path)))
    state, generator = spec.recurrent, torch.Generator().manual_seed(9)
    assert state is not None
    layer = state.mixers.index(state.kind)
    drawn = {each.name: torch.randn(each.shape, generator=generator) for each in spec.layer_parameters(layer)}
    for place in places(tensors, 1):
        cut, own = Cut(spec, place), own_rows(state, place)
        shapes = {each.name: each.shape for each in cut.spec.layer_parameters(layer)}
        for field, rows_of in (("state_in", "in"), ("conv", "conv"), ("a_log", "heads")):
            part = cut.values(f"layers.{layer}.{field}", drawn[f"layers.{layer}.{field}"])
            assert torch.equal(part, drawn[f"layers.{layer}.{field}"][own[rows_of]])
            assert part.shape == shapes[f"layers.{layer}.{field}"]


# Sizes of which each of two ranks has whole blocks, groups and words.
ODD = qwen.ODD | {
    "linear_num_value_heads": 16, "linear_value_head_dim": 8, "head_dim": 32, "shared_expert_intermediate_size": 128,
}  # fmt: skip
WHOLE = qwen.WHOLE | {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 256}


def write_qwen(form: str, folder: Path) -> tuple[Path, Path]:
    sizes, config, quantize, gates_left = qwen.FORMATS[form]
    return qwen.write(folder, (WHOLE if sizes is qwen.WHOLE else ODD, config, quantize, gates_left))


def write_nemotron(form: str, folder: Path) -> tuple[Path, Path]:
    return nemotron.write(folder, form)


FORMS: list[tuple[Callable[[str, Path], tuple[Path, Path]], str]] = [
    *((write_qwen, form) for form in qwen.FORMATS), *((write_nemotron, form) for form in nemotron.FORMATS)
]  # fmt: skip


@pytest.mark.parametrize(("write", "form"), FORMS, ids=[f"{write.__name__}-{form}" for write, form in FORMS])
@pytest.mark.parametrize("whole_experts", [False, True])
def test_quantized_checkpoints_are_cut_as_their_numbers(
    write: Callable[[str, Path], tuple[Path, Path]], form: str, whole_experts: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A rank's part of codes and scales stands for its part of the numbers that the whole's stand for."""
    sizes = {"mamba_num_heads": 16, "mamba_head_dim": 8, "moe_intermediate_size": 128}
    for key, value in sizes.items():
        monkeypatch.setitem(nemotron.SIZES, key, value)
    quantized, plain = write(form, tmp_path)
    narrow = 0
    for place in places(2, 1, whole_experts=whole_experts):
        ours, theirs = load(quantized, place), load(plain, place)
        for layer, exact in zip(ours.layers, theirs.layers, strict=True):
            # What delta nets learn and forget by may be a matrix of its own, or the last rows of another.
            gates = [] if layer.state is None or layer.state.gates is None else [numbers(layer.state.gates)]
            for got, wanted in zip(layer.linears, exact.linears, strict=True):
                found = torch.cat([numbers(got), *(gates if got is layer.qkv else [])])
                torch.testing.assert_close(found.float(), numbers(wanted), rtol=1e-6, atol=1e-9)
                narrow += getattr(got, "kind", "int4") != "dense"
            if layer.mixture is None or exact.mixture is None:
                continue
            for expert in range(exact.mixture.experts.experts):
                pair = (expert_values(each.mixture.experts, expert) for each in (layer, exact) if each.mixture)
                for got_values, wanted_values in zip(*pair, strict=True):
                    torch.testing.assert_close(got_values, wanted_values, rtol=1e-6, atol=1e-9)
    assert narrow > 0


def spec_of(shape: str, **changes: Any) -> ModelSpec:
    spec = build_spec(read_source(f"shape:{shape}"))
    assert spec.recurrent is not None
    return replace(spec, recurrent=replace(spec.recurrent, **changes))


@pytest.mark.parametrize(
    ("spec", "tensors", "message"),
    [
        (spec_of("nemotron-h-8b", heads=120, groups=8), 16, "mamba_num_heads is 120; .* work .*: 1, 2, 4, 8\\."),
        (spec_of("nemotron-h-8b", heads=96, groups=6), 4, "n_groups is 6, neither a multiple nor a divisor"),
        (spec_of("qwen3-next-80b-a3b", heads=24, groups=12), 16, "linear_num_value_heads is 24"),
        (spec_of("qwen3-next-80b-a3b", heads=32, groups=32), 32, "num_attention_heads is 16"),
        (spec_of("qwen3-next-80b-a3b-fp8", head_dim=72), 4, "state_in would be cut at 576, within its FP8 blocks of"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_sizes_that_work(
    spec: ModelSpec, tensors: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        split_spec(spec, Place(0, tensors, 1))


@pytest.mark.parametrize("shape", ["nemotron-h-8b", "qwen3-next-80b-a3b"])
@pytest.mark.parametrize(("tensors", "stages"), [(2, 1), (8, 1), (1, 3), (2, 2)])
def test_ranks_keep_of_a_sequence_what_the_model_keeps(shape: str, tensors: int, stages: int) -> None:
    """In their own layers and heads; groups that several ranks have are kept by each."""
    whole = build_spec(read_source(f"shape:{shape}"))
    config = resolve(EngineConfig(model=f"shape:{shape}", dtype="bfloat16"), whole, "cpu")
    held = 0
    for place in places(tensors, stages):
        part = split_spec(whole, place)
        states = state_arena(2, part, torch.bfloat16, CPU)
        assert 2 * sequence_state_bytes(config, part) == sum(state.nbytes for state in states)
        held += sequence_state_bytes(config, part)
    assert held == sequence_state_bytes(config, whole)


def test_ranks_agree_on_how_many_sequences_there_are() -> None:
    """Stages have other numbers of layers with a state; what fits the fullest counts, and none at all is no error."""
    whole = spec_of("nemotron-h-8b", mixers=(*[Mixer.MAMBA2] * 30, *[Mixer.ATTENTION] * 22), unfed=frozenset(range(52)))
    gpu = random.randrange(8, 30) << 30
    config = EngineConfig(model="m", dtype="bfloat16")
    found = {resolve(config, split_spec(whole, place), "cuda", gpu).max_num_seqs for place in places(1, 3)}
    layers = max(len([layer for layer in place.layers(52) if layer < 30]) for place in places(1, 3))
    assert whole.recurrent is not None
    room, most = gpu // 4, whole.recurrent.bytes_of_sequence(2) // 30 * layers
    (count,) = found
    assert count <= room // most < 2 * count or count == 256
