"""`--isq` from checkpoints that are quantized already: what a matrix becomes is what its numbers would become, bit for
bit, and few of them are in 16 bits at any time.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.models import test_fp8_checkpoint as fp8
from tests.runtime.weights import mixed_forms as mixed
from tests.runtime.weights import test_block_plan as blocks
from tests.runtime.weights import test_fp4_checkpoint as fp4
from tests.runtime.weights import test_int8_checkpoint as int8
from tests.runtime.weights import test_integer_checkpoint as integer
from tests.runtime.weights import test_integer_experts as mixtures
from tests.runtime.weights.both_ways import random_qwen3
from tests.runtime.weights.test_at_load import Sixteen
from torch import Tensor

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.resolve import asked_quantization, resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import places
from stoker_runtime.terminal.info import describe_model
from stoker_runtime.weights.block_plan import plan_blocks
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights
from stoker_runtime.weights.packed.requantize import requantized

CPU = torch.device("cpu")
KINDS = ("w4", "fp8", "q8_0", "q4k")
SHAPE = integer.SHAPE | {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}
LEFT = ("layers.1.mlp.down_proj", "layers.0.self_attn.o_proj")
"""Modules that checkpoints leave in 16 bits."""
FIELDS = ("qkv", "output", "gate_up", "down", "mixture")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in fp32."""
    return random_qwen3(tmp_path_factory.mktemp("dense"), SHAPE, 31)


def tensors_of(weight: Any) -> Iterator[Tensor]:
    """All tensors of a weight, of whatever kind."""
    if isinstance(weight, Tensor):
        yield weight
    elif isinstance(weight, tuple):
        for each in weight:
            yield from tensors_of(each)
    elif is_dataclass(weight):
        for each in fields(weight):
            yield from tensors_of(getattr(weight, each.name))


def spec_for(folder: Path, isq: str, device: str = "cpu") -> ModelSpec:
    source, config = read_source(str(folder)), EngineConfig(str(folder), isq=isq)
    return plan_blocks(requantized(config, build_spec(source)), source, asked_quantization(config), device).spec


def load(folder: Path, isq: str, dtype: torch.dtype = torch.bfloat16) -> DecoderWeights:
    spec = spec_for(folder, isq)
    quantization = resolve(EngineConfig(str(folder), isq=isq), spec, "cpu").quantization
    assert quantization == isq
    return load_weights(str(folder), spec, CPU, dtype, quantization)


def same(ours: DecoderWeights, theirs: DecoderWeights) -> None:
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        for field in FIELDS:
            pairs = list(zip(tensors_of(getattr(mine, field)), tensors_of(getattr(other, field)), strict=True))
            assert bool(pairs) == (getattr(other, field) is not None)
            for got, expected in pairs:
                assert got.dtype == expected.dtype
                assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)), field


def leave(quantized: Path, plain: Path, dense: Path, key: str) -> None:
    """Put some modules of a checkpoint back into 16 bits, as `key` of its configuration then says."""
    packed, numbers = load_file(quantized / "model.safetensors"), load_file(plain / "model.safetensors")
    for module in LEFT:
        packed = {name: each for name, each in packed.items() if f"{module}." not in name}
        packed[f"model.{module}.weight"] = numbers[f"model.{module}.weight"] = load_file(dense / "model.safetensors")[
            f"model.{module}.weight"
        ]
    save_file(packed, quantized / "model.safetensors")
    save_file(numbers, plain / "model.safetensors")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"][key] = [f"model.{each}" for each in LEFT]
    (quantized / "config.json").write_text(json.dumps(config))


def both(form: str, dense: Path, folder: Path) -> tuple[Path, Path]:
    """A checkpoint in a format, some modules left alone where a format is, and a dense one of what it stands for."""
    kind, _, name = form.partition(":")
    if kind == "fp8":
        stored, plain = fp8.quantized(dense, name)
        for each in ("q", "d"):
            (folder / each).mkdir()
        fp8.write(folder / "q", dense, stored, fp8.FORMATS[name][0])
        return folder / "q", fp8.write(folder / "d", dense, plain)
    forms = {"integer": integer.FORMATS, "fp4": fp4.FORMATS, "int8": {"": (int8.config(), int8.quantized)}}
    found = integer.write(dense, folder, *forms[kind][name])
    if name in ("awq", "gptq-8"):
        leave(*found, dense, "modules_to_not_convert")
    return found


FORMS = (
    *(f"integer:{name}" for name in ("awq", "gptq-act-order", "gptq-8", "compressed-channel", "compressed-zeros")),
    *(f"fp4:{name}" for name in ("modelopt-nvfp4", "compressed-mxfp4")),
    *(f"fp8:{name}" for name in ("compressed-tensor", "compressed-channel", "block")),
    "int8:",
)


@pytest.mark.parametrize("form", FORMS)
def test_each_matrix_becomes_what_its_numbers_would(form: str, dense: Path, tmp_path: Path) -> None:
    quantized, plain = both(form, dense, tmp_path)
    for kind in KINDS if not form.startswith("fp8") else ("w4", "q4k"):
        same(load(quantized, kind), load(plain, kind))


