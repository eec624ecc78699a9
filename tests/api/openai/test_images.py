"""Images in conversations: in every dialect they reach the engine as pixels in their places, or are refused by name."""

from __future__ import annotations

import base64
import random
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from api_server import Running, make_state, serve
from fake_engine import SPOKEN, FakeEngine
from PIL import Image as Pillow

from stoker_runtime.images.loading import ImageLoader
from stoker_runtime.images.placeholders import placeholders
from stoker_runtime.images.rule import HALF, ImageKind, ImageRule
from stoker_runtime.request import Request
from stoker_runtime.text.chat_template import ChatTemplate
from stoker_runtime.text.tokenizer import Tokenizer, TokenizerFiles

SEED = random.SystemRandom().getrandbits(32)
SPECIAL = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<start>", "<soft>", "<end>"]
START, PAD, END, BOI, SOFT, EOI = range(400, 406)
QWEN = ImageRule(ImageKind.QWEN, PAD, PAD, None, 14, 2, 784, 40 * 784, 0, 0, 3, HALF, HALF, 1 / 255, 2)
GEMMA = ImageRule(ImageKind.GEMMA3, SOFT, BOI, EOI, 14, 2, 1, 1, 84, 84, 2, HALF, HALF, 1 / 255)
TEMPLATE = """{% for message in messages %}[{{ message['role'] }}]{% if message['content'] is string %}{{
message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in
content or 'image_url' in content %}<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in content %}{{
content['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}{% if
add_generation_prompt %}[assistant]{% endif %}"""
GEMMAS = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start>")


def seeing(engine: FakeEngine, rule: ImageRule, template: str, **loader: Any) -> Iterator[Running]:
    rust = Tokenizer.synthetic(400)._rust
    rust.add_special_tokens(SPECIAL)
    tokenizer = Tokenizer(rust, TokenizerFiles(), "synthetic")
    state = make_state(engine, template)
    assert state.service is not None
    images = ImageLoader(rule, placeholders(rule, tokenizer.id_to_token), **loader)
    state.service = replace(
        state.service, tokenizer=tokenizer, template=ChatTemplate({"default": template}, {}, "test"), images=images
    )
    yield from serve(state, engine)


@pytest.fixture(scope="module")
def qwen() -> Iterator[Running]:
    yield from seeing(FakeEngine(), QWEN, TEMPLATE, limit=3)


@pytest.fixture(scope="module")
def gemma() -> Iterator[Running]:
    yield from seeing(FakeEngine(), GEMMA, GEMMAS)


@pytest.fixture
def server(qwen: Running) -> Running:
    qwen.engine.reset()
    return qwen


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10, verify=False) as client:
        yield client


