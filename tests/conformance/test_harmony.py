"""gpt-oss's answers as the library of its makers writes and reads them: random messages that it renders are read by our
parser as by the library.

The library fetches its vocabulary, which litellm has under another name. What stands between tokens is no matter of it.
"""

from __future__ import annotations

import importlib.util
import json
import random
import shutil
from pathlib import Path
from typing import Any

import openai_harmony as harmony
import pytest

from stoker_runtime.api.tools.parsers.harmony import HarmonyParser

SEED = random.SystemRandom().randrange(1 << 30)
VOCABULARY = "fb374d419588a4632f3f557e76b4b70aebbca790"
WORDS = ("", "red", " fox\n", "{\"a\": [1, \"b\"]}", "</think>", "Größe", "to=functions.now", "analysis", "🦊", " ")


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The library's encoding, by the vocabulary that lies on this machine."""
    found = importlib.util.find_spec("litellm")
    assert found is not None, "litellm is of the same extra"
    assert found.origin is not None
    room = tmp_path_factory.mktemp("vocabulary")
    kept = Path(found.origin).parent / "litellm_core_utils" / "tokenizers" / VOCABULARY
    shutil.copy(kept, room / "o200k_base.tiktoken")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(room))
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def drawn(rng: random.Random) -> list[Any]:
    """Messages of an answer: thoughts, preambles, a built-in tool, calls, and at last what is said."""

    def message(text: str, channel: str, recipient: str = "") -> Any:
        made = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)
        return made.with_recipient(recipient).with_content_type("<|constrain|>json") if recipient else made

    def text() -> str:
        return f"x{''.join(rng.choices(WORDS, k=rng.randint(0, 5)))}x"

    found = []
    for _ in range(rng.randint(0, 5)):
        kind = rng.randrange(4)
        if kind == 0:
            found.append(message(text(), "analysis"))
        elif kind == 1:
            found.append(message(text(), "commentary"))
        elif kind == 2:
            found.append(message(text(), "analysis", "browser.search"))
        else:
            arguments = json.dumps({text(): rng.randrange(99) for _ in range(rng.randint(0, 3))})
            found.append(message(arguments, "commentary", f"functions.{rng.choice(('now', 'get_weather'))}"))
    return [*found, message(text(), "final")]


def test_what_the_library_renders_is_read_as_it_reads_it(encoding: Any) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    for _ in range(300):
        messages = drawn(rng)
        tokens = [token for each in messages for token in encoding.render(each)]
        # A prompt has opened the first message: "<|start|>assistant".
        tokens = tokens[2:]
        read = encoding.parse_messages_from_completion_tokens(tokens, harmony.Role.ASSISTANT)
        parts: dict[str, list[str]] = {"reasoning": [], "content": []}
        calls = []
        for each in read:
            said = each.content[0].text
            if each.recipient and each.recipient.startswith("functions."):
                calls.append((each.recipient.removeprefix("functions."), said))
            else:
                parts["reasoning" if each.channel == "analysis" else "content"].append(said)
        found = HarmonyParser().parse(encoding.decode(tokens))
        assert found.reasoning == "\n".join(parts["reasoning"])
        assert found.content == "\n".join(parts["content"])
        assert [(call.name, call.arguments) for call in found.tool_calls] == calls
