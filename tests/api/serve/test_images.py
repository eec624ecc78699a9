"""Images from a real client to a real engine: the whole chain against transformers' processor and model."""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import transformers
from PIL import Image
from server_process import ServerProcess
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip
IDS = {token: 256 + at for at, token in enumerate(SPECIAL)}
PATCH, MERGE, MOST = 4, 2, 2400
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSOR = {
    "patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2, "min_pixels": 4 * (PATCH * MERGE) ** 2,
    "max_pixels": MOST, "image_mean": [0.4, 0.5, 0.55], "image_std": [0.3, 0.25, 0.4],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Tokenizer]:
    """A random Qwen3-VL that writes bytes: its folder, transformers' own, its tokenizer."""
    folder = tmp_path_factory.mktemp("seeing")
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: at for at, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    config = transformers.Qwen3VLConfig(
        text_config={
            "vocab_size": 264, "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 3,
            "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 2048,
            "bos_token_id": None, "eos_token_id": IDS["<|im_end|>"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2],
                                "mrope_interleaved": True},
        },
        vision_config={
            "depth": 3, "num_heads": 2, "patch_size": PATCH, "spatial_merge_size": MERGE, "out_hidden_size": 48,
            "intermediate_size": 36, "hidden_size": 40, "num_position_embeddings": 25,
            "deepstack_visual_indexes": [0, 2],
        },
        image_token_id=IDS["<|image_pad|>"], video_token_id=IDS["<|video_pad|>"],
        vision_start_token_id=IDS["<|vision_start|>"], vision_end_token_id=IDS["<|vision_end|>"],
        tie_word_embeddings=False,
    )  # fmt: skip
    made = transformers.Qwen3VLForConditionalGeneration(config).float().eval()
    made.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in made.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1.0 + 0.3 * noise if "norm" in key and key.endswith("weight") else 0.2 * noise)
    made.save_pretrained(folder)
    return folder, made, tokenizer


@pytest.fixture(scope="module")
def client(model: tuple[Path, Any, Tokenizer]) -> Iterator[openai.OpenAI]:
    program = [sys.executable, "-m", "stoker_cli", "serve", str(model[0]), "--served-model-name", "seeing"]
    flags = ["--device", "cpu", "--dtype", "float32", "--max-model-len", "1024", "--limit-mm-per-prompt", "image=3"]
    server = ServerProcess(program, *flags)
    try:
        with openai.OpenAI(base_url=f"{server.wait_ready(60).url}/v1", api_key="none", max_retries=0) as found:
            yield found
    finally:
        server.close()


def drawn(rng: random.Random) -> Image.Image:
    """An image of any size and mode."""
    height, width = rng.randint(5, 90), rng.randint(5, 90)
    pixels = np.random.default_rng(rng.randrange(1 << 30)).integers(0, 256, (height, width, 3), np.uint8)
    image = Image.fromarray(pixels).resize((width, height))
    return image.convert(rng.choice(("RGB", "RGB", "L")))


def data_url(image: Image.Image) -> str:
    stored = io.BytesIO()
    image.save(stored, "PNG")
    return f"data:image/png;base64,{base64.b64encode(stored.getvalue()).decode()}"


def expected(
    model: tuple[Path, Any, Tokenizer], turns: list[list[str | Image.Image]], tokens: int
) -> tuple[list[int], int]:
    """What transformers' model writes to these turns of a user, and how long the prompt is."""
    _, made, tokenizer = model
    names = {name: value for name, value in PROCESSOR.items() if name not in ("min_pixels", "max_pixels")}
    size = {"shortest_edge": PROCESSOR["min_pixels"], "longest_edge": PROCESSOR["max_pixels"]}
    process = Qwen2VLImageProcessorPil(**names, size=size)
    text, pixels, grids = "", [], []
    for turn in turns:
        text += "<|im_start|>user\n"
        for part in turn:
            if isinstance(part, str):
                text += part
                continue
            found = process(images=[part.convert("RGB")], return_tensors="pt")
            pixels.append(found["pixel_values"])
            grids.append(found["image_grid_thw"])
            count = int(found["image_grid_thw"].prod()) // MERGE**2
            text += f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"
        text += "<|im_end|>\n"
    ids = torch.tensor([tokenizer.encode(f"{text}<|im_start|>assistant\n", add_special_tokens=False).ids])
    given: dict[str, Any] = {}
    if pixels:
        given = {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.cat(grids),
                 "mm_token_type_ids": (ids == IDS["<|image_pad|>"]).int()}  # fmt: skip
    found = made.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=256, **given
    )
    return found[0, ids.shape[1] :].tolist(), ids.shape[1]


def said(client: openai.OpenAI, turns: list[list[str | Image.Image]], tokens: int) -> tuple[list[int], int]:
    """What the server writes to them."""
    messages: Any = [
        {"role": "user", "content": [
            {"type": "text", "text": part} if isinstance(part, str)
            else {"type": "image_url", "image_url": {"url": data_url(part), "detail": "auto"}}
            for part in turn
        ]}
        for turn in turns
    ]  # fmt: skip
    answer = client.chat.completions.create(
        model="seeing", messages=messages, temperature=0, max_tokens=tokens,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    assert answer.usage is not None
    return answer.choices[0].model_dump()["token_ids"], answer.usage.prompt_tokens


def test_answers_are_those_of_transformers(client: openai.OpenAI, model: tuple[Path, Any, Tokenizer]) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    one, two = drawn(rng), drawn(rng)
    for turns in (
        [["What is it? ", one]],
        [[one, two, "Which is darker?"]],
        [["Only words."]],
        [[one, "And?"], ["More: ", two], ["So?"]],
        [[two, "What is it?"]],
    ):
        assert said(client, turns, 12) == expected(model, turns, 12)


def test_a_stream_has_the_same_words(client: openai.OpenAI) -> None:
    rng = random.Random()
    url = data_url(drawn(rng))
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    asked: Any = {"model": "seeing", "messages": messages, "temperature": 0, "max_tokens": 9}
    whole = client.chat.completions.create(**asked)
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(parts) == whole.choices[0].message.content
    answered = client.responses.create(
        model="seeing", temperature=0, max_output_tokens=9,
        input=[{"role": "user", "content": [{"type": "input_image", "image_url": url, "detail": "auto"}]}],
    )  # fmt: skip
    assert answered.output_text == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("data:image/png;base64,AAAA", "no image that can be read"),
        ("https://example.com/a.png", "--allowed-media-domains"),
        ("file:///etc/passwd", "image_url"),
    ],
)
def test_what_cannot_be_seen_is_refused_by_name(url: str, says: str, client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        client.chat.completions.create(model="seeing", messages=messages, max_tokens=3)
    assert "messages" in str(refused.value.param)


def test_more_images_than_are_allowed_are_refused(client: openai.OpenAI) -> None:
    part = {"type": "image_url", "image_url": {"url": data_url(drawn(random.Random()))}}
    messages: Any = [{"role": "user", "content": [part] * 4}]
    with pytest.raises(openai.BadRequestError, match="limit-mm-per-prompt"):
        client.chat.completions.create(model="seeing", messages=messages, max_tokens=3)
