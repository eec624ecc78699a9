"""EAGLE-3 heads: what they draft against the same written plainly, what they take, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.executor.eagle_heads import PlainHead, quiet, save_head
from tests.runtime.executor.test_draft_model import Listener, crowd
from tests.runtime.executor.test_speculation import build, random_llama, serve
from tests.runtime.executor.texts_apart import check_apart
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.executor.drafts.head import HeadDrafter
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Request, SamplingParams


class HeadListener(Listener):
    """Compares what a head says with `PlainHead`."""

    oracle: PlainHead

    def _compare(self, known: list[int], said: list[int], logits: torch.Tensor | None) -> None:
        drafts, last = self.oracle.drafts(known, len(said))
        assert drafts == said
        if logits is not None:
            ids = self.oracle.ids
            torch.testing.assert_close(logits[ids], last, rtol=1e-3, atol=1e-3)
            assert int((logits > -torch.inf).sum()) == len(ids)
        self.compared += 1


def qwen(folder: Path, layers: int, seed: int) -> str:
    torch.manual_seed(seed)
    config = Qwen3Config(
        hidden_size=40, intermediate_size=52, num_hidden_layers=layers, num_attention_heads=6, num_key_value_heads=2,
        head_dim=12, vocab_size=131, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.4,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def drafted_by(model: str, head: str, **sizes: Any) -> Executor:
    speculation = json.dumps({"method": "eagle3", "model": head, "num_speculative_tokens": 3})
    given = {"max_model_len": 96, "page_size": 16, **sizes}
    return build_executor(
        EngineConfig(model=model, device="cpu", dtype="float32", speculative_config=speculation, **given)
    )


@pytest.mark.parametrize(("kind", "seed"), [("llama", 130), ("qwen", 31)])
def test_drafts_are_those_of_the_head_written_plainly(
    kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "llama":
        model = random_llama(tmp_path, seed)
        layers = json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"]
        taps = tuple(random.Random(seed).choices(range(layers), k=3))
        head = save_head(model, seed, taps=taps)
    else:
        model, taps = qwen(tmp_path, 7, seed), (2, 3, 4)  # which are those of seven layers, where nothing is said
        head = save_head(model, seed, taps=taps, own_table=True, speculators=True)
        config = json.loads((Path(head) / "config.json").read_text())
        del config["eagle_aux_hidden_state_layer_ids"]
        (Path(head) / "config.json").write_text(json.dumps(config))
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 23, "num_gpu_blocks": 14, "num_cpu_blocks": 9}
    executor = drafted_by(model, head, **sizes)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    oracle = PlainHead(Path(head), plain, taps, norm_first=kind == "qwen")
    listen(executor, oracle, seed, monkeypatch)


def listen(executor: Executor, oracle: Any, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crowd `executor` with greedy requests, and compare what is drafted with `oracle`."""
    crowd(executor, HeadListener(executor, oracle), seed, monkeypatch)


@pytest.mark.gpu
def test_a_head_drafts_within_graphs_on_a_gpu(tmp_path: Path) -> None:
    """In 16 bits, where a verification of more rows may round otherwise: not every text need be the same."""
    torch.manual_seed(37)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=192, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=517, max_position_embeddings=512, initializer_range=0.15, tie_word_embeddings=False,
    )  # fmt: skip
    target = LlamaForCausalLM(config)
    torch.nn.init.normal_(target.model.embed_tokens.weight, std=0.9)
    target.save_pretrained(tmp_path)
    model = quiet(str(tmp_path))
    speculation = json.dumps({"method": "eagle3", "model": save_head(model, 37), "num_speculative_tokens": 3})
    rng, params = random.Random(37), SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    prompts = [tuple(rng.randrange(517) for _ in range(rng.randint(2, 90))) for _ in range(24)]
    asked = [Request(str(at), prompt, params) for at, prompt in enumerate(prompts)]
    said = []
    for drafting in ("", speculation):
        executor = build_executor(
            EngineConfig(
                model=model, device="cuda", dtype="bfloat16", max_model_len=256, max_num_seqs=8, num_gpu_blocks=64,
                max_num_batched_tokens=128, speculative_config=drafting,
            )
        )  # fmt: skip
        answers, stats = serve(executor, asked, 37)
        said.append([answers[each.id].tokens for each in asked])
        if drafting:
            assert check_apart(executor, asked, *said) < len(asked) / 2
        executor.close()
    assert stats.accepted_tokens > stats.draft_tokens / 30 > 10


