"""Checkpoints whose layers are quantized in several schemes: dequantized weights, tokens, bytes, what is said of them,
and which mix is refused by name. Which layer has which scheme is drawn at random.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.runtime.weights import mixed_forms as forms
from tests.runtime.weights import test_integer_experts as mixtures
from tests.runtime.weights.both_ways import assert_equals_transformers, assert_likeliest, random_qwen3
from tests.runtime.weights.integer_forms import SHAPE, gptq_config, load
from tests.runtime.weights.mixed_forms import FP8, INT8, Chosen, Scheme, packed, value
from torch import Tensor

from stoker_kernels.quant import IntegerWeight
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import activation_bytes, resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.quantization.mixed_checkpoint import MixedCheckpoint
from stoker_runtime.models.quantization.quantized_checkpoint import read_quantization
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import places
from stoker_runtime.terminal.info import describe_model
from stoker_runtime.weights.layout import WeightArena
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")
SEED = int(os.environ.get("SEED", random.randrange(2**32)))
LAYERS = 3
ODD = SHAPE | {"num_hidden_layers": LAYERS, "intermediate_size": 480}
"""Whose rows have whole groups of 32 columns, and of 80."""
PROMPT = [5, 17, 80, 3, 44, 9]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 in fp32."""
    return random_qwen3(tmp_path_factory.mktemp("dense"), ODD, SEED % 1000)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    print(f"SEED={SEED}")
    return random.Random(f"{SEED} {request.node.name}")


def spec_of(folder: Path) -> ModelSpec:
    return build_spec(read_source(str(folder)))


def assert_weights(quantized: Path, plain: Path, chosen: Chosen) -> None:
    """Numbers are those of the definition, each matrix in its own scheme, in as much memory as was said."""
    ours, theirs = load(quantized), load(plain)
    for layer, (mine, exact) in enumerate(zip(ours.layers, theirs.layers, strict=True)):
        for field, modules in forms.FIELDS.items():
            weight, numbers = getattr(mine, field), getattr(exact, field).data
            kinds = {each.kind if each else "dense" for each in (chosen[f"model.layers.{layer}.{m}"] for m in modules)}
            assert weight.kind == ("int8" if kinds == {"int4", "int8"} else kinds.pop())
            if weight.kind == "nvfp4":
                # One number of a matrix may be divided or multiplied by.
                torch.testing.assert_close(value(weight), numbers, rtol=2.5e-7, atol=0.0)
            else:
                assert torch.equal(value(weight), numbers), (layer, field)
    spec = spec_of(quantized)
    method = spec.checkpoint.method if spec.checkpoint else ""
    for dtype in (torch.float32, torch.bfloat16):
        arena = WeightArena(spec, CPU, dtype, method)
        assert arena.num_bytes == arena._memory.used == spec.parameter_bytes(str(dtype).removeprefix("torch."), method)


def rounded(_: torch.nn.Module, given: tuple[Tensor], *, most: float) -> tuple[Tensor]:
    """What a linear reads, as so many steps to either side of zero a token, or e4m3, can tell it."""
    step = given[0].abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
    steps = given[0] / step
    return ((steps.round() if most == 127 else steps.to(torch.float8_e4m3fn).float()) * step,)


def assert_tokens(quantized: Path, plain: Path, chosen: Chosen, method: str, paged_model: Any) -> None:
    """Tokens are those that transformers finds likeliest on the values, what each linear of eight bits on both sides
    reads rounded before.
    """
    import transformers

    (tokens,) = paged_model(str(quantized), quantization=method, max_len=64).greedy([PROMPT], 24)
    if not any(scheme and scheme.most for scheme in chosen.values()):
        assert_likeliest(plain, [PROMPT], [tokens])
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(plain).requires_grad_(False)
    exact = model(torch.tensor([PROMPT + tokens])).logits[0]
    for name, module in model.named_modules():
        if (scheme := chosen.get(name)) is not None and scheme.most:
            module.register_forward_pre_hook(partial(rounded, most=scheme.most))
    logits = model(torch.tensor([PROMPT + tokens])).logits[0]
    # On the border between two steps a number may fall on either side: of two tokens as likely either may be chosen.
    behind = [float(logits[len(PROMPT) - 1 + place].amax() - logits[len(PROMPT) - 1 + place, token])
              for place, token in enumerate(tokens)]  # fmt: skip
    assert len(tokens) == 24
    assert max(behind) < 0.2 * float((logits - exact).abs().amax()) + 1e-3


