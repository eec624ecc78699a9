"""Rotary tables against transformers' own computations, for every scaling and both ways of writing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import ModelSource, SourceKind
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec
from stoker_runtime.models.rope import inverse_frequencies, query_growth, rope_table
from stoker_runtime.models.rope_config import max_position, read_rope

HEAD_DIM = 32
PAIRS = HEAD_DIM // 2
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.1 * i for i in range(PAIRS)],
    "long_factor": [2.0 + 0.5 * i for i in range(PAIRS)],
    "original_max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    "yarn-attention": YARN | {"attention_factor": 1.3, "beta_fast": 16, "beta_slow": 2},
    "yarn-exact": YARN | {"truncate": False},
    "longrope": LONG,
    "longrope-factor": LONG | {"factor": 8.0},
}


def _config(parameters: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=HEAD_DIM * 4,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 50000.0, **parameters},
    )


@pytest.mark.parametrize("positions", [100, 512, 1279])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name: str, positions: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = _config(SCALINGS[name])
    rope = read_rope(config.to_dict(), HEAD_DIM)
    expected, attention = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"), seq_len=positions)
    torch.testing.assert_close(inverse_frequencies(rope, positions), expected, rtol=1e-6, atol=0.0)
    assert rope.attention_factor == pytest.approx(attention)


@pytest.mark.parametrize("name", SCALINGS)
def test_old_and_new_spelling_agree(name: str) -> None:
    old = {"rope_theta": 50000.0, "rope_scaling": SCALINGS[name], "max_position_embeddings": 512}
    new = {"rope_parameters": SCALINGS[name] | {"rope_theta": 50000.0}, "max_position_embeddings": 512}
    assert read_rope(old, HEAD_DIM) == read_rope(new, HEAD_DIM)


def test_names_of_older_configurations() -> None:
    config = {"rope_scaling": {"type": "su", **{k: v for k, v in LONG.items() if k != "rope_type"}}}
    assert read_rope(config | {"max_position_embeddings": 512}, HEAD_DIM).kind == "longrope"
    assert read_rope({"rope_scaling": None, "max_position_embeddings": 512}, HEAD_DIM).kind == "default"


def test_table_is_cos_then_sin_times_the_attention_factor() -> None:
    rope = read_rope({"rope_scaling": YARN | {"attention_factor": 2.0}, "max_position_embeddings": 512}, HEAD_DIM)
    table = rope_table(rope, 40, torch.device("cpu"))
    angles = 17 * inverse_frequencies(rope, 40)
    assert table.shape == (40, HEAD_DIM)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[17], 2.0 * torch.cat((angles.cos(), angles.sin())))


def test_partial_rotation_shortens_the_table() -> None:
    config = {"partial_rotary_factor": 0.5, "max_position_embeddings": 512}
    assert rope_table(read_rope(config, HEAD_DIM), 8, torch.device("cpu")).shape == (8, HEAD_DIM // 2)


def test_dynamic_scaling_is_plain_up_to_the_trained_length() -> None:
    rope = read_rope({"rope_scaling": SCALINGS["dynamic"], "max_position_embeddings": 512}, HEAD_DIM)
    plain = read_rope({"max_position_embeddings": 512}, HEAD_DIM)
    assert torch.equal(inverse_frequencies(rope, 512), inverse_frequencies(plain, 512))
    assert not torch.equal(inverse_frequencies(rope, 513), inverse_frequencies(plain, 513))


def test_queries_grow_beyond_the_trained_length_alone() -> None:
    from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

    rope, device = RopeSpec(dim=6, original_max_position=37, query_growth=0.23), torch.device("cpu")
    found = query_growth(rope, 38, device)
    assert found is not None
    assert found.flatten()[37] > found.flatten()[36] == 1
    expected = get_llama_4_attn_scale(torch.arange(190)[None], 0.23, 37)[0, 0, :, :, None]
    torch.testing.assert_close(query_growth(rope, 190, device), expected)
    assert query_growth(rope, 37, device) is None


@pytest.mark.parametrize(("scaling", "length"), [("yarn", 512), ("linear", 632), ("dynamic", 395), ("llama3", 158)])
def test_a_scaling_stretches_the_context(scaling: str, length: int) -> None:
    trained = 128 if scaling == "yarn" else 158
    config = {"rope_scaling": SCALINGS[scaling], "max_position_embeddings": trained}
    assert max_position(config, read_rope(config, HEAD_DIM)) == length


def test_a_gemma_names_the_length_that_its_scaling_reached() -> None:
    from transformers import Gemma3TextConfig

    config = Gemma3TextConfig(num_hidden_layers=3, max_position_embeddings=700).to_dict()
    config["rope_parameters"]["full_attention"] |= {"rope_type": "linear", "factor": 8.0}
    source = ModelSource("gemma", SourceKind.FOLDER, None, config | {"architectures": ["Gemma3ForCausalLM"]})
    spec = build_spec(source)
    assert (spec.rope.kind, spec.rope.factor, spec.max_position) == ("linear", 8.0, 700)


@pytest.mark.parametrize(
    ("scaling", "word"),
    [
        ({"rope_type": "mystery", "factor": 2.0}, "mystery"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        (LONG | {"short_factor": [1.0]}, "short_factor has 1 values"),
        ("yarn", "must be an object"),
    ],
)
def test_what_cannot_be_read_is_named(scaling: Any, word: str) -> None:
    with pytest.raises(ModelError, match=word):
        read_rope({"rope_scaling": scaling, "max_position_embeddings": 512}, HEAD_DIM)
