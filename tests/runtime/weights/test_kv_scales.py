"""Calibrated scales of an e4m3 KV cache: every name they come by, what they do to logits, and errors that name them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.weights.load import load_weights

# Far beyond what e4m3 holds, which ends at 448; the model is made so that nothing but the cache sees it.
KEYS, VALUES = 4096.0, 1024.0
LAYERS = 3
# Layer → letter → the numbers of its heads.
Scales = list[dict[str, list[float]]]
Write = Callable[[dict[str, Tensor]], Path]


@pytest.fixture
def large(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Write:
    """Writes a model with keys and values that e4m3 does not hold, and with further tensors."""

    def write(further: dict[str, Tensor]) -> Path:
        source = tiny_checkpoint("qwen3")
        tensors = load_file(source / "model.safetensors")
        for name, factor in (("k_norm", KEYS), ("q_norm", 1 / KEYS), ("v_proj", VALUES), ("o_proj", 1 / VALUES)):
            for key in tensors:
                if key.endswith(f".{name}.weight"):
                    tensors[key] = tensors[key] * factor
        config = json.loads((source / "config.json").read_text())
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "config_groups": {},
            "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
        }
        folder = tmp_path / "large"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors | further, folder / "model.safetensors")
        return folder

    return write


def drawn(heads: int = 1) -> Scales:
    """Scales for all layers under which everything fits, each another one."""
    draw = random.Random(heads)
    return [
        {
            letter: [draw.uniform(0.02, 0.04) * size for _ in range(heads)]
            for letter, size in (("k", KEYS), ("v", VALUES))
        }
        for _ in range(LAYERS)
    ]


def named(scales: Scales, name: Callable[[str], str]) -> dict[str, Tensor]:
    return {
        f"model.layers.{layer}.self_attn.{name(letter)}": torch.tensor(numbers)
        for layer, each in enumerate(scales)
        for letter, numbers in each.items()
    }


def own(letter: str) -> str:
    return f"{letter}_scale"


def read(folder: Path) -> Tensor | None:
    source = read_source(str(folder))
    return load_weights(source, build_spec(source), torch.device("cpu"), torch.float32).kv_scales


def rounded(scales: Scales) -> Any:
    """Attention of transformers over keys and values that went through e4m3."""
    from transformers.models.qwen3.modeling_qwen3 import eager_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
        def through(x: Tensor, letter: str) -> Tensor:
            scale = torch.tensor(scales[module.layer_idx][letter]).view(1, -1, 1, 1)
            return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

        return eager_attention_forward(module, query, through(key, "k"), through(value, "v"), *rest, **named)

    return attend


@pytest.mark.parametrize("heads", [1, 2])
def test_logits_are_those_of_keys_and_values_rounded_under_their_scales(
    large: Write, paged_model: Any, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    scales = drawn(heads)
    folder = large(named(scales, own))
    ours = paged_model(str(folder), kv_dtype=torch.float8_e4m3fn)
    prompt = torch.randint(3, 60, (37,), generator=torch.Generator().manual_seed(heads)).tolist()
    # Once as one prompt, and once a token at a time.
    found = [ours.step([(0, prompt)], all_logits=True)[0], torch.stack([ours.step([(1, [id])])[0] for id in prompt])]

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.eager_attention_forward", rounded(scales))
    config = transformers.AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = transformers.Qwen3ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    with torch.no_grad():
        expected = model.eval()(torch.tensor([prompt])).logits[0]
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_without_scales_keys_and_values_do_not_fit(large: Write, paged_model: Any) -> None:
    folder = large({})
    prompt = [5, 9, 11, 7, 30, 21, 4]
    exact = paged_model(str(folder)).step([(0, prompt)], all_logits=True)[0]
    clipped = paged_model(str(folder), kv_dtype=torch.float8_e4m3fn).step([(0, prompt)], all_logits=True)[0]
    assert read(folder) is None
    assert float((clipped - exact).abs().max()) > 0.2 * float(exact.abs().max())


@pytest.mark.parametrize("name", ["{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale"])
def test_every_name_is_known(large: Write, name: str) -> None:
    scales = drawn()
    found = read(large(named(scales, lambda letter: name.format(letter, letter))))
    assert found is not None
    expected = torch.tensor([[each["k"] * 2, each["v"] * 2] for each in scales])
    torch.testing.assert_close(found, expected)


def test_one_scale_for_both(large: Write) -> None:
    found = read(large({"model.layers.1.self_attn.kv_scale": torch.tensor(0.75)}))
    assert found is not None
    assert found.tolist() == [[[1.0] * 2] * 2, [[0.75] * 2] * 2, [[1.0] * 2] * 2]


@pytest.mark.parametrize(
    ("further", "said"),
    [
        ({"0.self_attn.k_scale": [0.5]}, "layer 0 lacks its v_scale"),
        ({"1.self_attn.kv_scale": [0.0]}, "kv_scale holds 0; a scale is finite and above zero"),
        ({"1.self_attn.kv_scale": [float("nan")]}, "kv_scale holds nan"),
        ({"7.self_attn.kv_scale": [0.5]}, "is of no layer; the model has 3"),
        ({"0.self_attn.kv_scale": [0.5, 0.5, 0.5]}, r"kv_scale is F32 \[3\]; the scale of a cache is one number, or 2"),
        ({"0.self_attn.kv_scale": [0.5], "0.self_attn.attn.k_scale": [1.0]}, "are scales of the same cache"),
    ],
)
def test_wrong_scales_are_named(large: Write, further: dict[str, list[float]], said: str) -> None:
    folder = large({f"model.layers.{name}": torch.tensor(numbers) for name, numbers in further.items()})
    with pytest.raises(ModelError, match=said):
        read(folder)
