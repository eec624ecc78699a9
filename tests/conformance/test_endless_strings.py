"""A small model's strings that never end are its own path: under the same mask, transformers takes the same tokens.

LangChain's suite asks SmolLM2 for jokes as JSON, and some of its answers go round in a circle until their tokens are
over, at temperature 0, in every type and with every way of writing JSON. Nothing of a server's is at fault there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from known_names import KEY

TOKENS = 72
NEAR = 0.02
"""Logits that two orders of the same sums may put one before the other or after it."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"setup": {"type": "string"}, "punchline": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    "required": ["setup", "punchline"],
    "additionalProperties": False,
}
CASES = {
    "Give me the setup to a joke about cats, no punchline.": {"whitespace_flexible": True},
    "Give me a joke about cats, include the punchline.": {
        "whitespace_flexible": False,
        "item_separator": ", ",
        "key_separator": ": ",
    },
}
"""What the suite asks, and the blanks that JSON may have."""


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    import torch

    loaded = transformers.AutoModelForCausalLM
    return loaded.from_pretrained(smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32).eval()


def answer(url: str, text: str, blanks: dict[str, Any]) -> tuple[list[int], list[int], str]:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": text}],
        "structured_outputs": {"json": {**SCHEMA, "x-guidance": blanks}},
        "temperature": 0,
        "max_tokens": TOKENS,
        "return_token_ids": True,
    }
    headers = {"authorization": f"Bearer {KEY}"}
    found = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120).json()
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "length", "the string did end"
    return found["prompt_token_ids"], choice["token_ids"], choice["message"]["content"]


@pytest.mark.parametrize(("text", "blanks"), CASES.items(), ids=["any blanks", "one line"])
def test_each_token_is_the_models_likeliest(
    url: str, reference: Any, smollm2: Path, text: str, blanks: dict[str, Any]
) -> None:
    import torch
    from llguidance import LLMatcher

    from stoker_runtime.sampling.grammar import build_tokenizer
    from stoker_runtime.text.tokenizer import Tokenizer

    prompt, tokens, said = answer(url, text, blanks)
    with pytest.raises(json.JSONDecodeError):
        json.loads(said)
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
    vocabulary = logits.shape[1]
    tokenizer = build_tokenizer(Tokenizer.load(str(smollm2)), vocabulary, [2])
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps({**SCHEMA, "x-guidance": blanks})))
    for row, token in zip(logits.numpy(), tokens, strict=True):
        mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:vocabulary]
        assert mask[token]
        assert row[token] >= row[mask == 1].max() - NEAR
        assert matcher.consume_token(token)