@pytest.mark.parametrize("mix", forms.COMPRESSED)
def test_groups_give_each_layer_its_scheme(
    mix: str, dense: Path, tmp_path: Path, rng: random.Random, paged_model: Any
) -> None:
    chosen = forms.choose(forms.COMPRESSED[mix], LAYERS, rng)
    written = forms.write(dense, tmp_path, forms.compressed_groups(chosen, rng), chosen)
    assert_weights(*written, chosen)
    assert_tokens(*written, chosen, "compressed-tensors", paged_model)


@pytest.mark.parametrize("mix", forms.DYNAMIC)
def test_dynamic_gives_each_layer_its_scheme(
    mix: str, dense: Path, tmp_path: Path, rng: random.Random, paged_model: Any
) -> None:
    schemes = forms.DYNAMIC[mix]
    chosen = forms.choose(schemes, LAYERS, rng)
    base = rng.choice([each for each in schemes if each is not None])
    written = forms.write(dense, tmp_path, forms.dynamic(chosen, base), chosen)
    assert_weights(*written, chosen)
    assert_tokens(*written, chosen, "gptq", paged_model)


@pytest.mark.parametrize("where", ["hf_quant_config.json", "config.json", "groups"])
def test_modelopt_gives_each_layer_its_scheme(
    where: str, dense: Path, tmp_path: Path, rng: random.Random, paged_model: Any
) -> None:
    chosen = forms.choose(forms.MODELOPT, LAYERS, rng)
    config = forms.layers(chosen)
    if where == "groups":
        config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["lm_head"]}
        config["config_groups"] = {
            each.kind: {
                "targets": forms.modules_of(chosen, each),
                "weights": {"dynamic": False, "type": "float", "num_bits": 4 if each.kind == "nvfp4" else 8}
                | ({"group_size": 16} if each.kind == "nvfp4" else {}),
            }
            for each in forms.MODELOPT
            if each is not None
        }
    quantized, plain = forms.write(dense, tmp_path, config, chosen)
    if where == "hf_quant_config.json":
        settings = json.loads((quantized / "config.json").read_text())
        own = settings.pop("quantization_config")
        own.pop("quant_method")
        (quantized / "config.json").write_text(json.dumps(settings))
        (quantized / where).write_text(json.dumps(own))
    assert_weights(quantized, plain, chosen)
    if where == "config.json":
        assert_tokens(quantized, plain, chosen, "modelopt", paged_model)


