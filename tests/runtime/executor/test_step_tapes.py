"""Steps that are replayed on a CPU say what steps that are not say, whoever comes and goes; and what has no tape."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.weights.test_block_plan import VOCAB, write

from stoker_kernels.block_gemm import packing_bf16_refusal, packing_refusal
from stoker_kernels.launch import cc
from stoker_runtime import LLM, SamplingParams
from stoker_runtime.executor import step_tapes
from stoker_runtime.executor.step_tapes import StepTapes

WITHOUT = packing_refusal() or cc.refusal("cpu_tape")
pytestmark = pytest.mark.skipif(WITHOUT is not None, reason=f"steps on a CPU: {WITHOUT}")
FORMATS = ("Q8_0", "Q4_0", "Q4_1", "IQ4_NL")
NO_BF16 = packing_bf16_refusal()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "model.gguf", {"ffn_down": random.choice(FORMATS)}, random.choice(FORMATS))


def opened(model: Path | str, **options: Any) -> LLM:
    given = {"device": "cpu", "max_model_len": 128, "cpu_threads": 1, "max_num_seqs": 6, "page_size": 16, **options}
    return LLM(str(model), **given)


def tapes_of(llm: LLM) -> StepTapes:
    return llm.engine.executor.body.tapes


def said(llm: LLM, rng: random.Random) -> list[list[int]]:
    """Rounds of requests of other numbers and lengths, greedy and sampled, that end one after the other."""
    found: list[list[int]] = []
    for count in (3, 1, 6, 3, 1):
        asked = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(count)]
        ways = [
            SamplingParams(max_tokens=rng.randint(2, 14), temperature=rng.choice((0.0, 0.9)), seed=at, ignore_eos=True)
            for at in range(count)
        ]
        found += llm.generate_tokens(asked, ways)
        llm.engine.scheduler.check()
    return found


@pytest.mark.parametrize(
    "dtype",
    ["float32", pytest.param("bfloat16", marks=pytest.mark.skipif(NO_BF16 is not None, reason=f"bf16: {NO_BF16}"))],
)
def test_replayed_steps_say_the_same(file: Path, dtype: str) -> None:
    seed = random.randrange(1 << 30)
    plain = opened(file, dtype=dtype, enforce_eager=True)
    expected = said(plain, random.Random(seed))
    assert tapes_of(plain).recorded == 0
    # Few pages: sequences come back after others had their places.
    replaying = opened(file, dtype=dtype, num_gpu_blocks=13)
    assert said(replaying, random.Random(seed)) == expected
    # Of requests that end at other times some number of rows ran twice in a row; of two that end together, two did.
    assert tapes_of(replaying).recorded >= 1
    asked, ways = [[7, 3], [5]], [SamplingParams(max_tokens=11, temperature=0.0, ignore_eos=True)] * 2
    for _ in range(2):
        assert replaying.generate_tokens(asked, ways) == plain.generate_tokens(asked, ways)
    assert any(key[0] == 2 for key in tapes_of(replaying)._tapes)


def test_drafts_are_verified_by_tapes_too(file: Path) -> None:
    asked = [[5, 6, 7, 8] * 9, [9, 3] * 7]
    ways = [SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)] * 2
    expected = opened(file, dtype="float32", enforce_eager=True).generate_tokens(asked, ways)
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    drafting = opened(file, dtype="float32", speculative_config=speculative)
    assert drafting.generate_tokens(asked, ways) == expected
    assert any(key[0] > 2 for key in tapes_of(drafting)._tapes)  # more tokens than there are rows


def test_memory_is_bounded_and_the_latest_stay(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = opened(file, dtype="float32")
    way = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    asked = [[at + 1, 2, 3] for at in range(6)]
    texts = {count: llm.generate_tokens(asked[:count], [way] * count) for count in (1, 2, 6)}
    kept = {key[0]: tape.bytes for key, (tape, _) in tapes_of(llm)._tapes.items()}
    assert kept.keys() == {1, 2, 6}
    assert 0 < 2 * kept[1] == kept[2]
    tapes_of(llm).clear()
    monkeypatch.setattr(step_tapes, "MOST_BYTES", kept[6] + kept[1])
    for count in (2, 1, 6, 1, 2):
        assert llm.generate_tokens(asked[:count], [way] * count) == texts[count]
    assert [key[0] for key in tapes_of(llm)._tapes] == [1, 2]
    monkeypatch.setattr(step_tapes, "MOST_BYTES", kept[1] - 1)
    tapes_of(llm).clear()
    assert llm.generate_tokens(asked[:1], [way]) == texts[1]
    assert tapes_of(llm).recorded == 0


def test_weights_that_moved_are_read_where_they_are(file: Path) -> None:
    llm = opened(file, dtype="float32", enable_sleep_mode=True)
    way = [SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)]
    expected = llm.generate_tokens([[4, 8, 2]], way)
    assert tapes_of(llm).recorded == 1
    llm.sleep(level=2)
    assert tapes_of(llm).recorded == 0
    llm.wake_up()
    assert llm.generate_tokens([[4, 8, 2]], way) == expected
    assert tapes_of(llm).recorded == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_that_torch_computes_has_none(dtype: str) -> None:
    """In bfloat16, where the processor has it, weights are packed by a library that tells no addresses."""
    llm = opened("shape:tiny", dtype=dtype)
    llm.generate_tokens([[1, 2, 3]], [SamplingParams(max_tokens=9, ignore_eos=True)])
    assert tapes_of(llm).recorded == 0
    assert not tapes_of(llm)._enabled
    assert torch.get_num_threads() == 1
