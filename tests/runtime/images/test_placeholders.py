"""Prompts with images against transformers' own processors, over small tokenizers of their special tokens."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stoker_runtime.errors import ModelError, RequestError
from stoker_runtime.images.placeholders import placeholders
from stoker_runtime.images.rule import CLIP_MEAN, CLIP_STD, HALF, ImageKind, ImageRule
from stoker_runtime.request import Image

SEED = random.SystemRandom().getrandbits(32)
SPECIAL = [
    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
    *("<start_of_image>", "<image_soft_token>", "<end_of_image>"),
]
QWEN = ImageRule(ImageKind.QWEN, 1, 1, None, 14, 2, 3136, 90_000, 0, 0, 3, CLIP_MEAN, CLIP_STD, 1 / 255, 2)
GEMMA = ImageRule(ImageKind.GEMMA3, 4, 3, 5, 14, 2, 1, 1, 56, 56, 2, HALF, HALF, 1 / 255)


def tokenizer() -> Tokenizer:
    """Special tokens, then runs of line ends up to five, then letters: what stands beside an image changes tokens."""
    words = [*SPECIAL, *("\n" * times for times in range(1, 6)), *"abcdefgh ", "?"]
    found = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="?"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n{1,5}|[^\n]"), "isolated")
    found.add_special_tokens(SPECIAL)
    return found


def fast() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(),
        unk_token="?",
        pad_token="?",
        extra_special_tokens={
            "boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>",
        },
    )  # fmt: skip


def image(tokens: int) -> Image:
    return Image(0, tokens, 1, 1, b"abc", b"d", tokens)


def conversation(source: random.Random, marker: str, images: int) -> str:
    def words() -> str:
        return "".join(source.choices("abcd \n", k=source.randrange(12)))

    return words() + "".join(f"{marker}{words()}" for _ in range(images))


def expanded(rule: ImageRule, text: str, images: list[Image]) -> tuple[list[int], tuple[Image, ...]]:
    rust = tokenizer()
    places = placeholders(rule, rust.id_to_token)
    ids, placed = places.expand(rust.encode(places.write(text, len(images)), add_special_tokens=False).ids, images)
    for each, given in zip(placed, images, strict=True):
        assert replace(each, at=0) == given
        assert ids[each.at : each.at + each.tokens] == (rule.placeholder,) * each.tokens
    assert ids.count(rule.placeholder) == sum(each.tokens for each in images)
    return list(ids), placed


def test_gemmas_prompt_is_transformers() -> None:
    source = random.Random(SEED)
    processor = Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 56, "width": 56}), fast(), image_seq_length=GEMMA.tokens(56, 56)
    )
    for _ in range(20):
        count = source.randint(1, 4)
        text = conversation(source, "<start_of_image>", count)
        pictures = [np.zeros((source.randint(9, 99), source.randint(9, 99), 3), np.uint8) for _ in range(count)]
        expected = processor(images=[pictures], text=text, add_special_tokens=False)["input_ids"][0]
        found, _ = expanded(GEMMA, text, [image(4)] * count)
        assert found == list(expected), f"{text!r} (seed {SEED})"


def test_qwens_prompt_is_what_transformers_writes() -> None:
    """Its processor wants one of videos, which wants torchvision; what it does to a text is this line of it."""
    source = random.Random(SEED)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 90_000})
    for _ in range(10):
        count = source.randint(1, 4)
        text = conversation(source, "<|vision_start|><|image_pad|><|vision_end|>", count)
        sides = [(source.randint(9, 400), source.randint(9, 400)) for _ in range(count)]
        grids = [processor(np.zeros((*each, 3), np.uint8), return_tensors="np")["image_grid_thw"][0] for each in sides]
        written = text
        for grid in grids:
            written = written.replace("<|image_pad|>", "<placeholder>" * (int(grid.prod()) // 4), 1)
        written = written.replace("<placeholder>", "<|image_pad|>")
        found, _ = expanded(QWEN, text, [image(QWEN.tokens(*QWEN.size_of(*each))) for each in sides])
        assert found == tokenizer().encode(written, add_special_tokens=False).ids, f"seed {SEED}"


@pytest.mark.parametrize("rule", [QWEN, GEMMA])
@pytest.mark.parametrize("places", [0, 1, 3])
def test_places_that_are_no_images(rule: ImageRule, places: int) -> None:
    found = placeholders(rule, tokenizer().id_to_token)
    with pytest.raises(RequestError, match=f"{places} places for the 2 images") as wrong:
        found.write("a" + found.marker * places, 2)
    assert wrong.value.param == "messages"


def test_a_placeholder_in_a_text() -> None:
    with pytest.raises(RequestError, match="2 places for the 1 images"):
        expanded(GEMMA, "a<start_of_image>b<image_soft_token>", [image(4)])


def test_a_tokenizer_without_the_tokens() -> None:
    with pytest.raises(ModelError, match="no token 1000, which is the configuration's image token"):
        placeholders(replace(GEMMA, placeholder=1000), tokenizer().id_to_token)
