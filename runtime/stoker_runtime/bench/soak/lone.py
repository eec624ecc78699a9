"""Seeded texts once more, one after the other on an idle server.

Invariants: the very body that was sent among others is sent again. Knows nothing of verdicts.
"""

from __future__ import annotations

from collections.abc import Sequence

from stoker_runtime.bench.soak.tally import Sampled
from stoker_runtime.bench.soak.visit import expect
from stoker_runtime.bench.soak.wire import Wire

SHOWN = 40


async def differing_texts(url: str, api_key: str, texts: Sequence[Sampled]) -> list[str]:
    """The texts that come out differently alone, each with the place where it begins to differ. Raises Wrong."""
    wire, found = Wire(url, api_key), list[str]()
    try:
        for each in texts:
            (choice,) = expect(await wire.ask("POST", "/v1/completions", each.body))["choices"]
            if (choice["text"], choice["finish_reason"]) != (each.text, each.finish):
                found.append(_difference(each.text, choice["text"], each.body["seed"]))
    finally:
        wire.leave()
    return found


def _difference(among: str, alone: str, seed: object) -> str:
    pairs = enumerate(zip(among, alone, strict=False))
    at = next((at for at, (a, b) in pairs if a != b), min(len(among), len(alone)))
    return f"seed {seed}, character {at}: {among[at : at + SHOWN]!r} among others, {alone[at : at + SHOWN]!r} alone"
