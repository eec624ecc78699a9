"""transformers' own logits and greedy tokens, and ours compared with them."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from tests.runtime.models.plain_models import PlainModel


def assert_logits(found: torch.Tensor, model: Any, prompt: list[int], limit: float) -> None:
    """They are transformers' own within `limit`, or those of its model in fp64, from which its own may be further."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        if torch.allclose(found, model(ids).logits[0], atol=limit, rtol=limit):
            return
        exact = model.double()(ids).logits[0]
    model.float()
    torch.testing.assert_close(found.double(), exact, atol=limit, rtol=limit)


def assert_greedy(found: list[int], model: Any, prompt: list[int], limit: float) -> None:
    """They are transformers' own tokens; of two whose logits are within `limit` either, and then what follows it."""
    if found == greedy_tokens(model, prompt, len(found)):
        return
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *found[:-1]]])).logits[0, len(prompt) - 1 :]
    lost = logits.amax(dim=1) - logits.gather(1, torch.tensor(found)[:, None])[:, 0]
    assert float(lost.max()) <= limit, f"{found} lose {lost.tolist()}"


def greedy_tokens(model: Any, prompt: list[int], steps: int) -> list[int]:
    """So many tokens of transformers' own model, the likeliest one each time."""
    tokens: list[int] = []
    if isinstance(model, PlainModel):
        for _ in range(steps):
            tokens.append(int(model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].argmax()))
        return tokens
    # transformers called it past_key_values until 5.20.
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache, feed = None, torch.tensor([prompt])
    with torch.no_grad():
        for _ in range(steps):
            out = model(feed, **{named: cache}, use_cache=True)
            cache = getattr(out, named)
            tokens.append(int(out.logits[0, -1].argmax()))
            feed = torch.tensor([tokens[-1:]])
    return tokens
