"""Random schedules of one small model, with adapters that are loaded, replaced, unloaded and crowded out meanwhile.

What each request gives is what PEFT's merged model of its own folder gives in fp32, as far as it was let go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.adapters.peft_folders import greedy, load_base, make_adapter, merged

from stoker_runtime import LLM
from stoker_runtime.errors import RequestError, StokerError
from stoker_runtime.request import FinishReason, Request, SamplingParams
from stoker_runtime.scheduler.sequence import Sequence

SIZES: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_model_len": 64, "page_size": 16, "max_num_seqs": 5,
    "max_num_batched_tokens": 24, "num_gpu_blocks": 6, "enable_lora": True, "max_loras": 2, "max_cpu_loras": 3,
    "max_lora_rank": 13, "generation_config": "none", "cpu_threads": 1,
}  # fmt: skip
NAMES = ("north", "east", "south")
TOKENS = 12
SCHEDULES = 2000
SHARED = tuple(random.Random(41).choices(range(3, 120), k=26))
PROMPTS = (SHARED[:5], SHARED[:14], SHARED, (*SHARED[:18], 77, 12), (9,))


class Folders:
    """Folders of adapters, two for each name, and what the model says with each; "" is the model itself."""

    def __init__(self, base: Path, root: Path) -> None:
        self.paths = {
            name: [
                str(make_adapter(base, root / f"{name}{at}", 7 * at + seed, r=rank, lora_alpha=rank + 2))
                for at, rank in enumerate(ranks)
            ]
            for (seed, name), ranks in zip(enumerate(NAMES, 20), ((2, 13), (5, 1), (8, 3)), strict=True)
        }
        models = {path: merged(base, Path(path)) for paths in self.paths.values() for path in paths}
        self.said = {
            (path, prompt): greedy(model, list(prompt), TOKENS)
            for path, model in (models | {"": load_base(base)}).items()
            for prompt in PROMPTS
        }


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def model(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, Folders]]:
    base = tiny_checkpoint("llama")
    folders = Folders(base, tmp_path_factory.mktemp("folders"))
    assert len({tuple(folders.said[path, SHARED]) for path, prompt in folders.said if prompt == SHARED}) == 7
    with LLM(str(base), **SIZES | {"device": request.param}) as llm:
        yield llm, folders


class Schedule:
    """One random schedule, and what its requests must give."""

    def __init__(self, llm: LLM, folders: Folders, rng: random.Random) -> None:
        self.loop = llm.engine
        self.folders = folders
        self.rng = rng
        self.asked: list[tuple[Sequence, list[int]]] = []
        self.told: list[StokerError | None] = []

    def step(self) -> None:
        self.loop.step()
        self.loop.scheduler.check()
        self.loop.adapters.check()

    def ask(self, turn: int) -> None:
        adapter = self.loop.adapters.served.get(self.rng.choice(["", *NAMES]))
        prompt, tokens = self.rng.choice(PROMPTS), self.rng.randint(1, TOKENS)
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = Request(str(turn), prompt, params, adapter=adapter.number if adapter else 0)
        self.asked.append((self.loop.add(request), self.folders.said[adapter.path if adapter else "", prompt][:tokens]))

    def load(self) -> None:
        name = self.rng.choice(NAMES)
        path, replace = self.rng.choice(self.folders.paths[name]), self.rng.random() < 0.6
        try:
            self.loop.adapters.load(name, path, "", self.told.append, replace=replace)
        except RequestError:
            assert name in self.loop.adapters.served or self.loop.adapters.busy

    def run(self) -> int:
        """To its end: how many requests were compared."""
        for turn in range(30):
            chance, served = self.rng.random(), sorted(self.loop.adapters.served)
            if chance < 0.4:
                self.ask(turn)
            elif chance < 0.55:
                self.load()
            elif chance < 0.6 and served:
                self.loop.adapters.unload(self.rng.choice(served))
            elif chance < 0.66 and self.asked:
                self.loop.abort(self.rng.choice(self.asked)[0])
            else:
                self.step()
        while self.loop.has_work or self.loop.adapters.busy:
            self.step()
        assert not any(self.told)
        for sequence, expected in self.asked:
            got = sequence.tokens[sequence.prompt_length :].tolist()
            aborted = sequence.finish is FinishReason.ABORT
            assert got == (expected[: len(got)] if aborted else expected), f"{sequence.request}, aborted: {aborted}"
        return len(self.asked)


@pytest.mark.parametrize("block", range(4))
def test_each_request_gives_the_tokens_of_its_own_merged_model(model: tuple[LLM, Folders], block: int) -> None:
    llm, folders = model
    compared, before = 0, llm.engine.stats()
    for seed in range(block * SCHEDULES // 4, (block + 1) * SCHEDULES // 4):
        try:
            compared += Schedule(llm, folders, random.Random(seed)).run()
        except AssertionError as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
    after = llm.engine.stats()
    assert compared > 5 * SCHEDULES // 4
    assert after.prefix_hits > before.prefix_hits
    assert after.preemptions > before.preemptions, "pages have to be scarce"
