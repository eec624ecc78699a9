"""Encoders against transformers: tiny random checkpoints of every family, and the real all-MiniLM-L6-v2."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import real_models

from stoker_kernels.launch import dispatch
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ModelError
from stoker_runtime.executor.pooling import pool_states
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.encoders.encoder import Encoder, EncoderInputs
from stoker_runtime.models.encoders.table import build_encoder
from stoker_runtime.models.pooling import read_pooling
from stoker_runtime.weights.encoder import load_encoder

CPU = torch.device("cpu")
BASE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}
MODERN = {"local_attention": 20, "pad_token_id": 0, "rope_parameters": {
    "full_attention": {"rope_type": "default", "rope_theta": 9700.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 310.0},
}}  # fmt: skip
# Name → the class of transformers, and what differs from BASE.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", {}),
    "bert-relu": ("BertModel", {"hidden_act": "relu", "layer_norm_eps": 1e-5}),
    "bert-mlm": ("BertForMaskedLM", {"hidden_act": "gelu_new"}),
    "roberta": ("RobertaModel", {"type_vocab_size": 1, "pad_token_id": 1}),
    "xlm-roberta": ("XLMRobertaModel", {"type_vocab_size": 1, "pad_token_id": 1}),
    "bert-score": ("BertForSequenceClassification", {"num_labels": 1}),
    "xlm-roberta-score": (
        "XLMRobertaForSequenceClassification",
        {"num_labels": 1, "type_vocab_size": 1, "pad_token_id": 1},
    ),
    "modernbert": ("ModernBertModel", {**MODERN, "num_hidden_layers": 5}),
    "modernbert-biased": (
        "ModernBertModel",
        MODERN
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "local_attention": 11}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "modernbert-mlm": ("ModernBertForMaskedLM", {**MODERN, "hidden_activation": "gelu_pytorch_tanh"}),
    "modernbert-score": ("ModernBertForSequenceClassification", {**MODERN, "num_labels": 1}),
    "modernbert-mean-score": (
        "ModernBertForSequenceClassification",
        {**MODERN, "num_labels": 1, "classifier_pooling": "mean", "classifier_bias": True},
    ),
    "nomic": ("NomicBertModel", {"rope_parameters": {"rope_type": "default", "rope_theta": 730.0}}),
    "gte": ("GteModel", {"rope_parameters": {"rope_type": "default", "rope_theta": 5100.0}}),
    "gte-untyped": ("GteModel", {"type_vocab_size": 0, "hidden_act": "gelu_new"}),
    "gte-score": ("GteForSequenceClassification", {"num_labels": 1, "type_vocab_size": 2}),
}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A folder with the named checkpoint, every parameter random."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = save_random(name, tmp_path_factory.mktemp(name))
        return made[name]

    return make


def save_random(name: str, folder: Path, **more: Any) -> Path:
    """`folder` with the named checkpoint, every parameter random; `more` differs from it."""
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"
    model_class, changes = CHECKPOINTS[name]
    found = getattr(transformers, model_class)
    model = found(found.config_class(**{**BASE, **changes, **more}))
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.2 * noise if noise.dim() == 1 and key.endswith("weight") else 0.2 * noise)
    model.save_pretrained(folder)
    return folder


def reference(folder: Path, name: str) -> Any:
    import transformers

    return getattr(transformers, CHECKPOINTS[name][0]).from_pretrained(folder, attn_implementation="eager").eval()


def load(folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> Encoder:
    spec = build_encoder(read_source(str(folder)))
    return Encoder(spec, load_encoder(folder, spec, device, dtype))


def inputs_of(encoder: Encoder, texts: list[list[int]], second: int = 0) -> EncoderInputs:
    """The texts end to end; token types are 1 from `second` on where the model has two."""

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    lengths = [len(text) for text in texts]
    two = second > 0 and encoder.spec.types > 1
    return EncoderInputs(
        ints([token for text in texts for token in text]),
        ints([at for length in lengths for at in range(length)]),
        ints([int(two and at >= second) for length in lengths for at in range(length)]),
        ints([sum(lengths[:at]) for at in range(len(texts) + 1)]),
    )


def random_texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 96, (length,), generator=generator).tolist() for length in (1, 37, 64, 5, 16)]


def typed(encoder: Encoder, text: list[int], second: int) -> dict[str, torch.Tensor]:
    """What transformers' model takes: token types where it knows them, 1 from `second` on where it has two."""
    found = {"input_ids": torch.tensor([text])}
    if encoder.spec.types:
        found["token_type_ids"] = torch.zeros(1, len(text), dtype=torch.long)
        found["token_type_ids"][:, second or len(text) :] = int(encoder.spec.types > 1)
    return found


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if "score" not in name])
def test_states_of_a_ragged_batch_equal_transformers(name: str, checkpoint: Make) -> None:
    folder = checkpoint(name)
    encoder, model = load(folder), reference(folder, name)
    for second in (0, 3):
        inputs = inputs_of(encoder, random_texts(), second)
        ours = encoder.forward(inputs).split([len(text) for text in random_texts()])
        for text, states in zip(random_texts(), ours, strict=True):
            with torch.no_grad():
                found = model(**typed(encoder, text, second), output_hidden_states=True)
            torch.testing.assert_close(states, found.hidden_states[-1][0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if "score" in name])