def test_targets_name_what_the_library_finds(dense: Path, rng: random.Random) -> None:
    """Names, regular expressions that begin in the middle of names, and classes, as compressed-tensors itself goes by
    them.
    """
    import transformers
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    layer, other = rng.sample(range(LAYERS), 2)
    targets = [
        [f"model.layers.{layer}.mlp.down_proj", f"layers.{layer}.self_attn.o_proj", f"model.layers.{other}.mlp"],
        [rf"re:.*{other}\.(self_attn|mlp\.g)", "re:down_proj", r"re:model\.layers\.\d+\.mlp\.down_proj"],
        ["Linear"],
    ]
    schemes = [packed(32, 4), packed(0, 8), packed(80, 8)]
    ignored = ["lm_head", f"model.layers.{layer}.mlp.up_proj", rf"re:.*layers\.{other}\.self_attn\.o_proj"]
    groups = {
        f"group_{number}": scheme.settings | {"targets": each}
        for number, (scheme, each) in enumerate(zip(schemes, targets, strict=True))
    }
    rng.shuffle(items := list(groups.items()))
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": dict(items),
        "ignore": ignored,
    }  # fmt: skip
    settings = json.loads((dense / "config.json").read_text())
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**settings))
    apply_quantization_config(model, QuantizationConfig(**config))
    checkpoint = read_quantization("tiny", {"quantization_config": config})
    assert isinstance(checkpoint, MixedCheckpoint)
    seen = set()
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        theirs, ours = getattr(module, "quantization_scheme", None), checkpoint.of(name)
        expected = None if theirs is None else (theirs.weights.num_bits, theirs.weights.group_size or 0)
        assert expected == (None if ours is None else (ours.scheme.bits, ours.scheme.group)), name
        seen.add(expected)
    assert len(seen) == 4


def small(chosen: Chosen, **changes: object) -> dict[str, Any]:
    return forms.compressed_groups(chosen, random.Random(0)) | changes


def every(scheme: Scheme | None, **others: Scheme | None) -> Chosen:
    """All modules in a scheme, but those whose names end with what is named (`k_proj`)."""
    modules = [f"model.layers.{layer}.{each}" for layer in range(LAYERS) for field in forms.FIELDS.values()
               for each in field]  # fmt: skip
    return {module: others.get(module.rpartition(".")[2], scheme) for module in modules}


