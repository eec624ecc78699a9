"""Steps that verify drafts on the real executor: no token differs from plain decoding, and samples keep their odds."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.drafts.random_pace import decide_by_chance
from tests.runtime.executor.eagle_heads import quiet, save_head
from transformers import MistralConfig, MistralForCausalLM

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import EngineStats, FinishReason, Request, SamplingParams, TokenLogprobs
from stoker_runtime.step.batch import Batch

METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
}


def random_llama(folder: Path, seed: int, vocab: int | None = None, spread: float = 0.9) -> str:
    """A Llama of sizes and weights that come of `seed` alone; logits differ by more the larger `spread` is."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    kv_heads, head_dim = rng.choice([1, 2, 3]), rng.choice([4, 8, 12, 20])
    heads, layers, hidden = kv_heads * rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), 4 * rng.randint(5, 17)
    ffn, vocab = rng.randint(9, 90), vocab or rng.randint(40, 300)

    def weight(*shape: int) -> torch.Tensor:
        # Layers say little beside the embedding, so that the last token says most of the next, and texts go in circles.
        return torch.randn(*shape, generator=generator) * (spread if shape[0] == vocab else 0.15)

    sizes = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    tensors = {"model.embed_tokens.weight": weight(vocab, hidden), "lm_head.weight": weight(vocab, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(layers):
        tensors |= {f"model.layers.{layer}.{name}.weight": weight(*shape) for name, shape in sizes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(hidden)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "vocab_size": vocab, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 1,
        "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def smaller(model: str, noise: float) -> str:
    """A folder within `model` with its first layer alone, its ends a little off: what it says is often the same."""
    folder, generator = Path(model) / "draft", torch.Generator().manual_seed(8)
    folder.mkdir(exist_ok=True)
    tensors = load_file(Path(model) / "model.safetensors")
    for name in [name for name in tensors if "layers." in name and "layers.0." not in name]:
        del tensors[name]
    head = tensors["lm_head.weight"]
    tensors["lm_head.weight"] = head + noise * torch.randn(head.shape, generator=generator)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((Path(model) / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return str(folder)


def speculative(model: str, method: str) -> str:
    """The JSON of a method."""
    if not method:
        return ""
    drafts = {"draft_model": lambda: smaller(model, 0.1), "eagle3": lambda: save_head(model, len(model))}
    named = {"model": drafts[method]()} if method in drafts else {}
    return json.dumps(METHODS[method] | named)


def build(model: str, method: str, **sizes: Any) -> Executor:
    config = EngineConfig(
        model=model, device="cpu", dtype="float32", max_model_len=96, page_size=16,
        speculative_config=speculative(model, method), **sizes,
    )  # fmt: skip
    return build_executor(config)


def requests(rng: random.Random, vocab: int, count: int) -> list[Request]:
    """Texts that repeat themselves, and every parameter that has a say in what is sampled or when it ends."""
    made: list[Request] = []
    shared = [rng.randrange(vocab) for _ in range(33)]
    while len(made) < count:
        phrase = [rng.randrange(vocab) for _ in range(rng.randint(1, 7))]
        prompt = tuple((shared if rng.random() < 0.3 else []) + (phrase * 9)[: rng.randint(2, 40)])
        most = rng.choice([1, 2, 9, 40, 60])
        params = SamplingParams(
            max_tokens=most,
            min_tokens=rng.choice([0, 0, min(most, 9)]),
            temperature=rng.choice([0.0, 0.0, 0.2, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 0, 7]),
            seed=rng.getrandbits(40),
            ignore_eos=rng.random() < 0.6,
            stop_token_ids=(rng.randrange(vocab),) if rng.random() < 0.3 else (),
            presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.4]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.2]),
            logit_bias=((rng.randrange(vocab), 2.5),) if rng.random() < 0.2 else (),
            allowed_token_ids=tuple(rng.sample(range(vocab), 9)) if rng.random() < 0.1 else (),
            logprobs=rng.choice([None, None, 0, 3]),
        )
        family = f"f{len(made)}" if rng.random() < 0.2 else ""
        for at in range(2 if family else 1):
            seeded = params if not at else SamplingParams(max_tokens=most, temperature=0.9, seed=rng.getrandbits(40))
            made.append(Request(str(len(made)), prompt, seeded, priority=rng.randint(-1, 1), family=family))
    return made


@dataclass
class Answer:
    """What the outside saw of a request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: tuple[FinishReason | None, int | None] = (None, None)


def serve(
    executor: Executor, asked: list[Request], seed: int, *, at_once: bool = False, **options: Any
) -> tuple[dict[str, Answer], EngineStats]:
    """Every request's answer; they come a few at a time between steps, or all at once."""
    rng = random.Random(seed)
    loop = StepLoop(executor, EngineConfig(model="", **options))
    decide_by_chance(loop, rng)
    queue, answers = list(asked), {each.id: Answer() for each in asked}
    while queue or loop.has_work:
        for _ in range(len(queue) if at_once else min(len(queue), rng.choice([0, 0, 0, 0, 0, 1, 2, 5]))):
            loop.add(queue.pop(0))
        output = loop.step()
        loop.scheduler.check()
        for row, sequence in enumerate(output.sequences):
            mine = answers[sequence.request.id]
            assert mine.finish[0] is None, "a token after the end"
            mine.tokens.append(output.tokens[row])
            if output.logprobs and (logprobs := output.logprobs[row]) is not None:
                mine.logprobs.append(logprobs)
        for sequence in output.finished:
            answers[sequence.request.id].finish = sequence.finish, sequence.stop_token
    return answers, loop.stats()


@pytest.mark.parametrize(("method", "seed"), [("ngram", 14), ("suffix", 159), ("draft_model", 14), ("eagle3", 14)])
def test_drafts_change_no_answer(method: str, seed: int, tmp_path: Path) -> None:
    model = random_llama(tmp_path, seed)
    if method == "eagle3":
        model = quiet(model)
    plain = build(model, "", max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks=80)
    asked = requests(random.Random(seed), plain.vocab_size, 30)
    expected, _ = serve(plain, asked, seed, enable_prefix_caching=False)
    drafting = build(model, method, max_num_seqs=7, max_num_batched_tokens=31, num_gpu_blocks=17, num_cpu_blocks=9)
    got, stats = serve(drafting, asked, seed + 1, scheduling_policy="priority")
    for request in asked:
        mine, theirs = got[request.id], expected[request.id]
        assert (mine.tokens, mine.finish) == (theirs.tokens, theirs.finish), request
        values = [(a.logprob, b.logprob, a.rank - b.rank) for a, b in zip(mine.logprobs, theirs.logprobs, strict=True)]
        assert all(math.isclose(a, b, abs_tol=1e-4) and not rank for a, b, rank in values), request
    assert stats.draft_tokens > stats.accepted_tokens > 12
    assert min(stats.preemptions, stats.prefix_hits) > 0, "the device was meant to be crowded"
    for each in (plain, drafting):
        each.close()


def test_the_cost_of_every_verification_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = build(random_llama(tmp_path, 21), "suffix", max_num_seqs=5, max_num_batched_tokens=40, num_gpu_blocks=60)
    loop = StepLoop(executor, EngineConfig(model=""))
    decide_by_chance(loop, random.Random(21))
    assert loop.scheduler.speculation is not None
    monkeypatch.setattr(loop.scheduler.speculation.pace, "cost", lambda rows, k: 1 + 0.07 * k - 0.01 * rows)
    ran, execute = list[Batch](), executor.execute
    monkeypatch.setattr(executor, "execute", lambda batch: ran.append(batch) or execute(batch))
    for request in requests(random.Random(4), executor.vocab_size, 12):
        loop.add(request)
    while loop.has_work:
        loop.step()
    # A step that costs less than a plain one takes nothing back.
    costs = [len(each.decodes) * max(0.0, 0.07 * each.drafts - 0.01 * len(each.decodes)) for each in ran if each.drafts]
    assert len(costs) > 10
    assert loop.stats().draft_cost_tokens == pytest.approx(sum(costs))
    executor.close()


@pytest.mark.parametrize(
    ("method", "seed", "temperature", "top_p"),
    [("ngram", 5, 0.8, 1.0), ("draft_model", 6, 1.1, 0.9)],
)
def test_sampled_texts_are_distributed_as_the_model_says(
    method: str, seed: int, temperature: float, top_p: float, tmp_path: Path
) -> None:
    folder = random_llama(tmp_path, seed, 4, spread=0.15)
    # Without a window it computes what Llama does, whose class refuses heads that are not as wide as the model.
    sizes = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": None, "model_type": "mistral"}
    oracle = MistralForCausalLM.from_pretrained(folder, config=MistralConfig(**sizes), dtype=torch.float32).eval()
    executor = build(
        folder,
        method,
        max_num_seqs=24,
        max_num_batched_tokens=120,
        num_gpu_blocks=48,
    )
    check_distribution(executor, oracle, seed, temperature, top_p)
    executor.close()


def check_distribution(executor: Executor, oracle: Any, seed: int, temperature: float, top_p: float) -> None:
    """A thousand texts of four tokens, of a model that knows four, against every text's chance by `oracle`, which is
    transformers' model. Drafts are decided about by chance. Raises AssertionError.
    """
    vocab, length, count = 4, 4, 1000
    prompt = (2, 0, 3, 2, 0, 3, 2, 0, 3)
    params = [
        SamplingParams(max_tokens=length, temperature=temperature, top_p=top_p, seed=at, ignore_eos=True)
        for at in range(count)
    ]
    asked = [Request(str(at), prompt, each) for at, each in enumerate(params)]
    answers, stats = serve(executor, asked, seed, at_once=True)
    seen = Counter(tuple(answer.tokens) for answer in answers.values())
    likely = {
        text: math.prod(_chance(oracle, (*prompt, *text[:at]), text[at], temperature, top_p) for at in range(length))
        for text in itertools.product(range(vocab), repeat=length)
    }
    assert sum(likely.values()) == pytest.approx(1.0)
    assert set(seen) <= {text for text, chance in likely.items() if chance > 0}
    assert stats.accepted_tokens > count / 40
    _check_chi_squared([(seen[text], count * chance) for text, chance in likely.items() if chance > 0])


_known: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}


def _chance(oracle: Any, context: tuple[int, ...], token: int, temperature: float, top_p: float) -> float:
    """The probability of `token` behind `context`, from a forward pass of transformers' model over the whole."""
    key = (id(oracle), context)
    if key not in _known:
        with torch.no_grad():
            logits = oracle(torch.tensor([context])).logits[0, -1]
        chances = torch.softmax(logits.double() / temperature, dim=-1)
        order = chances.argsort(descending=True)
        kept = order[: int((chances[order].cumsum(0) < top_p).sum()) + 1]
        _known[key] = torch.zeros_like(chances).index_copy(0, kept, chances[kept] / chances[kept].sum())
    return float(_known[key][token])


def _check_chi_squared(pairs: list[tuple[int, float]]) -> None:
    """Seen and expected counts differ by no more than one experiment in a thousand would (Wilson-Hilferty)."""
    small = [pair for pair in pairs if pair[1] < 5]
    cells = [pair for pair in pairs if pair[1] >= 5] + [(sum(a for a, _ in small), sum(b for _, b in small))]
    cells = [pair for pair in cells if pair[1] > 0]
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3
    assert freedom > 10, "too few texts are likely"
    assert statistic < limit, f"chi-squared {statistic:.1f} of {freedom} degrees of freedom, above {limit:.1f}"
