"""Adapters over several ranks: the tokens of PEFT's models and of one rank, whatever is loaded and unloaded meanwhile.

What one rank cannot read none keeps: damage is put where one rank alone looks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.adapters.peft_folders import adapted, greedy, load_base, make_adapter, merged
from tests.runtime.adapters.test_merged_models import KINDS, PROMPT, run
from tests.runtime.models.test_zoo import save_random

from stoker_runtime import LLM, LoRARequest
from stoker_runtime import SamplingParams as OfflineParams
from stoker_runtime.adapters.layout import AdapterLayout
from stoker_runtime.adapters.memory import AdapterMemory
from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError, NotFoundError, RequestError, StokerError
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.parallel.cut import Cut
from stoker_runtime.parallel.place import Place, places
from stoker_runtime.request import Request, SamplingParams

Ranks = Callable[..., LLM]
Checkpoint = Callable[[str], Path]
SIZES: dict[str, Any] = {
    "max_model_len": 128, "max_num_seqs": 6, "max_num_batched_tokens": 40, "num_gpu_blocks": 40, "enable_lora": True,
    "max_loras": 3, "max_lora_rank": 256,
}  # fmt: skip
CUTS = [(2, 1), (4, 1), (1, 2), (2, 2)]


def cut_sizes(tensors: int, stages: int) -> dict[str, int]:
    return {"tensor_parallel_size": tensors, "pipeline_parallel_size": stages}


ON_NODES = [{**cut_sizes(2, 1), "nnodes": 2}, {**cut_sizes(1, 2), "nnodes": 2}]
"""Folders of adapters are on each node."""


def test_each_row_gives_the_tokens_of_its_merged_model(
    ranks: Ranks, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("llama")
    loras: list[LoRARequest | None] = [None]
    expected = [greedy(load_base(base), PROMPT, 12)]
    for number, (kind, settings) in enumerate(KINDS.items(), 1):
        folder = make_adapter(base, tmp_path / kind, number, **settings)
        loras.append(LoRARequest(kind, number, str(folder)))
        expected.append(greedy(merged(base, folder), PROMPT, 12))
    assert len(set(map(tuple, expected))) == len(expected), "adapters have to be told apart by their tokens"
    for cut in (*(cut_sizes(*each) for each in CUTS), *ON_NODES):
        with ranks(str(base), **SIZES, **cut) as llm:
            assert run(llm, [PROMPT] * 2 * len(loras), loras * 2, 12) == expected * 2, cut


@pytest.mark.parametrize(("name", "cuts"), [("llama", [(2, 1), (1, 2)]), ("llama-tied", [(4, 1), (2, 2)])])
def test_the_embedding_and_the_head_are_adapted(
    name: str, cuts: list[tuple[int, int]], ranks: Ranks, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint(name)
    targets = ["embed_tokens", "q_proj"] + (["lm_head"] if name == "llama" else [])
    folder = make_adapter(base, tmp_path / "ends", 3, r=6, lora_alpha=6, target_modules=targets)
    lora, model = LoRARequest("ends", 9, str(folder)), adapted(base, folder)
    expected = [greedy(model, PROMPT, 10), greedy(load_base(base), PROMPT, 10)]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    scoring = OfflineParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
    for tensors, stages in cuts:
        with ranks(str(base), **SIZES, lora_embeddings=True, **cut_sizes(tensors, stages)) as llm:
            assert run(llm, [PROMPT, PROMPT], [lora, None], 10) == expected, (tensors, stages)
            scored = llm.generate([{"prompt_token_ids": PROMPT}], scoring, lora_request=lora)[0]
        told = scored.prompt_logprobs
        assert told is not None
        for at, token in enumerate(PROMPT[1:]):
            entry = told[at + 1]
            assert entry is not None
            assert entry[token].logprob == pytest.approx(float(logits[at, token]), abs=2e-4)


@pytest.mark.parametrize(("tensors", "stages", "nodes"), [(2, 1, 1), (1, 2, 1), (2, 1, 2)])
def test_random_schedules_with_loads_and_unloads(
    tensors: int, stages: int, nodes: int, ranks: Ranks, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("qwen3")
    names, rng = ["ada", "bo", "cy", "di"], random.Random(f"{tensors} {stages}")
    folders = [
        make_adapter(base, tmp_path / f"{name} {version}", number, r=rng.randint(1, 9), lora_alpha=6)
        for number, (name, version) in enumerate((name, version) for name in names for version in (1, 2))
    ]
    prompts = [[rng.randrange(3, 90) for _ in range(rng.randint(1, 40))] for _ in range(6)]
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)

    def alone(folder: Path | None) -> list[list[int]]:
        request = LoRARequest("one", 1, str(folder)) if folder else None
        sizes: dict[str, Any] = {**SIZES, "device": "cpu", "dtype": "float32", "page_size": 16, "cpu_threads": 1}
        with LLM(str(base), **sizes) as llm:
            return run(llm, prompts, [request] * len(prompts), 9)

    expected = {str(folder): alone(folder) for folder in (None, *folders)}
    crowded = {"num_gpu_blocks": 14, "max_num_batched_tokens": 16, "max_loras": 2, "max_cpu_loras": 3}
    with ranks(str(base), **{**SIZES, **crowded}, **cut_sizes(tensors, stages), nnodes=nodes) as llm:
        loop, told = llm.engine, []
        asked: list[tuple[Any, list[int]]] = []
        for turn in range(400):
            chance, served = rng.random(), sorted(loop.adapters.served)
            if chance < 0.2 and len(asked) < 60:
                name = rng.choice([None, *served])
                adapter = loop.adapters.served[name] if name else None
                prompt = rng.randrange(len(prompts))
                sequence = loop.add(
                    Request(str(turn), tuple(prompts[prompt]), params, adapter=adapter.number if adapter else 0)
                )
                asked.append((sequence, expected[adapter.path if adapter else "None"][prompt]))
            elif chance < 0.3:
                at = rng.randrange(len(folders))
                try:
                    loop.adapters.load(names[at // 2], str(folders[at]), "", told.append, replace=rng.random() < 0.7)
                except RequestError:
                    assert names[at // 2] in served or loop.adapters.busy
            elif chance < 0.33 and served:
                loop.adapters.unload(rng.choice(served))
            elif chance < 0.36 and asked:
                loop.abort(rng.choice(asked)[0])
            else:
                loop.step()
                loop.scheduler.check()
                loop.adapters.check()
        while loop.has_work or loop.adapters.busy:
            loop.step()
        finished = [(sequence, tokens) for sequence, tokens in asked if sequence.finish.value != "abort"]
        for sequence, tokens in finished:
            assert sequence.tokens[sequence.prompt_length :].tolist() == tokens
        assert len(finished) > 10
        assert told
        assert not any(told)


def damaged(folder: Path, target: Path, tensor: str, place: tuple[int, int]) -> Path:
    """A copy of an adapter with one value that is none."""
    target.mkdir()
    for each in folder.iterdir():
        (target / each.name).write_bytes(each.read_bytes())
    file = target / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[f"base_model.model.model.layers.{tensor}.weight"][place] = torch.nan
    save_file(tensors, file)
    return target


@pytest.mark.parametrize(
    ("cut", "tensor", "place", "rank"),
    [
        ((1, 2), "0.mlp.up_proj.lora_A", (0, 0), 1),
        ((1, 2), "2.mlp.up_proj.lora_A", (0, 0), 0),
        ((2, 1), "1.mlp.gate_proj.lora_B", (-1, 1), 1),
        ((2, 1), "1.mlp.down_proj.lora_A", (1, 0), 0),
    ],
)
def test_what_one_rank_cannot_read_none_keeps(
    cut: tuple[int, int], tensor: str, place: tuple[int, int], rank: int, ranks: Ranks, tiny_checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:  # fmt: skip
    base = tiny_checkpoint("llama")
    good = make_adapter(base, tmp_path / "good", 4, r=3, lora_alpha=9)
    bad = damaged(good, tmp_path / "bad", tensor, place)
    expected = greedy(merged(base, good), PROMPT, 8)
    with ranks(str(base), **SIZES, **cut_sizes(*cut)) as llm:
        lora = LoRARequest("one", 1, str(good))
        assert run(llm, [PROMPT], [lora], 8) == [expected]
        loop = llm.engine
        before = dict(loop.adapters.served)
        for name, replace in (("two", False), (next(iter(before)), True)):
            with pytest.raises(RequestError, match="not finite") as found:
                loop.adapters.load_now(name, str(bad), replace=replace)
            assert ("rank 1: " in found.value.message) == (rank == 1)
            assert str(bad) in found.value.message
            assert loop.adapters.served == before
        assert run(llm, [PROMPT, PROMPT], [lora, lora], 8) == [expected] * 2
        # The reader of a rank may break in other ways than the file does.
        loop.adapters.load_now("two", str(good))
        loop.adapters.unload("two")
        with pytest.raises(NotFoundError):
            loop.adapters.unload("two")
        assert run(llm, [PROMPT], [lora], 8) == [expected]


@pytest.mark.parametrize("cut", [(2, 1), (1, 2)])
def test_adapters_sleep_and_come_back_on_all_ranks(
    cut: tuple[int, int], ranks: Ranks, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    base = tiny_checkpoint("llama")
    folders = [make_adapter(base, tmp_path / str(number), number, r=4, lora_alpha=9) for number in (1, 2)]
    old, new = (greedy(merged(base, folder), PROMPT, 8) for folder in folders)
    assert old != new
    served = tmp_path / "served"
    served.mkdir()

    def publish(folder: Path) -> None:
        for each in folder.iterdir():
            (served / each.name).write_bytes(each.read_bytes())

    publish(folders[0])
    lora = LoRARequest("one", 1, str(served))
    with ranks(str(base), **SIZES, enable_sleep_mode=True, **cut_sizes(*cut)) as llm:
        assert run(llm, [PROMPT], [lora], 8) == [old]
        publish(folders[1])
        for level, tokens in ((1, old), (2, new)):
            llm.sleep(level)
            llm.wake_up()
            assert run(llm, [PROMPT], [lora], 8) == [tokens], level
        # One rank cannot read its part: all keep what they had.
        publish(damaged(folders[0], tmp_path / "bad", "0.mlp.up_proj.lora_B", (0, 0)))
        llm.sleep(2)
        llm.wake_up()
        assert run(llm, [PROMPT], [lora], 8) == [new]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3"])
@pytest.mark.parametrize(("tensors", "stages"), [(2, 1), (2, 2), (1, 3)])
def test_the_parts_of_all_ranks_are_the_adapter(
    name: str, tensors: int, stages: int, tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Every value of the whole is on some rank, at the place that the rank's own sizes give, and counted there."""
    base = tiny_checkpoint(name)
    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "embed_tokens"]
    folder = make_adapter(base, tmp_path / "one", 5, r=5, lora_alpha=5, target_modules=targets)
    spec = build_spec(read_source(str(base)))
    config = EngineConfig(str(base), enable_lora=True, max_lora_rank=5, lora_embeddings=True)
    config = resolved(config, spec)
    cpu, whole = torch.device("cpu"), load_file(folder / "adapter_model.safetensors")
    seen = {each: torch.zeros(tensor.shape) for each, tensor in whole.items()}
    for place in places(tensors, stages):
        cut = Cut(spec, place)
        own = AdapterLayout.of(cut.spec, embeddings=True)
        memory = AdapterMemory(config, cut.spec, torch.float32, cpu, cut)
        assert [(each.a, each.b, each.rows) for each in memory.layout.places] == [
            (each.a, each.b, each.rows) for each in own.places
        ]
        memory.keep(1, memory.read(str(folder)))
        memory.load(1, 0)
        for each in memory.layout.places:
            target, row = memory.targets[each.name], 0
            for index, piece in enumerate(each.pieces):
                end = row + len(piece.rows)
                stem = f"base_model.model.{piece.module}.lora_"
                a, b = ("embedding_A", "embedding_B") if each.name == "embed" else ("A.weight", "B.weight")
                if stem + a in whole:
                    columns, rows = (
                        slice(piece.columns.start, piece.columns.stop),
                        slice(piece.rows.start, piece.rows.stop),
                    )
                    assert torch.equal(target.a[0, :, index], whole[stem + a][:, columns])
                    assert torch.equal(target.b[0, :, row:end].T, whole[stem + b][rows] * each.factor)
                    seen[stem + a][:, columns] = 1
                    seen[stem + b][rows] = 1
                row = end
    left = {each for each, tensor in seen.items() if not tensor.all() and "lora_" in each}
    assert not left


def test_adapters_of_several_matrices_in_one_are_refused_over_tensors(tmp_path: Path) -> None:
    """As Phi-3's Q, K and V; stages have whole ones."""
    save_random("Phi3ForCausalLM", tmp_path, num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    spec = build_spec(read_source(str(tmp_path)))
    spec = replace(spec, ffn=64)
    assert AdapterLayout.of(Cut(spec, Place(0, 1, 3)).spec, embeddings=False, cut=Cut(spec, Place(0, 1, 3))).line
    cut = Cut(spec, Place(1, 2, 1))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 2 .*qkv_proj is several"):
        AdapterLayout.of(cut.spec, embeddings=False, cut=cut)


def resolved(config: EngineConfig, spec: Any) -> EngineConfig:
    from stoker_runtime.executor.resolve import resolve

    return resolve(config, spec, "cpu")


def test_several_engines_serve_no_adapters_yet() -> None:
    with pytest.raises(StokerError, match="data_parallel_size"):
        EngineConfig("m", enable_lora=True, data_parallel_size=2).validate()