def picture(height: int, width: int) -> tuple[np.ndarray, str]:
    """Pixels that are not resized, and their data: URL."""
    pixels = np.random.default_rng(SEED + height).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return pixels, f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def part(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def check(request: Request, pictures: list[np.ndarray], words: str) -> None:
    """The images are these, and without them the prompt is `words`, in which `@` is one."""
    assert [each.pixels for each in request.images] == [each.tobytes() for each in pictures]
    ids, found = list(request.prompt_token_ids), []
    for at, token in enumerate(ids):
        image = next((each for each in request.images if each.at <= at < each.at + each.tokens), None)
        if image is None:
            found.append({START: "<", END: ">"}.get(token) or chr(token))
        else:
            assert token == PAD
            found += "@" * (image.at == at)
    assert "".join(found) == words


TALL, TALL_URL = picture(84, 56)
WIDE, WIDE_URL = picture(28, 140)
TWO = [{"role": "user", "content": [text("a"), part(TALL_URL), text("b"), part(WIDE_URL, detail="low"), text("c")]}]
TWO_WORDS = "[user]a<@>b<@>c\n[assistant]"
TOKENS = 6 + 5


def ask(http: httpx.Client, content: Any, path: str = "/v1/chat/completions", **more: Any) -> httpx.Response:
    body = {"model": "byte-model", "messages": [{"role": "user", "content": content}], "max_tokens": 3, **more}
    return http.post(path, json=body)


def test_the_openai_client(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        answer = client.chat.completions.create(model="byte-model", messages=TWO, max_tokens=5, n=2)
        assert [each.message.content for each in answer.choices] == [SPOKEN[:5]] * 2
        first, second = server.engine.requests
        check(first, [TALL, WIDE], TWO_WORDS)
        assert second.images is first.images
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(first.prompt_token_ids) == len(TWO_WORDS) - 2 + TOKENS
        chunks = client.chat.completions.create(
            model="byte-model", messages=TWO, max_tokens=5, stream=True, stream_options={"include_usage": True}
        )
        assert [each.usage.prompt_tokens for each in chunks if each.usage] == [answer.usage.prompt_tokens]
        assert server.engine.requests[-1].images == first.images


def test_responses(server: Running) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        image = {"type": "input_image", "image_url": TALL_URL, "detail": "auto"}
        content = [{"type": "input_text", "text": "what?"}, image]
        answer = client.responses.create(
            model="byte-model", input=[{"role": "user", "content": content}], max_output_tokens=4
        )
        assert answer.output_text == SPOKEN[:4]
        check(server.engine.requests[-1], [TALL], "[user]what?<@>\n[assistant]")
        client.responses.create(
            model="byte-model", input="and?", previous_response_id=answer.id, max_output_tokens=4
        )
        again = f"[user]what?<@>\n[assistant]{SPOKEN[:4]}\n[user]and?\n[assistant]"
        check(server.engine.requests[-1], [TALL], again)
        content[1] = {"type": "input_image", "file_id": "file-1"}
        with pytest.raises(openai.BadRequestError, match="file_id is not supported") as wrong:
            client.responses.create(model="byte-model", input=[{"role": "user", "content": content}])
        assert wrong.value.param == "input[0].content[1].file_id"
        content[1] = {"type": "input_image", "image_url": "data:image/png;base64,!"}
        with pytest.raises(openai.BadRequestError, match="not valid base64") as wrong:
            client.responses.create(model="byte-model", input=[{"role": "user", "content": content}])
        assert wrong.value.param == "input[0].content[1].image_url"


def block(url: str) -> dict[str, Any]:
    media, _, data = url.removeprefix("data:").partition(";base64,")
    return {"type": "image", "source": {"type": "base64", "media_type": media, "data": data}}


def test_messages(server: Running, http: httpx.Client) -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("seen:"), block(WIDE_URL)]}
    body = {
        "model": "byte-model",
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": [block(TALL_URL), text("x")]},
            {"role": "assistant", "content": [text("y"), call]},
            {"role": "user", "content": [result, text("z")]},
        ],
    }
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    [request] = server.engine.requests
    check(request, [TALL, WIDE], "[user]<@>x\n[assistant]y\n[tool]seen:<@>\n[user]z\n[assistant]")
    del body["max_tokens"]
    counted = http.post("/v1/messages/count_tokens", json=body).json()
    usage = answer.json()["usage"]
    assert counted["input_tokens"] == len(request.prompt_token_ids)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, "content[1].source.data is no image"),
        ({"type": "url", "url": "https://a.example/x.png"}, "content[1].source.url is on a.example"),
        ({"type": "file", "file_id": "f"}, "content[1].source.type is 'file'"),
        ({"type": "base64", "media_type": "text/plain", "data": "AAAA"}, "media_type is 'text/plain'"),
        (None, "content[1].source must be an object"),
    ],
)
def test_messages_name_their_own_fields(http: httpx.Client, source: Any, says: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
    for before in (text("a"), result):
        content = [before, {"type": "image", "source": source}]
        answer = ask(http, content, "/v1/messages")
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]


def test_what_is_counted_and_rendered_is_what_runs(server: Running, http: httpx.Client) -> None:
    assert ask(http, TWO[0]["content"]).status_code == 200
    [request] = server.engine.requests
    ids = list(request.prompt_token_ids)
    assert ask(http, TWO[0]["content"], "/v1/chat/completions/render").json()["token_ids"] == ids
    found = http.post("/tokenize", json={"messages": TWO, "return_token_strs": True}).json()
    assert (found["count"], found["tokens"]) == (len(ids), ids)
    assert found["token_strs"].count("<|image_pad|>") == TOKENS
    assert len(server.engine.requests) == 1


def test_gemmas_images(gemma: Running) -> None:
    gemma.engine.reset()
    with httpx.Client(base_url=gemma.url, timeout=10, verify=False) as http:
        file = BytesIO()
        Pillow.new("L", (33, 90), 7).save(file, "JPEG", quality=95)
        url = f"data:;base64,{base64.b64encode(file.getvalue()).decode()}"
        assert ask(http, [text("a"), part(url), text("b")]).status_code == 200
    [request] = gemma.engine.requests
    [image] = request.images
    lead = [*b"[user]a\n\n", BOI]
    assert request.prompt_token_ids == (*lead, *[SOFT] * 9, EOI, *b"\n\nb\n[assistant]")
    assert (image.at, image.tokens, image.height, image.width) == (len(lead), 9, 84, 84)
    assert image.pixels == bytes([7]) * (84 * 84 * 3)