def test_parts_of_a_matrix_rest_in_what_holds_all_and_that_is_said(
    dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = every(packed(32, 4), v_proj=packed(80, 8), up_proj=packed(16, 4, zeros=True))
    quantized, plain = forms.write(dense, tmp_path, small(chosen), chosen)
    with caplog.at_level(logging.INFO):
        assert_weights(quantized, plain, chosen)
        layer = load(quantized).layers[1]
    assert isinstance(layer.qkv, IntegerWeight)
    assert (layer.qkv.bits, layer.qkv.group, layer.qkv.zero) == (8, 16, None)
    assert isinstance(layer.gate_up, IntegerWeight)
    assert (layer.gate_up.bits, layer.gate_up.group, layer.gate_up.zero is None) == (4, 16, False)
    assert (
        "layers.0.qkv (and layers.1.qkv, layers.2.qkv likewise) is one matrix here, of model.layers.0.self_attn.q_proj "
        "in integers of 4 bits in groups of 32, model.layers.0.self_attn.k_proj in integers of 4 bits in groups of 32, "
        "model.layers.0.self_attn.v_proj in integers of 8 bits in groups of 80: it rests in integers of 8 bits in "
        "groups of 16, which holds all of them exactly"
    ) in caplog.text
    assert "6 matrices in integers of 4 bits in groups of 32, 3 matrices in integers of 8 bits in g" in caplog.text


@pytest.mark.parametrize(("chosen", "words"), [
    (every(packed(32, 4), k_proj=FP8),
     "layers.0.qkv is one matrix here, .* no matrix holds together: model.layers.0.self_attn.q_proj in integers of 4 "
     "bits in groups of 32, model.layers.0.self_attn.k_proj in FP8, .*; supported is one scheme for all of its parts, "
     "or integers of 4 and 8 bits for each"),
    (every(INT8, up_proj=packed(0, 8)), "0.gate_up .*gate_proj in INT8 with activations in INT8, .*up_proj in integ"),
    (every(packed(32, 4), gate_proj=None), "gate_up is one matrix here, of which only a part is quantized: .*gate_proj "
     "is not, .*up_proj is"),
])  # fmt: skip
def test_a_matrix_of_parts_that_none_holds_is_refused_by_name(
    chosen: Chosen, words: str, dense: Path, tmp_path: Path
) -> None:
    settings = json.loads((dense / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": small(chosen)}))
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path)


SCHEMES: dict[str, Scheme | None] = {
    "four bits": packed(32, 4), "four with zeros": packed(16, 4, zeros=True), "eight bits": packed(80, 8), "FP8": FP8,
    "INT8": INT8, "NVFP4": forms.NVFP4, "dense": None,
}  # fmt: skip
TOLD = {"FP8": "in FP8", "INT8": "in INT8 with activations in INT8", "NVFP4": "in NVFP4"}
INTEGERS = {name for name, scheme in SCHEMES.items() if scheme is not None and name not in TOLD}


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(SCHEMES, 2)))
def test_every_pair_within_a_matrix_is_held_exactly_or_refused_by_both_names(
    one: str, other: str, dense: Path, tmp_path: Path
) -> None:
    field = random.choice(["qkv", "gate_up"])
    parts = [each.rpartition(".")[2] for each in forms.FIELDS[field]]
    odd = random.choice(parts)
    chosen = every(SCHEMES[one], **{odd: SCHEMES[other]})
    if {one, other} <= INTEGERS:
        quantized, plain = forms.write(dense, tmp_path, small(chosen), chosen)
        assert_weights(quantized, plain, chosen)
        return
    settings = json.loads((dense / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": small(chosen)}))
    with pytest.raises(ModelError, match=rf"layers\.\d+\.{field} is one matrix here") as refused:
        spec_of(tmp_path)
    for name, module in ((one, next(each for each in parts if each != odd)), (other, odd)):
        kind = TOLD.get(name, "in integers of" if name in INTEGERS else "is not")
        if "dense" in (one, other):
            kind = "is not" if name == "dense" else "is"
        assert re.search(rf"layers\.\d+\.\w+\.{module} {kind}", str(refused.value)), refused.value


TWO = {"group_0": packed(32, 4).settings | {"targets": ["Linear"]}}


@pytest.mark.parametrize(("config", "words"), [
    (small(every(FP8), config_groups=TWO | {"group_1": FP8.settings | {"targets": ["lm_head"]}}),
     "target 'lm_head' is not supported; it must be Linear, a linear's full name"),
    (small(every(FP8), config_groups=TWO | {"group_1": FP8.settings | {"targets": ["Linear"]}}),
     "target 'Linear' is not supported; it must be of one group"),
    (small(every(FP8), config_groups=TWO | {"group_1": FP8.settings | {"targets": ["re:(.*"]}}),
     "pattern .*it must be a regular expression"),
    (small(every(FP8), config_groups={
        "a": FP8.settings | {"targets": ["re:.*proj"]}, "b": packed(32, 4).settings | {"targets": ["re:.*mlp"]}}),
     r"gives model.layers.0.mlp.gate_proj several schemes, by the patterns \.\*proj, \.\*mlp; it must be one"),
    (small(every(FP8), config_groups=TWO | {"group_1": packed(32, 4).settings | {
        "targets": ["re:.*down_proj"], "format": "int-quantized"}}), "format 'int-quantized' is not supported"),
    (small(every(FP8), config_groups={}), "no config_groups"),
    (gptq_config(32, dynamic={"+:.*down_proj": {"bits": 2}}), "bits 2 is not supported"),
    (gptq_config(32, dynamic={"+:.*down_proj": {"adapter": "x"}}), r"dynamic \+:.*down_proj 'adapter' is not su"),
    (gptq_config(32, dynamic={"+:.*k_proj": {"desc_act": True}}), "k_proj in integers of 4 bits in groups of 32 with"),
    ({"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION"}}, "quantized_layers None"),
    ({"quant_method": "modelopt", "quantization": {
        "quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.mlp.down_proj": {"quant_algo": "W4A8"}},
    }}, "quant_algo 'W4A8' is not supported"),
])  # fmt: skip
def test_a_rule_that_is_not_supported_is_named(
    config: dict[str, Any], words: str, dense: Path, tmp_path: Path
) -> None:
    settings = json.loads((dense / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path)


def test_what_is_asked_and_what_is_said_go_by_all_schemes(dense: Path, tmp_path: Path) -> None:
    chosen = every(packed(32, 4), down_proj=FP8)
    quantized, plain = forms.write(dense, tmp_path, small(chosen), chosen)
    spec, whole = spec_of(quantized), spec_of(plain)
    for asked in ("auto", "compressed-tensors"):
        good = resolve(EngineConfig(str(quantized), quantization=asked), spec, "cuda")
        assert (good.quantization, good.dtype) == ("compressed-tensors", "bfloat16")
    for asked in ("fp8", "none", "gptq"):
        with pytest.raises(ConfigError, match=r"weights are (integers of 4 bits in groups of 32|, |FP8)+ \(com"):
            resolve(EngineConfig(str(quantized), quantization=asked), spec, "cuda")
    # The product of gate and up once more in eight bits, which down reads.
    more = activation_bytes(good, spec, 16) - activation_bytes(good, whole, 16)
    assert more == 16 * (spec.ffn // 2) * 2
    lines, _ = describe_model(EngineConfig(str(quantized), max_model_len=64, max_num_seqs=2), CPU)
    assert dict(lines)["quantized"] == (
        f"{3 * LAYERS} matrices in integers of 4 bits in groups of 32, {LAYERS} matrices in FP8"
    )


CUT = ODD | {"hidden_size": 128, "head_dim": 64, "intermediate_size": 512}
"""Whose halves have whole groups of 32."""
CUT_MIXES: dict[str, list[Scheme | None]] = {
    "integers": [packed(32, 4), packed(0, 8), packed(16, 4, zeros=True), None],
    "eight-bits": [packed(32, 8), FP8, INT8],
}


@pytest.mark.parametrize("mix", CUT_MIXES)
def test_ranks_have_their_parts_of_their_own_layers(mix: str, tmp_path: Path, rng: random.Random) -> None:
    chosen = forms.choose(CUT_MIXES[mix], LAYERS, rng)
    config = forms.compressed_groups(chosen, rng)
    written = forms.write(random_qwen3(tmp_path / "dense", CUT, 3), tmp_path, config, chosen)
    spec, whole = map(spec_of, written)
    seen = set()
    for place in places(2, LAYERS):
        loaded = []
        for folder, of in zip(written, (spec, whole), strict=True):
            cut = Cut(of, place)
            loaded.append(load_weights(str(folder), cut.spec, CPU, torch.float32, "none", cut=cut))
        (layer,) = place.layers(LAYERS)
        seen.add(layer)
        for field, modules in forms.FIELDS.items():
            mine, exact = (getattr(each.layers[0], field) for each in loaded)
            kinds = {each.kind if each else "dense" for each in (chosen[f"model.layers.{layer}.{m}"] for m in modules)}
            assert mine.kind in (*kinds, "int8")
            assert torch.equal(value(mine), exact.data), (place, field)
    assert seen == set(range(LAYERS))


def test_experts_of_each_layer_have_their_scheme(tmp_path: Path, paged_model: Any) -> None:
    dense = mixtures.made("mixtral", tmp_path / "dense")
    schemes = [forms.changed(4, 32), forms.changed(8, 0)]
    names = [name for name in load_file(dense / "model.safetensors") if mixtures.is_quantized(name)]
    chosen: Chosen = {name.removesuffix(".weight"): schemes[".layers.1." in name] for name in names}
    rules = {r"+:model\.layers\.1\.": {"bits": 8, "group_size": -1, "desc_act": False}}
    quantized, plain = forms.write(dense, tmp_path, gptq_config(32, dynamic=rules), chosen)
    kinds = [layer.mixture.experts.kind for layer in load(quantized).layers if layer.mixture]
    assert kinds == ["int4", "int8"]
    assert_equals_transformers(quantized, plain, "gptq", "experts", paged_model)