def test_pages_states_and_weights_are_counted(tmp_path: Path) -> None:
    model = random_llama(tmp_path, 3)
    executor = drafted_by(model, save_head(model, 3), cpu_kv_gb=1)
    drafter, plain = executor.drafter, build(model, "", cpu_kv_gb=1)
    assert isinstance(drafter, HeadDrafter)
    states = drafter.state_pages
    assert len(states[0, 0]) == len(drafter.arena[0, 0]) == executor.num_pages
    assert states[0, 0, 0].numel() == 16 * drafter.model.spec.hidden
    assert executor.plan.kv_bytes == executor.arena.nbytes + drafter.arena.nbytes + states.nbytes <= 1 << 30
    assert executor.plan.weights - plain.plan.weights == drafter.model.weights > 0
    assert executor.plan.state > plain.plan.state + drafter.model.state
    assert executor.describe()["draft_model"].startswith(f"{model}/head: EAGLE-3, hidden {drafter.model.spec.hidden}")
    for each in (executor, plain):
        each.close()


def changed(head: str, tensors: dict[str, Any] | None = None, **config: Any) -> str:
    """The head with some tensors others, or away where they are None, and some of its configuration others."""
    file = Path(head) / "model.safetensors"
    found = load_file(file) | (tensors or {})
    save_file({name: each for name, each in found.items() if each is not None}, file)
    given = json.loads((Path(head) / "config.json").read_text()) | config
    (Path(head) / "config.json").write_text(json.dumps(given))
    return head


def test_what_is_no_head_of_this_model_is_refused(tmp_path: Path) -> None:
    model = random_llama(tmp_path, 5, 77)
    (tmp_path / "other").mkdir()
    other = random_llama(tmp_path / "other", 6, 91)
    with pytest.raises(ConfigError, match=r"'eagle3', but '.*' is a model of its own; set method to 'draft_model'"):
        drafted_by(model, other)
    head = save_head(model, 5)
    speculation = json.dumps({"method": "draft_model", "model": head, "num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match=r"'draft_model', but '.*' is an EAGLE-3 head; set method to 'eagle3'"):
        build_executor(EngineConfig(model=model, device="cpu", speculative_config=speculation))
    with pytest.raises(ConfigError, match="vocabulary of 91 tokens, but the model's has 77"):
        drafted_by(model, save_head(other, 5))
    width = json.loads((tmp_path / "config.json").read_text())["hidden_size"]
    fusing = load_file(Path(head) / "model.safetensors")
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"target_hidden_size": width + 4}, f"hidden size {width + 4}, but this one.s is {width};"),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 40]}}, r"states before layers 1, 41, of which"),
        ({}, {"eagle_config": {"use_aux_hidden_state": False}}, r"use_aux_hidden_state is false"),
        ({}, {"num_hidden_layers": 2}, "num_hidden_layers is 2; a head has 1"),
        ({}, {"norm_before_fc": True}, "norm_before_fc is True"),
        ({}, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"d2t": None}, {}, r"tensor d2t is missing"),
        ({"d2t": fusing["d2t"][1:].contiguous()}, {}, r"tensor d2t is I64 .*; it must be"),
        ({"d2t": fusing["d2t"] + 40}, {}, r"tensor d2t leads to tokens"),
        ({"fc.weight": fusing["fc.weight"][:, 4:].contiguous()}, {}, r"tensor fc\.weight is"),
        ({"midlayer.hidden_norm.weight": None}, {}, r"lacks tensor layers\.0\.hidden_norm\.weight"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(3)}, {}, r"q_norm\.weight has no place"),
    ]
    for tensors, config, says in cases:
        with pytest.raises((ConfigError, ModelError), match=says):
            drafted_by(model, changed(save_head(model, 5), tensors, **config))
