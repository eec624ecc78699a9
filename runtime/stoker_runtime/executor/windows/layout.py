"""Which page a layer's keys and values lie in, and at which place of it.

A page is `page_size` tokens of `depth` layers, whichever layers these are, so that one pool serves all. Mostly all
layers share a page: one table of pages serves them. In a model of whose layers some see everything and some have a
window, a page has as many layers as see everything: these have the first table, and those with a window as many
further ones, by `depth` layers a table, whose pages are given up when they fall out of sight (`kvcache/sight.py`). The
last of these tables may have fewer layers, and its pages room that nothing uses.

Invariants: pure and torch-free; the same for every rank and every start of a configuration.
Knows nothing of how memory is allocated, and of who owns pages.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from stoker_runtime.config import EngineConfig
from stoker_runtime.kvcache.sight import Sight
from stoker_runtime.models.spec import ModelSpec

MOST_WASTE = 0.25
"""Of all layers' share of a page: what may stay unused of pages that hold fewer layers than they could."""
MOST_PAGES = (1 << 31) - 1
"""Of a page that takes nothing: numbers of pages are int32."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`places[i]` are the table and the place in its pages, below `depth`, of the i-th layer that attends.

    `kv_of_a_token`: bytes that a token takes of a page.
    `sight` is what tables but the first see; None: there is but one. `kept` says why windows give nothing up.
    """

    depth: int
    places: tuple[tuple[int, int], ...]
    kv_of_a_token: int
    sight: Sight | None = None
    kept: str = ""

    @property
    def tables(self) -> int:
        """Tables of pages of a sequence."""
        return 1 if self.sight is None else 1 + self.sight.parts

    def pages(self, tokens: int, page_size: int) -> int:
        """The most pages that a sequence of `tokens` holds at a time."""
        return -(-tokens // page_size) if self.sight is None else self.sight.pages(tokens)

    def tokens(self, pages: int, page_size: int) -> int:
        """The longest sequence that so many pages hold."""
        return pages * page_size if self.sight is None else self.sight.tokens(pages)


def pages_in(room: int, page: int) -> int:
    """Pages of `page` bytes in `room`; a rank none of whose layers attends has as many as others may have."""
    if page:
        return room // page
    return MOST_PAGES if room >= 0 else 0


def kv_layout(config: EngineConfig, spec: ModelSpec) -> KvLayout:
    """The layout of a model's pages; `config` is resolved."""
    layers, kv_dtype = spec.attending, config.kv_cache_dtype
    whole = [layer for layer in layers if not spec.windows[layer]]
    near = [layer for layer in layers if spec.windows[layer]]
    together = KvLayout(
        len(layers), tuple((0, place) for place in range(len(layers))), spec.kv_bytes_per_token(kv_dtype)
    )
    if not near:
        return together
    depth = len(whole)
    sight = Sight(max(spec.windows), -(-len(near) // max(depth, 1)), config.page_size)
    kept = _why_kept(config, spec, sight, depth * (1 + sight.parts) - len(layers))
    if kept:
        return replace(together, kept=kept)
    place_of = {layer: (0, place) for place, layer in enumerate(whole)}
    place_of |= {layer: (1 + at // depth, at % depth) for at, layer in enumerate(near)}
    places = tuple(place_of[layer] for layer in layers)
    return KvLayout(depth, places, spec.kv_bytes_per_token(kv_dtype, depth), sight)


def _why_kept(config: EngineConfig, spec: ModelSpec, sight: Sight, unused: int) -> str:
    """What it is about a model with windows that all its layers keep their pages; "" where they do not.

    `unused`: layers' room in the pages of a place that would hold nothing.
    """
    reasons = (
        (config.disable_hybrid_kv_cache_manager, "disable_hybrid_kv_cache_manager is set"),
        (0 not in spec.windows, "every layer has a window, and pages are dealt by layers that have none"),
        (unused > MOST_WASTE * len(spec.attending), "too few layers have one for pages of equal size"),
        (sight.window >= config.max_model_len, "max_model_len is not longer than the window"),
        (config.drafting is not None, "speculative_config takes positions back"),
        (bool(config.swap_space or config.num_cpu_blocks), "the host pool takes whole sequences"),
        (config.publishes_kv_events, "kv_events_config tells of pages of all layers"),
        (config.pipeline_parallel_size > 1, "pipeline_parallel_size gives ranks other layers"),
        (spec.recurrent is not None or spec.latent is not None, "it has layers of another kind besides"),
    )
    return next((why for applies, why in reasons if applies), "")


def log_layout(layout: KvLayout, config: EngineConfig, spec: ModelSpec) -> None:
    """Say what layers with a window keep, if there are any."""
    if layout.kept:
        log.info("KV cache: layers with a window keep the pages of whole sequences: %s", layout.kept)
    if (sight := layout.sight) is not None:
        log.info(
            "KV cache: %d of %d layers look back %d tokens and give up pages out of sight; a sequence of %d tokens "
            "takes %d pages of %d tokens and %d layers",
            sum(map(bool, spec.windows)), spec.num_layers, sight.window, config.max_model_len,
            sight.pages(config.max_model_len), config.page_size, layout.depth,
        )  # fmt: skip
