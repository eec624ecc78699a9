"""A model cut into ranks: every value is on the ranks it should be on, and what cannot be cut is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from stoker_kernels.quant import AnyWeight, LinearWeight
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.resolve import gather_bytes, resolve
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.decoder_weights import DecoderWeights
from stoker_runtime.models.moe_spec import MoeSpec
from stoker_runtime.models.parameter import Role
from stoker_runtime.models.quantization.integer_checkpoint import IntegerCheckpoint, Packing
from stoker_runtime.models.quantization.integer_scheme import IntegerScheme
from stoker_runtime.models.shapes import SHAPES
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel import mixture
from stoker_runtime.parallel.collectives import Collectives
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import Place, even_part, places
from stoker_runtime.parallel.split import CUT_FIELDS, SAME_FIELDS, split_spec
from stoker_runtime.weights.load import load_weights

CPU = torch.device("cpu")


def load(model: str, tensors: int, stages: int, quantization: str = "none") -> list[tuple[Place, DecoderWeights]]:
    source = read_source(model)
    whole = build_spec(source)
    found = []
    for place in places(tensors, stages):
        cut = Cut(whole, place)
        loaded = load_weights(source, cut.spec, CPU, torch.float32, quantization, seed=7, cut=cut)
        found.append((place, loaded))
    return found


def data(weight: AnyWeight) -> Tensor:
    assert isinstance(weight, LinearWeight)
    return weight.data


@pytest.mark.parametrize(("count", "parts"), [(7, 3), (12, 4), (5, 5), (260, 8)])
def test_even_parts_cover_everything_once(count: int, parts: int) -> None:
    cut = [even_part(count, parts, index) for index in range(parts)]
    assert [each for part in cut for each in part] == list(range(count))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


def test_the_leader_has_the_head_and_sends_nothing_on() -> None:
    ranks = places(2, 3)
    assert (ranks[0].leads, ranks[0].is_last, ranks[0].tensor) == (True, True, 0)
    assert [place.stage for place in ranks] == [2, 2, 1, 1, 0, 0]
    assert [ranks[place.after].before for place in ranks[2:]] == [2, 3, 4, 5]
    assert [place.layers(8) for place in ranks[::2]] == [range(6, 8), range(3, 6), range(3)]


@pytest.mark.parametrize("form", ["safetensors", "gguf", "shape"])
@pytest.mark.parametrize(("tensors", "stages"), [(2, 1), (4, 1), (1, 3), (2, 2)])
def test_the_parts_of_all_ranks_make_the_whole(
    form: str, tensors: int, stages: int, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """By an oracle of its own: merged matrices are cut by hand here."""
    model = "shape:tiny" if form == "shape" else str(tiny_checkpoint("llama-bias"))
    if form == "gguf":
        from tests.runtime.weights.test_gguf import write_gguf

        model = str(write_gguf(Path(model), tmp_path / "model.gguf", "llama"))
    source = read_source(model)
    spec = build_spec(source)
    whole = load_weights(source, spec, CPU, torch.float32, seed=7)
    ranks = load(model, tensors, min(stages, spec.num_layers))
    firsts = [loaded.embed for place, loaded in ranks if place.is_first]
    assert torch.equal(torch.cat(firsts), whole.embed)
    heads = [data(loaded.head) for place, loaded in ranks if place.is_last]
    assert torch.equal(torch.cat(heads), data(whole.head))
    for place, loaded in ranks:
        for index, layer in zip(place.layers(spec.num_layers), loaded.layers, strict=True):
            theirs = whole.layers[index]
            q, k, v = data(theirs.qkv).split([spec.q_size, spec.kv_size, spec.kv_size])
            each = spec.heads // tensors * spec.head_dim
            group = spec.heads // spec.kv_heads
            own = range(place.tensor * spec.heads // tensors, (place.tensor + 1) * spec.heads // tensors)
            kept = sorted({head // group for head in own})
            keys = torch.cat([torch.arange(head * spec.head_dim, (head + 1) * spec.head_dim) for head in kept])
            rows = slice(place.tensor * each, (place.tensor + 1) * each)
            assert torch.equal(data(layer.qkv), torch.cat([q[rows], k[keys], v[keys]]))
            assert torch.equal(data(layer.output), data(theirs.output)[:, rows])
            units = slice(place.tensor * spec.ffn // tensors, (place.tensor + 1) * spec.ffn // tensors)
            gate, up = data(theirs.gate_up).chunk(2)
            assert torch.equal(data(layer.gate_up), torch.cat([gate[units], up[units]]))
            assert torch.equal(data(layer.down), data(theirs.down)[:, units])
            assert torch.equal(layer.input_norm, theirs.input_norm)
            if theirs.gate_up_bias is not None:
                assert layer.gate_up_bias is not None
                assert torch.equal(
                    layer.gate_up_bias, torch.cat([each[units] for each in theirs.gate_up_bias.chunk(2)])
                )
                # Added on one rank, or the sum would have it as often as there are ranks.
                assert (layer.down_bias is None) == (place.tensor > 0)
                assert layer.down_bias is None or torch.equal(layer.down_bias, theirs.down_bias)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_columns_of_gguf_blocks_are_cut_within_a_block(kind: str, tiny_checkpoint: Any, tmp_path: Path) -> None:
    """96 units in 2 and 64 columns of heads in 4 parts: neither ends with a block of 32."""
    import gguf
    from tests.runtime.weights.test_gguf import write_gguf

    file = str(write_gguf(tiny_checkpoint("llama"), tmp_path / "q.gguf", "llama", gguf.GGMLQuantizationType[kind]))
    spec = build_spec(read_source(file))
    whole = load_weights(file, spec, CPU, torch.float32)
    for place, loaded in load(file, 4 if kind == "Q8_0" else 2, 1):
        for mine, theirs in zip(loaded.layers, whole.layers, strict=True):
            assert torch.equal(data(mine.down), data(theirs.down).chunk(place.tensors, 1)[place.tensor])
            assert torch.equal(data(mine.output), data(theirs.output).chunk(place.tensors, 1)[place.tensor])


# What mixtures of experts hold, `test_mixture_cut.py` counts.
CUT = [
    name for name, config in SHAPES.items()
    if name != "tiny" and not {"num_experts_per_tok", "mamba_num_heads"} & config.keys()
]  # fmt: skip


@pytest.mark.parametrize("shape", CUT)
@pytest.mark.parametrize("quantization", ["none", "fp8"])
def test_ranks_hold_what_the_model_holds_and_no_more(shape: str, quantization: str) -> None:
    spec = build_spec(read_source(f"shape:{shape}"))
    whole = spec.parameter_bytes("bfloat16", quantization)
    tensors = random.choice([size for size in (2, 4) if spec.heads % size == 0])
    parts = [split_spec(spec, place) for place in places(tensors, 2)]
    held = sum(part.parameter_bytes("bfloat16", quantization) for part in parts)
    # Norms, and a tied head, are held more than once.
    tied = spec.vocab * spec.hidden * 2 if spec.tie_embeddings else 0
    shared_kv = max(0, tensors - spec.kv_heads) * spec.num_layers * 2 * spec.head_dim * spec.hidden * 2
    assert whole <= held <= whole * 1.01 + tied + shared_kv
    kv = spec.kv_bytes_per_token("bfloat16")
    assert sum(part.kv_bytes_per_token("bfloat16") for part in parts) == max(kv, kv * tensors // spec.kv_heads)
    assert len({part.part.step_parameters for part in parts if part.part}) == 1


def spec_of(**changes: Any) -> ModelSpec:
    return replace(build_spec(read_source("shape:qwen2.5-7b")), **changes)


def integers(group: int, **changes: Any) -> IntegerCheckpoint:
    return IntegerCheckpoint("gptq", Packing.GPTQ, IntegerScheme(4, group, zeros=True, **changes))


@pytest.mark.parametrize(
    ("spec", "tensors", "stages", "message"),
    [
        (spec_of(), 3, 1, "num_attention_heads is 28; sizes that work for this model: 1, 2, 4\\."),
        (spec_of(heads=24, kv_heads=8), 6, 1, "num_key_value_heads is 8, neither a multiple nor a divisor"),
        (spec_of(ffn=18945), 2, 1, "intermediate_size is 18945"),
        (spec_of(), 1, 29, "has 28 layers; set --pipeline-parallel-size to 28 or less"),
        (spec_of(checkpoint=integers(256)), 4, 1, "output would be cut at 896, within its groups of 256"),
        (spec_of(checkpoint=integers(128, order=True)), 2, 1, "act-order"),
    ],
)
def test_what_cannot_be_cut_is_refused(spec: ModelSpec, tensors: int, stages: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_spec(spec, Place(0, tensors, stages))


def test_a_parameter_that_nobody_knows_how_to_cut_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from stoker_runtime.parallel import split

    monkeypatch.delitem(split.SPLITS, "down")
    with pytest.raises(ModelError, match="because of its down"):
        split_spec(spec_of(), Place(0, 2, 1))


def test_every_field_of_a_spec_says_how_it_is_cut() -> None:
    """A field in neither set is refused where it is set: whoever adds one says here what a rank's part of it is."""
    assert {*mixture.CUT_FIELDS, *mixture.SAME_FIELDS} == set(MoeSpec.__dataclass_fields__)
    fields = set(ModelSpec.__dataclass_fields__)
    assert {*CUT_FIELDS, *SAME_FIELDS} <= fields
    assert not CUT_FIELDS & SAME_FIELDS


