"""Models that see, under the real scheduler, against transformers: whatever else runs, and however prompts are cut."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.step_loop import scheduler_config
from stoker_runtime.executor.executor import Executor
from stoker_runtime.ranks.build import build_executor
from stoker_runtime.request import Image, Request, SamplingParams
from stoker_runtime.scheduler.scheduler import Scheduler

PATCH, MERGE, VOCAB, SEE = 4, 2, 99, 97
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
GEMMA_TOKENS = {"image_token_index": SEE, "boi_token_index": 95, "eoi_token_index": 96, "mm_tokens_per_image": 9}
TOKENS = {"image_token_id": SEE, "vision_start_token_id": 95, "vision_end_token_id": 96, "video_token_id": 98}
QWEN = {"depth": 3, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE, "out_hidden_size": 48,
        "intermediate_size": 36, "hidden_size": 40}  # fmt: skip
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}},
        {**QWEN, "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2],
                             "mrope_interleaved": True}},
        {**QWEN, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2],
                             "mrope_interleaved": True},
         "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28},
        {**QWEN, "num_position_embeddings": 25, "deepstack_visual_indexes": [1]},
    ),
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        {"sliding_window": 20, "sliding_window_pattern": 2, "query_pre_attn_scalar": 20, "num_hidden_layers": 4},
        {"hidden_size": 40, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 2,
         "image_size": 6 * PATCH, "patch_size": PATCH},
    ),
}  # fmt: skip
GEMMA_SIDE = 3
MEAN, STD = (0.4, 0.5, 0.55), (0.3, 0.25, 0.4)


def saved(name: str, folder: Path, seed: int, *, even: bool = False, **sizes: int) -> Any:
    """A random model of the architecture in `folder`; transformers' own of it. `even`: sizes that fixed sums take."""
    config_class, text, vision = SEEING[name]
    text = {**text, **sizes}
    if even:
        text = {**text, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 104}
        text |= {"moe_intermediate_size": 64, "num_experts": 8} if "num_experts" in text else {}
        vision = {**vision, "hidden_size": 64, "intermediate_size": 64}
        vision |= {"out_hidden_size": 64} if "out_hidden_size" in vision else {}
    tokens = TOKENS if "Qwen" in name else GEMMA_TOKENS
    config = getattr(transformers, config_class)(
        text_config={**TEXT, **text}, vision_config=vision, **tokens, tie_word_embeddings="Gemma" in name
    )
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = getattr(transformers, name)(config).float().eval()
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            gain = "norm" in key and key.endswith("weight")
            parameter.copy_(1.0 + 0.3 * noise if gain else 0.2 * noise)
    model.save_pretrained(folder)
    processor: dict[str, Any] = {"image_mean": MEAN, "image_std": STD}
    if "Qwen" in name:
        processor |= {"patch_size": PATCH, "merge_size": MERGE, "max_pixels": 1 << 14}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return model