def test_a_conversation_without_images_is_as_for_other_models(server: Running, http: httpx.Client) -> None:
    for content in ("a", [text("a"), text("b")], "a <|image_pad|> of a text"):
        assert ask(http, content, truncate_prompt_tokens=200).status_code == 200
    first, joined, named = server.engine.requests
    assert all(not each.images for each in server.engine.requests)
    assert first.prompt_token_ids == tuple(b"[user]a\n[assistant]")
    assert joined.prompt_token_ids == tuple(b"[user]a\nb\n[assistant]")
    assert named.prompt_token_ids.count(PAD) == 1


def test_only_messages_with_images_are_parts(server: Running, http: httpx.Client) -> None:
    messages = [{"role": "user", "content": [text("a"), text("b")]}, *TWO]
    assert http.post("/v1/chat/completions", json={"model": "alias", "messages": messages}).status_code == 200
    check(server.engine.requests[-1], [TALL, WIDE], f"[user]a\nb\n{TWO_WORDS}")


def test_beams_see(server: Running, http: httpx.Client) -> None:
    answer = ask(http, [part(TALL_URL)], use_beam_search=True, n=2)
    assert answer.status_code == 200, answer.text
    assert {each.images for each in server.engine.requests} == {server.engine.requests[0].images}
    assert len(server.engine.requests[0].images) == 1


def test_a_forced_tool_beside_an_image(server: Running, http: httpx.Client) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    answer = ask(http, [part(TALL_URL), text("q")], tools=[tool], tool_choice="required")
    assert answer.status_code == 200, answer.text
    ids = server.engine.requests[-1].prompt_token_ids
    assert bytes(each for each in ids if each < 256).startswith(b"[user]You have these tools:")


FIELD = "messages[0].content[0].image_url.url"


@pytest.mark.parametrize(
    ("content", "more", "param", "says"),
    [
        ([part("data:image/png;base64,AAAA")], {}, FIELD, "is no image that can be read"),
        ([part("data:image/png;base64,AA!A")], {}, FIELD, "not valid base64"),
        ([part("https://a.example/x")], {}, FIELD, "--allowed-media-domains"),
        ([part("file:///etc/passwd")], {}, FIELD, "data: URL, or one of http"),
        ([part(TALL_URL, detail="huge")], {}, "messages[0].content[0].detail", "auto, low or high"),
        ([{"type": "image_url"}], {}, "messages[0].content[0].image_url", "must be a URL"),
        ([{"type": "image_url", "image_url": {}}], {}, FIELD, "must be a URL"),
        ([part(TALL_URL)] * 4, {}, "messages[0].content[3].image_url.url", "at most 3"),
        ([part(TALL_URL)], {"truncate_prompt_tokens": 12}, "truncate_prompt_tokens", "is not cut"),
        ([part(TALL_URL)], {"mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs", "not supported"),
        ([part(TALL_URL), text("x" * 300)], {}, "messages[0].content[0].image_url.url", "has room for"),
        ([part(TALL_URL), text("x" * 50000)], {}, "prompt", "maximum context length"),
        ([part(TALL_URL), text("<|image_pad|>")], {}, "messages", "2 places for the 1 images"),
        ([part(TALL_URL), {"type": "input_audio"}], {}, "messages[0].content[1].type", "reads texts and images"),
        ([{"type": "video_url", "video_url": {}}], {}, "messages[0].content[0].type", "'video_url'"),
    ],
)
def test_what_is_refused(
    server: Running, http: httpx.Client, content: Any, more: dict[str, Any], param: str, says: str
) -> None:
    answer = ask(http, content, **more)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], says in error["message"]) == (param, True), error
    assert len(error["message"]) < 400
    assert not server.engine.requests


def test_the_short_form_and_a_cut_that_cuts_nothing(server: Running, http: httpx.Client) -> None:
    content = [{"type": "image_url", "image_url": TALL_URL}]
    assert ask(http, content, truncate_prompt_tokens=-1).status_code == 200
    check(server.engine.requests[-1], [TALL], "[user]<@>\n[assistant]")


def test_images_beyond_the_context(server: Running, http: httpx.Client) -> None:
    image = np.zeros((28 * 5, 28 * 8, 3), np.uint8)
    file = BytesIO()
    Pillow.fromarray(image).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    answer = ask(http, [part(url)] * 3, max_tokens=200)
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not server.engine.requests


@pytest.fixture(scope="module")
def blind() -> Iterator[Running]:
    engine = FakeEngine()
    yield from serve(make_state(engine), engine)


def test_a_model_that_does_not_see(blind: Running) -> None:
    with httpx.Client(base_url=blind.url, timeout=10, verify=False) as http:
        error = ask(http, TWO[0]["content"]).json()["error"]
        assert error["param"] == "messages[0].content[1].type"
        assert error["message"].endswith("is 'image_url'; this model reads text only.")
        error = ask(http, [block(TALL_URL)], "/v1/messages").json()["error"]
        assert "type is 'image', which this model cannot read here" in error["message"]
