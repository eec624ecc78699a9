"""Models that pool, whole: decoders and encoders through `LLM.embed` and `LLM.score`, against transformers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors
from tokenizers.decoders import WordPiece

from stoker_kernels.launch import dispatch
from stoker_runtime import LLM, PoolingParams
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError, RequestError
from stoker_runtime.executor.pooling_resolve import plan_pooling, resolve_pooling
from stoker_runtime.executor.resolve import DeviceMemory
from stoker_runtime.models.config_source import read_source
from stoker_runtime.models.pooling import Pooling, PoolingSpec, Task
from stoker_runtime.models.pooling_spec import pooling_spec
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.terminal import info

Checkpoint = Callable[[str], Path]
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz")


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 128, (length,), generator=generator).tolist() for length in (1, 37, 16, 5, 70, 16)]


def embed(llm: LLM, given: Any, **params: Any) -> list[list[float]]:
    """The vectors alone."""
    return [each.outputs.embedding for each in llm.embed(given, pooling_params=PoolingParams(**params))]


def scores_of(llm: LLM, first: Any, second: Any) -> list[float]:
    """The scores alone."""
    return [each.outputs.score for each in llm.score(first, second)]


def hidden_states(model: Any, text: list[int]) -> torch.Tensor:
    """The states of the last layer after the final norm, as transformers computes them."""
    with torch.no_grad():
        found = model(torch.tensor([text]), output_hidden_states=True)
    states: torch.Tensor = found.hidden_states[-1][0]
    return states


@pytest.mark.parametrize("name", ["qwen3", "llama-tied", "qwen2-window"])
def test_a_decoder_gives_its_last_tokens_state(
    name: str, tiny_checkpoint: Checkpoint, reference_model: Callable[[str], Any]
) -> None:
    # 80 tokens a step: the texts take several steps, and share them.
    with LLM(str(tiny_checkpoint(name)), device="cpu", runner="pooling", max_model_len=80) as llm:
        plain, normal = embed(llm, texts(), normalize=False), embed(llm, texts())
    for text, vector, unit in zip(texts(), plain, normal, strict=True):
        expected = hidden_states(reference_model(name), text)[-1]
        torch.testing.assert_close(torch.tensor(vector), expected, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(torch.tensor(unit), expected / expected.norm(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mean", "max", "cls"])
def test_other_poolings_of_a_decoder(
    kind: str, tiny_checkpoint: Checkpoint, reference_model: Callable[[str], Any]
) -> None:
    given = json.dumps({"pooling_type": kind.upper(), "normalize": False})
    with LLM(str(tiny_checkpoint("qwen3")), device="cpu", runner="pooling", pooler_config=given) as llm:
        vectors = embed(llm, texts())
    for text, vector in zip(texts(), vectors, strict=True):
        states = hidden_states(reference_model("qwen3"), text)
        expected = {"mean": states.mean(0), "max": states.amax(0), "cls": states[0]}[kind]
        torch.testing.assert_close(torch.tensor(vector), expected, atol=2e-4, rtol=1e-4)


def test_a_decoder_saved_without_its_head(
    tiny_checkpoint: Checkpoint, reference_model: Callable[[str], Any], tmp_path: Path
) -> None:
    tensors = load_file(tiny_checkpoint("qwen3") / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    save_file(bare, tmp_path / "model.safetensors")
    config = json.loads((tiny_checkpoint("qwen3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    with LLM(str(tmp_path), device="cpu") as llm:
        vector = embed(llm, texts()[1], normalize=False)[0]
    expected = hidden_states(reference_model("qwen3"), texts()[1])[-1]
    torch.testing.assert_close(torch.tensor(vector), expected, atol=2e-4, rtol=1e-4)


def test_quantized_decoders_embed_nearly_the_same(tiny_checkpoint: Checkpoint) -> None:
    path = str(tiny_checkpoint("qwen3"))
    with LLM(path, device="cpu", runner="pooling") as llm:
        exact = torch.tensor(embed(llm, texts()))
    with LLM(path, device="cpu", runner="pooling", quantization="fp8") as llm:
        rounded = torch.tensor(embed(llm, texts()))
    cosine = (exact * rounded).sum(1)
    assert 0.98 < cosine.min() < 1.0 - 1e-5


def encoder_folder(path: Path, architecture: str, **settings: object) -> Path:
    """A tiny BERT, or another encoder, with a tokenizer of letters."""
    import transformers

    found = getattr(transformers, architecture)
    torch.manual_seed(3)
    model = found(
        found.config_class(
            vocab_size=len(WORDS),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=48,
            max_position_embeddings=40,
            pad_token_id=0,
            **settings,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    model.save_pretrained(path)
    rust = RustTokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    rust.normalizer = normalizers.Lowercase()
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.decoder = WordPiece()
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    # As training scripts leave it: what is saved must not cut or fill up.
    rust.enable_truncation(4)
    rust.enable_padding(length=12)
    rust.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("family", ["Bert", "ModernBert", "Gte"])
def test_pairs_are_scored_as_transformers_scores_them(family: str, tmp_path: Path) -> None:
    import transformers

    folder = encoder_folder(tmp_path, f"{family}ForSequenceClassification", num_labels=1)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with LLM(str(folder), device="cpu") as llm:
        scores = scores_of(llm, "a b c", ["d e", "F", "a b c d e f g"])
        with pytest.raises(RequestError, match="it has no embeddings"):
            embed(llm, "a")
        with pytest.raises(RequestError, match="does not generate"):
            llm.generate("a")
    for second, score in zip(([7, 8], [9], [4, 5, 6, 7, 8, 9, 10]), scores, strict=True):
        ids = [2, 4, 5, 6, 3, *second, 3]
        types = [0] * 5 + [int(family == "Bert")] * (len(second) + 1)
        typed = {"token_type_ids": torch.tensor([types])} if family != "ModernBert" else {}
        with torch.no_grad():
            logit = model(torch.tensor([ids]), **typed).logits[0, 0]
        assert score == pytest.approx(float(torch.sigmoid(logit)), abs=1e-5)


def test_embeddings_are_scored_by_their_angle(tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path, "BertModel")
    with LLM(str(folder), device="cpu") as llm:
        one, two = torch.tensor(embed(llm, ["a b", "c"]))
        assert scores_of(llm, "a b", ["c", "a b"]) == pytest.approx([float(one @ two), 1.0], abs=1e-6)
        assert scores_of(llm, ["a b", "c"], ["c", "c"]) == pytest.approx([float(one @ two), 1.0], abs=1e-6)
        with pytest.raises(RequestError, match="2 first texts and 3 second ones"):
            scores_of(llm, ["a", "b"], ["c", "d", "e"])
        with pytest.raises(RequestError, match="at most 40"):
            embed(llm, ["a", [5] * 41])
        assert embed(llm, "a b") == [pytest.approx(one.tolist(), abs=1e-6)]
        with pytest.raises(RequestError, match="Matryoshka"):
            embed(llm, "a", dimensions=8)


def test_matryoshka_vectors_are_cut_and_normalized(tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path, "BertModel")
    with LLM(str(folder), device="cpu", pooler_config='{"matryoshka_dimensions": [8, 99]}') as llm:
        whole, cut = torch.tensor(embed(llm, "a b")[0]), torch.tensor(embed(llm, "a b", dimensions=8)[0])
        torch.testing.assert_close(cut, whole[:8] / whole[:8].norm())
        with pytest.raises(RequestError, match="between 1 and 32"):
            embed(llm, "a", dimensions=99)


def test_a_model_that_generates_does_not_embed(tiny_checkpoint: Checkpoint) -> None:
    with LLM(str(tiny_checkpoint("llama")), device="cpu") as llm, pytest.raises(RequestError, match="runner='pooling'"):
        embed(llm, [[1, 2]])


def test_only_generating_models_have_a_generating_executor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not generate"):
        build_executor(EngineConfig(str(encoder_folder(tmp_path, "BertModel")), device="cpu"))


def test_an_architecture_that_is_not_known_is_named(tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path, "BertModel")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["MPNetModel"]}))
    says = "MPNetModel is not supported. The nearest is .*Model. Supported .* BertModel.*stoker_runtime/models/encoders"
    with pytest.raises(ModelError, match=says):
        LLM(str(folder), device="cpu")
    shutil.rmtree(folder)


def test_sizes(tmp_path: Path) -> None:
    spec = pooling_spec(read_source(str(encoder_folder(tmp_path, "BertModel"))))
    pooling = PoolingSpec(Task.EMBED, Pooling.MEAN, normalize=True, max_tokens=16)
    config = EngineConfig("m")
    cpu, gpu = (resolve_pooling(config, spec, pooling, device) for device in ("cpu", "cuda"))
    assert (cpu.dtype, cpu.max_model_len, gpu.dtype) == ("float32", 16, "float16")
    wide = replace(spec, dtype="bfloat16")
    found = [resolve_pooling(config, wide, pooling, "cuda", gpu_bf16=has).dtype for has in (True, False)]
    assert found == ["bfloat16", "float16"]
    longer = resolve_pooling(EngineConfig("m", max_model_len=40, max_num_batched_tokens=20), spec, pooling, "cpu")
    assert (longer.max_model_len, longer.max_num_batched_tokens) == (40, 40)
    with pytest.raises(ConfigError, match="positions end at 40"):
        resolve_pooling(EngineConfig("m", max_model_len=41), spec, pooling, "cpu")
    with pytest.raises(ConfigError, match="not quantized"):
        resolve_pooling(EngineConfig("m", quantization="fp8"), spec, pooling, "cpu")
    plan = plan_pooling(gpu, spec, DeviceMemory(1 << 40, 0))
    assert plan.weights == spec.parameter_bytes("float16")
    with pytest.raises(ConfigError, match="lower --max-num-batched-tokens"):
        plan_pooling(gpu, spec, DeviceMemory(256 * 1024**2, 0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_gpu_gives_an_encoders_vectors(dtype: str, tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path, "BertModel")
    generator = torch.Generator().manual_seed(1)
    many = [torch.randint(4, 30, (1 + at % 40,), generator=generator).tolist() for at in range(300)]
    for kind in Pooling:
        given = json.dumps({"pooling_type": kind})
        with LLM(str(folder), device="cpu", pooler_config=given) as llm:
            exact = torch.tensor(embed(llm, many))
        with LLM(str(folder), device="cuda", dtype=dtype, pooler_config=given) as llm:
            vectors = torch.tensor(embed(llm, many))
        assert (exact * vectors).sum(1).min() > {"float32": 0.99999, "float16": 0.9999, "bfloat16": 0.99}[dtype], kind
    assert "triton" in dispatch.chosen()["bidirectional_attention"]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["LAST", "MEAN"])
def test_a_gpu_gives_a_decoders_vectors(kind: str, tiny_checkpoint: Checkpoint) -> None:
    given = json.dumps({"pooling_type": kind})
    options = {"runner": "pooling", "pooler_config": given, "max_model_len": 128}
    with LLM(str(tiny_checkpoint("qwen3")), device="cpu", **options) as llm:
        exact = torch.tensor(embed(llm, texts() * 40))
    with LLM(str(tiny_checkpoint("qwen3")), device="cuda", dtype="bfloat16", **options) as llm:
        vectors = torch.tensor(embed(llm, texts() * 40))
    assert (exact * vectors).sum(1).min() > 0.99


def test_info_says_what_a_model_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert info.main([str(encoder_folder(tmp_path, "BertModel")), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "BertModel, 2 layers, hidden 32" in shown
    assert "embed: cls, normalized, texts of up to 40 tokens" in shown
    assert re.search(r"bidirectional_attention +reference\n", shown)


def test_a_model_without_kv_wants_no_host_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert info.main([str(encoder_folder(tmp_path, "BertModel")), "--device", "cpu", "--swap-space", "1"]) == 2
    assert "keeps no KV cache; leave --swap-space out" in capsys.readouterr().err
