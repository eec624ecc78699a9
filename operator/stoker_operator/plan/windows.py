"""What the KV cache of one context holds where some layers look back a window and give up pages behind it.

Invariants: pure arithmetic, the engine's (`stoker_runtime/executor/windows/layout.py`), which a test compares it with.
Where the engine keeps all pages, all layers count for the whole context.
"""

from __future__ import annotations

from collections.abc import Mapping

from stoker_operator.spec.engine_flags import count, number
from stoker_operator.spec.service import FetchedModel

# Keys that are read together, so that what is kept begins at a multiple of them; and what of pages may stay unused.
READ_BLOCK, MOST_WASTE = 64, 0.25
# Flags with which the engine keeps all pages, whatever they say or with any number but 0.
KEEPING = ("speculative-config", "kv-events-config", "disable-hybrid-kv-cache-manager")
KEEPING_NUMBERS = ("swap-space", "num-cpu-blocks")


def gives_up(model: FetchedModel, said: Mapping[str, str], context: int, ranks: int) -> bool:
    """Whether layers with a window keep no more than it; `said` are the engine's flags."""
    near, whole = model.window_layers, model.layers - model.window_layers
    if not 0 < near < model.layers or ranks > 1 or model.window >= context:
        return False
    kept = any(said.get(name, "") not in ("", "false") for name in KEEPING)
    kept |= any(number(said.get(name, "")) or count(said.get(name, "")) for name in KEEPING_NUMBERS)
    return not kept and whole * (1 + -(-near // whole)) - model.layers <= MOST_WASTE * model.layers


def layer_tokens(model: FetchedModel, tokens: int, page: int) -> int:
    """Tokens times layers of the pages that a sequence of `tokens` takes, of `page` tokens each, where it gives up some.

    A page has as many layers as see everything; those with a window fill as many more pages as it takes.
    """
    whole = model.layers - model.window_layers
    parts, places = -(-model.window_layers // whole), -(-tokens // page)
    span = -(-(model.window + max(READ_BLOCK, page) - 1) // page)
    return (places + parts * min(places, span)) * page * whole
