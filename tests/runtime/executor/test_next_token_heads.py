"""Models' own heads for the token after the next: what they draft against transformers' layers, and what is refused."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.runtime.executor.test_eagle3 import listen
from tests.runtime.executor.test_speculation import build, random_llama, serve
from torch import Tensor
from torch.nn.functional import linear

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ModelError
from stoker_runtime.executor.drafts.head import NextDrafter
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Request, SamplingParams

_MIXED = {
    "hidden_size": 40, "intermediate_size": 52, "num_attention_heads": 4, "vocab_size": 31, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 28, "first_k_dense_replace": 1,
    "n_group": 3, "topk_group": 2, "max_position_embeddings": 256, "initializer_range": 0.25,
}  # fmt: skip
SIZES: dict[str, dict[str, Any]] = {
    "DeepseekV3": {
        "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 22, "qk_nope_head_dim": 14, "qk_rope_head_dim": 6,
        "v_head_dim": 9, "head_dim": 6,
    },
    "Glm4Moe": {"num_key_value_heads": 2, "head_dim": 20, "use_qk_norm": True, "attention_bias": True},
}  # fmt: skip


@dataclass
class PlainNext:
    """The last layer of `whole` as a head beside the others."""

    whole: Any
    tensors: dict[str, Tensor]
    ids: Tensor = field(init=False)

    def __post_init__(self) -> None:
        layers = self.whole.model.layers
        self.layer, self.whole.model.layers = layers[-1], layers[:-1]
        self.ids = torch.arange(self.whole.config.vocab_size)

    @torch.inference_mode()
    def drafts(self, known: list[int], count: int) -> tuple[list[int], Tensor]:
        """What it drafts behind `known`, and the logits of the last draft."""
        model = self.whole.model
        states = model(torch.tensor([known])).last_hidden_state[0, :-1]
        tokens, drafts = known[1:], []
        for _ in range(count):
            embedded = model.embed_tokens(torch.tensor(tokens))
            pairs = torch.cat((self._norm(embedded, "enorm"), self._norm(states, "hnorm")), dim=-1)
            out = self._norm(self._layer(linear(pairs, self.tensors["eh_proj.weight"])[None])[0], "shared_head.norm")
            logits = self.whole.lm_head(out[-1:])[0]
            drafts.append(int(logits.argmax()))
            tokens, states = [*tokens, drafts[-1]], torch.cat((states, out[-1:]))
        return drafts, logits

    def _layer(self, stream: Tensor) -> Tensor:
        length = stream.shape[1]
        at = torch.arange(length)[None]
        mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
        rotary = self.whole.model.rotary_emb(stream, at)
        out = self.layer(stream, attention_mask=mask, position_ids=at, position_embeddings=rotary)
        return out if isinstance(out, Tensor) else out[0]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.whole.config.rms_norm_eps
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * self.tensors[f"{name}.weight"]


def save_model(folder: Path, kind: str, seed: int, *, apt: bool = False, **sizes: float) -> tuple[str, PlainNext]:
    """A model whose last layer is its head, as such models are published, with `sizes` in the place of its own.

    `apt`: the head's stream begins with the token's embedding, which says what follows where layers say little.
    """
    torch.manual_seed(seed)
    layers = random.Random(seed).choice([2, 3])
    config = getattr(transformers, f"{kind}Config")(**{**_MIXED, **SIZES[kind], **sizes}, num_hidden_layers=layers + 1)
    config._attn_implementation = "eager"
    whole = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    whole.save_pretrained(folder)
    hidden = config.hidden_size
    own = {f"{name}.weight": 1 + 0.2 * torch.randn(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    own["eh_proj.weight"] = 0.2 * torch.randn(hidden, 2 * hidden)
    if apt:
        own["eh_proj.weight"] = 0.1 * own["eh_proj.weight"] + torch.eye(hidden, 2 * hidden)
    file = folder / "model.safetensors"
    tensors = load_file(file) | {f"model.layers.{layers}.{name}": each for name, each in own.items()}
    for name, end in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        tensors[f"model.layers.{layers}.{name}.weight"] = tensors[f"{end}.weight"].clone()
    save_file(tensors, file)
    given = json.loads((folder / "config.json").read_text())
    published = {"num_hidden_layers": layers, "num_nextn_predict_layers": 1, "mlp_layer_types": None}
    (folder / "config.json").write_text(json.dumps({**given, **published}))
    return str(folder), PlainNext(whole, own)


def with_its_head(model: str, **sizes: Any) -> Executor:
    given = {"max_model_len": 96, "page_size": 16, "dtype": "float32", **sizes}
    speculation = '{"method": "mtp", "num_speculative_tokens": 3}'
    return build_executor(EngineConfig(model=model, device="cpu", speculative_config=speculation, **given))


@pytest.mark.matrix
@pytest.mark.parametrize("kind", list(SIZES))
def test_a_models_own_head_drafts_as_it_was_trained(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = 40 + len(kind)
    model, oracle = save_model(tmp_path, kind, seed)
    sizes = {"max_num_seqs": 5, "max_num_batched_tokens": 23, "num_gpu_blocks": 14, "num_cpu_blocks": 9}
    plain, drafting = build(model, "", **sizes), with_its_head(model, **sizes)
    rng = random.Random(seed)
    params = [
        SamplingParams(max_tokens=50, temperature=temperature, seed=rng.getrandbits(40), ignore_eos=True)
        for temperature in (0.0, 0.3, 0.9) * 4
    ]
    prompts = [tuple(rng.randrange(plain.vocab_size) for _ in range(rng.randint(2, 40))) for _ in params]
    asked = [Request(str(at), *each) for at, each in enumerate(zip(prompts, params, strict=True))]
    expected, _ = serve(plain, asked, seed)
    got, stats = serve(drafting, asked, seed + 1)
    assert {name: each.tokens for name, each in got.items()} == {name: each.tokens for name, each in expected.items()}
    assert stats.draft_tokens > stats.accepted_tokens > 0
    drafter = drafting.drafter
    assert isinstance(drafter, NextDrafter)
    assert drafting.plan.weights - plain.plan.weights == drafter.model.weights > 0
    assert drafting.plan.kv_bytes == sum(arena.nbytes for arena in (drafting.arena, *drafter.arenas))
    listen(drafting, oracle, seed, monkeypatch)
    plain.close()


def test_what_has_no_head_of_its_own_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"LlamaForCausalLM.*its own heads are not run; those of DeepseekV3"):
        with_its_head(random_llama(tmp_path, 5))
    (tmp_path / "glm").mkdir()
    model, _ = save_model(tmp_path / "glm", "Glm4Moe", 3)
    file = tmp_path / "glm" / "config.json"
    config = json.loads(file.read_text())
    blocks = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0; it must be 1"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers is 2; it must be 1"),
        ({"quantization_config": blocks}, "in 16 or 32 bits alone, and this checkpoint is quantized"),
    )
    for changes, says in cases:
        file.write_text(json.dumps({**config, **changes}))
        with pytest.raises(ModelError, match=rf"^speculative_config: .*{says}"):
            with_its_head(model)
    file.write_text(json.dumps(config))
    weights = file.with_name("model.safetensors")
    save_file({name: each for name, each in load_file(weights).items() if "eh_proj" not in name}, weights)
    with pytest.raises(ModelError, match=r"lacks tensor layers\.0\.eh_proj\.weight \[40, 80\] of a Glm4MoeForCausalLM"):
        with_its_head(model)