def test_roles_cover_what_is_quantized() -> None:
    spec = spec_of(checkpoint=integers(0))
    part = split_spec(spec, Place(1, 2, 1))
    kinds = {each.name.rpartition(".")[2] for each in part.parameters() if each.role is Role.LINEAR and each.scheme}
    assert kinds == {"qkv", "output", "gate_up", "down"}


@pytest.mark.parametrize("tensors", [2, 3])
def test_a_step_s_memory_counts_the_shards_of_logits(tensors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the tensors that gathering makes, or dealing: every one is asked for while the count runs."""
    spec = build_spec(read_source("shape:tiny"))
    spec = replace(spec, heads=6, kv_heads=6, ffn=96, vocab=random.choice([4001, 4003]))
    config = resolve(EngineConfig(model="shape:tiny", dtype="float32", max_num_seqs=9), spec, "cpu")
    for place in places(tensors, 1):
        made: list[Tensor] = []
        dealt: list[Tensor] = []

        def gather(shard: Tensor, parts: list[Tensor] | None, *, made: list[Tensor] = made, **_: Any) -> None:
            made.extend([shard, *(parts or ())])

        def give(came: Tensor, *_: Any, dealt: list[Tensor] = dealt, **__: Any) -> None:
            dealt.append(came)

        ends = Collectives.__new__(Collectives)
        ends.place, ends._quiet, ends._tensors = place, False, None
        monkeypatch.setattr(torch.distributed, "gather", gather)
        monkeypatch.setattr(torch.distributed, "all_to_all_single", give)
        own = torch.zeros(9, len(place.rows(spec.vocab)))
        ends.gather(own, torch.zeros(9, spec.vocab))
        made += [own] if made[0] is not own else []
        dealt.append(ends.deal(own, spec.vocab))
        most = max(sum(each.nbytes for each in tensors) for tensors in (made, dealt))
        assert gather_bytes(config, split_spec(spec, place), 9) == most
    assert gather_bytes(config, spec, 9) == 0


# Columns of `down` lie further apart than what is read together with its gaps; those of `o` are few.
WIDE: dict[str, Any] = {
    "vocab_size": 5003, "hidden_size": 48, "intermediate_size": 36_024, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"], "model_type": "llama",
    "torch_dtype": "float32", "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip


def wide_model(folder: Path) -> Path:
    hidden, ffn, width = WIDE["hidden_size"], WIDE["intermediate_size"], WIDE["head_dim"]
    q, kv = WIDE["num_attention_heads"] * width, WIDE["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    layers = range(WIDE["num_hidden_layers"])
    tensors = {f"model.layers.{i}.{name}.weight": torch.randn(shape) for i in layers for name, shape in shapes.items()}
    vocab = (WIDE["vocab_size"], hidden)
    tensors |= {"model.embed_tokens.weight": torch.randn(vocab), "lm_head.weight": torch.randn(vocab)}
    save_file(tensors | {"model.norm.weight": torch.ones(hidden)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(WIDE))
    return folder


@pytest.mark.parametrize(("tensors", "stages"), [(2, 1), (4, 1), (1, 3), (2, 3)])
def test_each_rank_reads_its_slices_alone(
    tensors: int, stages: int, tmp_path: Path, bytes_read: Callable[[], int]
) -> None:
    """So a start takes no longer on more ranks: together they read the file once, and each about its share."""
    model = wide_model(tmp_path)
    source = read_source(str(model))
    whole, each = build_spec(source), []
    for place in places(tensors, stages):
        cut = Cut(whole, place)
        load_weights(source, cut.spec, CPU, torch.float32, cut=cut)
        each.append(bytes_read())
    size = (model / "model.safetensors").stat().st_size
    assert 0.99 * size < sum(each) < 1.05 * size
    assert max(each) < 1.2 * size / (tensors * stages)