def test_layers_in_several_schemes_become_it_likewise(dense: Path, tmp_path: Path) -> None:
    rng = random.Random()
    schemes: list[mixed.Scheme | None] = [mixed.packed(32, 4), mixed.FP8, mixed.INT8, None]
    chosen = mixed.choose(schemes, SHAPE["num_hidden_layers"], rng)
    quantized, plain = mixed.write(dense, tmp_path, mixed.compressed_groups(chosen, rng), chosen)
    for kind in KINDS:
        same(load(quantized, kind), load(plain, kind))


@pytest.mark.parametrize("form", ["gptq-8", "gptq-act-order", "compressed-zeros"])
@pytest.mark.parametrize("kind", ["w4", "fp8"])
def test_experts_become_it_likewise(kind: str, form: str, tmp_path: Path) -> None:
    quantized, plain = mixtures.write(tmp_path, mixtures.FORMATS[form])
    ours = load(quantized, kind)
    assert ours.layers[-1].mixture is not None
    assert ours.layers[-1].mixture.experts.kind == ("fp8_channel" if kind == "fp8" else "int4")
    same(ours, load(plain, kind))


@pytest.mark.parametrize("kind", ["w4", "q8_0"])
def test_blocks_of_a_file_become_other_ones(kind: str, tmp_path: Path) -> None:
    file = blocks.write(tmp_path / "m.gguf", {"attn_v": "Q6_K", "ffn_down": "Q5_1"}, random.choice(["Q4_K", "Q3_K"]))
    spec, whole = spec_for(file, kind), build_spec(read_source(str(file)))
    ours = load_weights(str(file), spec, CPU, torch.bfloat16, kind)
    arena = WeightArena(spec, CPU, torch.bfloat16, kind)
    numbers = load_weights(str(file), whole, CPU, torch.bfloat16)
    for at, layer in enumerate(numbers.layers):
        for field in FIELDS[:-1]:
            arena.quantize(f"layers.{at}.{field}", getattr(layer, field).data)
    same(ours, arena.assemble())


@pytest.mark.parametrize("form", ["integer:awq", "fp4:compressed-mxfp4", "fp8:block"])
@pytest.mark.parametrize("kind", ["w4", "q8_0"])
def test_few_matrices_are_in_16_bits_at_any_time(
    kind: str, form: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    deep = random_qwen3(tmp_path_factory.mktemp("deep"), SHAPE | {"num_hidden_layers": 12}, 5)
    quantized, plain = both(form, deep, tmp_path)
    spec, sixteen = spec_for(quantized, kind), build_spec(read_source(str(plain))).parameter_bytes("bfloat16")
    with Sixteen() as count:
        load_weights(str(quantized), spec, CPU, torch.bfloat16, kind)
    largest = 2 * 2 * SHAPE["intermediate_size"] * SHAPE["hidden_size"]
    # As `test_at_load` has it for 16 bits.
    bound = spec.parameter_bytes("bfloat16", kind) // 4 + 2 * largest
    assert largest <= count.most <= bound < 0.5 * sixteen
    assert count.alive == 0


@pytest.mark.parametrize("form", ["integer:compressed-zeros", "fp8:compressed-channel", "fp4:modelopt-nvfp4"])
def test_ranks_make_their_parts_of_it(form: str, dense: Path, tmp_path: Path) -> None:
    quantized, plain = both(form, dense, tmp_path)
    found = []
    for folder in (quantized, plain):
        config, whole = EngineConfig(str(folder), isq="w4"), build_spec(read_source(str(folder)))
        for place in places(2, 1):
            cut = Cut(whole, place)
            part = requantized(config, cut.spec)
            found.append(load_weights(str(folder), part, CPU, torch.bfloat16, "w4", cut=cut))
    same(found[0], found[2])
    same(found[1], found[3])


def test_what_it_becomes_is_said_and_counted(
    dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quantized, plain = both("integer:gptq-8", dense, tmp_path)
    with caplog.at_level(logging.INFO):
        load(quantized, "w4")
    assert "integers of 8 bits (gptq) become w4 at load, matrix by matrix" in caplog.text
    lines = []
    for folder in (quantized, plain):
        config = EngineConfig(str(folder), isq="w4", device="cpu", dtype="bfloat16", max_model_len=64, cpu_kv_gb=0.1)
        lines.append(dict(describe_model(config, CPU)[0]))
    assert lines[0] == lines[1]


def test_names_that_contradict_are_refused_still(dense: Path, tmp_path: Path) -> None:
    """`--quantization` names what a checkpoint is; FP8 of FP8 stays as it is."""
    quantized, _ = both("fp8:block", dense, tmp_path)
    config = EngineConfig(str(quantized), quantization="w4")
    spec = build_spec(read_source(str(quantized)))
    assert requantized(config, spec) is spec
    with pytest.raises(ConfigError, match="quantization is w4, but the checkpoint's weights are FP8"):
        resolve(config, spec, "cpu")
    assert requantized(replace(config, quantization="auto", isq="fp8"), spec) is spec