class Seen:
    """A prompt with images, for both sides."""

    def __init__(self, rng: random.Random, images: int, side: int = 0) -> None:
        """`side`: tokens on a side of images that all have the same size; 0: of any."""
        unit = PATCH * MERGE
        self.alike = bool(side)
        self.ids: list[int] = []
        self.images: list[Image] = []
        self.pixels: list[np.ndarray[Any, Any]] = []
        for _ in range(images):
            self.ids += [rng.randrange(3, 90) for _ in range(rng.randint(1, 9))] + [95]
            rows, columns = (side, side) if side else (rng.randint(1, 4), rng.randint(1, 5))
            pixels = np.random.default_rng(rng.randrange(1 << 30)).integers(
                0, 256, (rows * unit, columns * unit, 3), np.uint8
            )
            data = pixels.tobytes()
            self.pixels.append(pixels)
            self.images.append(
                Image(
                    len(self.ids), rows * columns, rows * unit, columns * unit, data,
                    hashlib.sha256(repr(pixels.shape).encode() + data).digest(),
                    side * side or max(rows, columns),
                )
            )
            self.ids += [SEE] * rows * columns + [96]
        self.ids += [rng.randrange(3, 90) for _ in range(rng.randint(1, 9))]

    def with_other_pixels(self, rng: random.Random) -> Seen:
        """The same prompt, of which one image is another one."""
        other = copy(self)
        at = rng.randrange(len(self.images))
        pixels = 255 - self.pixels[at]
        data = pixels.tobytes()
        digest = hashlib.sha256(repr(pixels.shape).encode() + data).digest()
        other.pixels, other.images = list(self.pixels), list(self.images)
        other.pixels[at], other.images[at] = pixels, replace(self.images[at], pixels=data, digest=digest)
        return other

    def request(self, name: str, tokens: int) -> Request:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=0)
        return Request(name, tuple(self.ids), params, images=tuple(self.images))

    def patches(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Pixel values and grids as Qwen's processor makes them; of images alike pixels alone."""
        found, grids = [], []
        for pixels in self.pixels:
            values = torch.from_numpy((pixels.astype(np.float64) / 255 - MEAN) / STD).float().permute(2, 0, 1)
            if self.alike:
                found.append(values[None])
                continue
            height, width = values.shape[1] // PATCH, values.shape[2] // PATCH
            cut = torch.stack((values, values)).reshape(
                1, 2, 3, height // MERGE, MERGE, PATCH, width // MERGE, MERGE, PATCH
            )
            cut = cut.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(height * width, -1)
            found.append(cut)
            grids.append([1, height, width])
        return torch.cat(found), torch.tensor(grids)


def given(seen: Seen, written: Sequence[int] = ()) -> dict[str, Any]:
    """What transformers' model is given of a prompt, and of what was `written` behind it."""
    ids = torch.tensor([[*seen.ids, *written]])
    found: dict[str, Any] = {"input_ids": ids}
    if not seen.images:
        return found
    pixels, grids = seen.patches()
    shown = (torch.arange(ids.shape[1]) < len(seen.ids)).int() * (ids == SEE).int()
    if seen.alike:
        return found | {"pixel_values": pixels, "token_type_ids": shown}
    return found | {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": shown}


def assert_written(tokens: list[int], model: Any, seen: Seen, limit: float = 2e-3) -> None:
    """They are what transformers' model writes greedily; of two whose logits are within `limit` either."""
    asked = given(seen)
    mask = torch.ones_like(asked["input_ids"])
    found = model.generate(**asked, attention_mask=mask, max_new_tokens=len(tokens), do_sample=False)
    if found[0, len(seen.ids) :].tolist() == tokens:
        return
    with torch.no_grad():
        logits = model(**given(seen, tokens[:-1])).logits[0, len(seen.ids) - 1 :]
    lost = logits.amax(dim=1) - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert float(lost.max()) <= limit, f"{tokens} lose {lost.tolist()}"


def run(executor: Executor, config: EngineConfig, requests: list[Request]) -> list[list[int]]:
    """What the real scheduler and the executor write."""
    scheduler = Scheduler(scheduler_config(executor, config))
    sequences = [scheduler.add(each) for each in requests]
    flying = None
    while True:
        batch = scheduler.schedule()
        launched = None if batch is None else (batch, executor.execute(batch))
        if flying is not None:
            scheduler.commit(flying[0], flying[1].result())
        flying = launched
        if launched is None and not scheduler.has_work:
            break
    scheduler.check()
    return [list(each.tokens[each.prompt_length :]) for each in sequences]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(folder: Path, device: str, **settings: Any) -> tuple[Executor, EngineConfig]:
    few = {"num_gpu_blocks": 200} if device == "cuda" else {}
    given = {"dtype": "float32", "max_num_batched_tokens": 64, "max_num_seqs": 4, **few, **settings}
    config = EngineConfig(model=str(folder), device=device, max_model_len=256, page_size=16, **given)
    return build_executor(config), config


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return random.Random(seed)


WAYS: dict[str, dict[str, Any]] = {
    "cut": {"max_num_batched_tokens": 13},
    "whole": {},
    "drafts": {"speculative_config": json.dumps({"method": "ngram", "num_speculative_tokens": 3})},
    "preempted": {"num_gpu_blocks": 16},
    "swapped": {"num_gpu_blocks": 16, "num_cpu_blocks": 40},
    "uncached": {"enable_prefix_caching": False},
}


@pytest.mark.matrix("name", take=3)
@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers(
    name: str, way: str, device: str, tmp_path: Path, rng: random.Random
) -> None:
    model = saved(name, tmp_path, rng.randrange(1 << 30))
    executor, config = opened(tmp_path, device, **WAYS[way])
    side = GEMMA_SIDE if "Gemma" in name else 0
    asked = [Seen(rng, count, side) for count in (1, 0, 2, 3, 1)]
    asked.append(asked[0])
    # The same text, and another image.
    asked.append(asked[2].with_other_pixels(rng))
    found = run(executor, config, [each.request(str(at), 12) for at, each in enumerate(asked)])
    for each, tokens in zip(asked, found, strict=True):
        assert_written(tokens, model, each)
    executor.close()


@pytest.mark.matrix(take=2)
@pytest.mark.parametrize("name", SEEING)
def test_what_runs_beside_changes_no_bit(name: str, device: str, tmp_path: Path, rng: random.Random) -> None:
    saved(name, tmp_path, rng.randrange(1 << 30), even=True)
    wide = {"dtype": "bfloat16"} if device == "cuda" else {}
    executor, config = opened(
        tmp_path, device, batch_invariant=True, max_num_batched_tokens=40, enable_prefix_caching=False, **wide
    )
    side = GEMMA_SIDE if "Gemma" in name else 0
    asked = [Seen(rng, count, side) for count in (1, 2, 0, 3)]

    def drawn(at: int) -> Request:
        """One whose tokens are drawn, so that they tell of small differences."""
        request = asked[at].request(str(at), 16)
        return replace(request, params=replace(request.params, temperature=1.0, seed=at))

    together = run(executor, config, [drawn(at) for at in range(len(asked))])
    for at, tokens in enumerate(together):
        assert executor.body.images is not None
        executor.body.images.forget()
        assert run(executor, config, [drawn(at)]) == [tokens]
    executor.close()


@pytest.mark.matrix("name", take=2)
@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("cut", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks_see_as_one_does(name: str, cut: str, tmp_path: Path, rng: random.Random) -> None:
    model = saved(name, tmp_path, rng.randrange(1 << 30), even=True, num_hidden_layers=6)
    executor, config = opened(tmp_path, "cpu", **{cut: 2, "max_num_batched_tokens": 24})
    side = GEMMA_SIDE if "Gemma" in name else 0
    asked = [Seen(rng, count, side) for count in (2, 0, 1)]
    try:
        found = run(executor, config, [each.request(str(at), 6) for at, each in enumerate(asked)])
    finally:
        executor.close()
    for each, tokens in zip(asked, found, strict=True):
        assert_written(tokens, model, each)


def test_states_that_are_given_up_are_made_again(device: str, tmp_path: Path, rng: random.Random) -> None:
    model = saved("Qwen3VLForConditionalGeneration", tmp_path, rng.randrange(1 << 30))
    executor, config = opened(tmp_path, device, max_num_batched_tokens=5, enable_prefix_caching=False)
    assert executor.body.images is not None
    encoder = executor.body.images.encoder
    assert encoder is not None
    encoder._room = 0
    asked = [Seen(rng, 2) for _ in range(3)]
    found = run(executor, config, [each.request(str(at), 4) for at, each in enumerate(asked)])
    assert not encoder._kept
    for each, tokens in zip(asked, found, strict=True):
        assert_written(tokens, model, each)
    executor.close()


def test_an_image_of_several_prompts_is_seen_once(device: str, tmp_path: Path, rng: random.Random) -> None:
    saved("Qwen2_5_VLForConditionalGeneration", tmp_path, rng.randrange(1 << 30))
    executor, config = opened(tmp_path, device, enable_prefix_caching=False, max_num_batched_tokens=16)
    tower = executor.tower
    assert tower is not None
    encoded: list[int] = []
    encode = tower.encode
    tower.encode = lambda images: encoded.append(len(images)) or encode(images)  # type: ignore[method-assign]
    one = Seen(rng, 2)
    found = run(executor, config, [one.request(str(at), 3) for at in range(5)])
    assert sum(encoded) == 2
    assert all(tokens == found[0] for tokens in found)
    executor.close()


@pytest.mark.parametrize("level", [1, 2])
def test_it_sees_the_same_after_sleep(level: int, device: str, tmp_path: Path, rng: random.Random) -> None:
    model = saved("Qwen3VLForConditionalGeneration", tmp_path, rng.randrange(1 << 30))
    executor, config = opened(tmp_path, device, enable_sleep_mode=True)
    one = Seen(rng, 2)
    (before,) = run(executor, config, [one.request("before", 6)])
    assert_written(before, model, one)
    assert executor.sleeper is not None
    executor.sleeper.sleep(level)
    executor.sleeper.wake(("weights", "kv_cache"))
    assert run(executor, config, [one.request("after", 6)]) == [before]
    executor.close()


def test_log_probabilities_of_a_prompt_with_images(device: str, tmp_path: Path, rng: random.Random) -> None:
    model = saved("Qwen2_5_VLForConditionalGeneration", tmp_path, rng.randrange(1 << 30))
    executor, config = opened(tmp_path, device, max_num_batched_tokens=11)
    one = Seen(rng, 2)
    request = one.request("scored", 1)
    request = replace(request, params=replace(request.params, prompt_logprobs=0))
    scheduler = Scheduler(scheduler_config(executor, config))
    scheduler.add(request)
    scored: list[float] = []
    while (batch := scheduler.schedule()) is not None:
        result = executor.execute(batch).result()
        scored += [each.logprob for chunk in result.prompt_logprobs for each in chunk]
        scheduler.commit(batch, result)
    with torch.no_grad():
        logits = model(**given(one)).logits[0]
    wanted = torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(one.ids[1:])[:, None])[:, 0]
    assert torch.allclose(torch.tensor(scored), wanted, atol=1e-3)
    executor.close()