def test_scores_equal_transformers(name: str, checkpoint: Make) -> None:
    folder = checkpoint(name)
    encoder, model = load(folder), reference(folder, name)
    inputs = inputs_of(encoder, random_texts(), 2)
    pooling = read_pooling(read_source(str(folder)), EngineConfig(str(folder)))
    assert pooling is not None
    ours = encoder.scores(pool_states(encoder.forward(inputs), inputs.starts, pooling.pooling))
    for text, score in zip(random_texts(), ours, strict=True):
        with torch.no_grad():
            expected = model(**typed(encoder, text, 2)).logits[0]
        torch.testing.assert_close(score, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["bert", "modernbert", "nomic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_single(dtype: torch.dtype, name: str, checkpoint: Make) -> None:
    folder = checkpoint(name)
    exact, half = load(folder), load(folder, dtype)
    inputs = inputs_of(exact, random_texts())
    cosine = torch.nn.functional.cosine_similarity(exact.forward(inputs), half.forward(inputs).float(), dim=-1)
    assert cosine.min() > (0.9999 if dtype is torch.float16 else 0.995)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["modernbert", "modernbert-biased", "nomic", "gte"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_gives_the_states_of_encoders_that_rotate(dtype: torch.dtype, name: str, checkpoint: Make) -> None:
    device = torch.device("cuda")
    exact, half = load(checkpoint(name)), load(checkpoint(name), dtype, device)
    given = inputs_of(exact, random_texts())
    there = EncoderInputs(*(each.to(device) for each in (given.ids, given.positions, given.types, given.starts)))
    cosine = torch.nn.functional.cosine_similarity(exact.forward(given), half.forward(there).float().cpu(), dim=-1)
    assert cosine.min() > (0.9999 if dtype is torch.float16 else 0.99)
    assert "triton" in dispatch.chosen()["bidirectional_attention"]


def test_minilm_equals_transformers_for_mixed_lengths() -> None:
    import transformers

    folder = real_models.minilm()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    words = "The quick brown fox jumps over the lazy dog, isn't it? Größe naïveté 日本語 🙂".split()  # noqa: SIM905
    sentences = [" ".join(words[at % 7 :] * count) for at, count in enumerate((1, 9, 2, 1, 20, 4, 12))]
    texts = [tokenizer(sentence, truncation=True, max_length=512)["input_ids"] for sentence in sentences]
    encoder = load(folder)
    ours = encoder.forward(inputs_of(encoder, texts)).split([len(text) for text in texts])
    for text, states in zip(texts, ours, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([text])).last_hidden_state[0].mean(0)
        assert torch.nn.functional.cosine_similarity(states.mean(0), expected, dim=0) > 0.99999


def test_nomics_own_configuration(checkpoint: Make, tmp_path: Path) -> None:
    own = {
        "architectures": ["NomicBertModel"], "model_type": "nomic_bert", "n_embd": 48, "n_layer": 3, "n_head": 4,
        "n_inner": 80, "n_positions": 400, "max_trained_positions": 66, "rotary_scaling_factor": 2, "vocab_size": 96,
        "layer_norm_epsilon": 1e-12, "rotary_emb_base": 730, "rotary_emb_fraction": 1.0, "type_vocab_size": 2,
        "activation_function": "swiglu", "qkv_proj_bias": False, "prenorm": False, "causal": False,
    }  # fmt: skip
    names = load_file(checkpoint("nomic") / "model.safetensors")
    assert {"emb_ln.bias", "encoder.layers.2.mlp.fc12.weight", "encoder.layers.0.attn.Wqkv.weight"} <= set(names)
    folder = changed(checkpoint("nomic"), tmp_path)
    (folder / "config.json").write_text(json.dumps(own))
    encoder, same = load(folder), load(checkpoint("nomic"))
    assert encoder.spec.max_position == 66
    inputs = inputs_of(encoder, random_texts(), 3)
    torch.testing.assert_close(encoder.forward(inputs), same.forward(inputs), atol=0, rtol=0)
    for key, value in (("num_experts", 8), ("qkv_proj_bias", True), ("activation_function", "gelu"), ("prenorm", True)):
        (folder / "config.json").write_text(json.dumps(own | {key: value}))
        with pytest.raises(ModelError, match=f"{key} {value!r} is not supported"):
            load(folder)


def test_gtes_own_configuration_scales_by_ntk(checkpoint: Make, tmp_path: Path) -> None:
    names = load_file(checkpoint("gte-untyped") / "model.safetensors")
    assert {"encoder.layer.2.mlp.up_gate_proj.weight", "encoder.layer.0.attention.qkv_proj.bias"} <= set(names)
    own = {"architectures": ["NewModel"], "model_type": "new", "position_embedding_type": "rope", "pack_qkv": True}
    own |= {"rope_theta": 2300.0, "rope_scaling": {"type": "ntk", "factor": 3.5}, "rope_parameters": None}
    folder = changed(checkpoint("gte-untyped"), tmp_path, **own)
    encoder, model = load(folder), reference(checkpoint("gte-untyped"), "gte-untyped")
    dim = encoder.spec.head_dim
    model.rotary_emb.inv_freq.copy_((2300.0 * 3.5) ** -(torch.arange(0, dim, 2) / dim) / 3.5 ** (2 / dim))
    ours = encoder.forward(inputs_of(encoder, random_texts())).split([len(text) for text in random_texts()])
    for text, states in zip(random_texts(), ours, strict=True):
        with torch.no_grad():
            expected = model(torch.tensor([text])).last_hidden_state[0]
        torch.testing.assert_close(states, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(ModelError, match="logn_attention_scale True is not supported"):
        load(changed(folder, folder, logn_attention_scale=True))


def test_gtes_own_names_of_a_reranker(checkpoint: Make, tmp_path: Path) -> None:
    folder = changed(checkpoint("gte-score"), tmp_path, architectures=["NewForSequenceClassification"])
    tensors = load_file(folder / "model.safetensors")
    save_file({name.replace("gte.", "new."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    ours, same = load(folder), load(checkpoint("gte-score"))
    first = torch.randn(3, 48, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(ours.scores(first), same.scores(first), atol=0, rtol=0)
    inputs = inputs_of(ours, random_texts(), 2)
    torch.testing.assert_close(ours.forward(inputs), same.forward(inputs), atol=0, rtol=0)


def changed(folder: Path, target: Path, **settings: object) -> Path:
    """A copy of a checkpoint with other settings."""
    config = json.loads((folder / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    return target


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "relative_key"),
        ({"hidden_act": "mish"}, "'mish' is not supported; known are gelu"),
        ({"num_attention_heads": 5}, "do not divide into 5 heads"),
        ({"hidden_size": 64}, r"word_embeddings.weight is \[96, 48\]; the configuration asks for \[96, 64\]"),
        ({"num_hidden_layers": 2}, "encoder.layer.2.* has no place in a BertModel"),
        ({"num_hidden_layers": 4}, "lacks tensor encoder.layer.3.attention.self.query.weight"),
        ({"architectures": ["BertForSequenceClassification"]}, "with 2 labels is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized encoders"),
        ({"hidden_size": None}, "not usable"),
    ],
)
def test_what_would_change_the_result_is_refused(
    settings: dict[str, object], message: str, checkpoint: Make, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load(changed(checkpoint("bert"), tmp_path, **settings))


def test_a_tensor_in_an_encoding_that_is_not_read_is_named(checkpoint: Make, tmp_path: Path) -> None:
    folder = changed(checkpoint("bert"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "encoder.layer.1.output.dense.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=f"{name} is F8_E4M3"):
        load(folder)


def test_bytes_are_counted_as_they_are_allocated(checkpoint: Make) -> None:
    spec = build_encoder(read_source(str(checkpoint("bert-score"))))
    weights = load_encoder(checkpoint("bert-score"), spec, CPU, torch.float16)
    assert {weight.untyped_storage().nbytes() for weight in weights.values()} == {spec.parameter_bytes("float16")}
    assert replace(spec, scores=False).parameter_bytes("float16") < spec.parameter_bytes("float16")
