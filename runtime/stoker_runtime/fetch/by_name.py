"""What a model argument names, as a path on this machine; what does not lie here yet is fetched.

A name of the hub goes into the hub's cache (`local_copy.py`), a URI of another source where `stoker fetch` publishes.

Invariants: a path that is here wins, and costs nothing: what asks a source is imported for those who name one alone. A
token comes from HF_TOKEN or the user's login, never from a flag; a store's keys come from the environment.
Knows nothing of what serves the files.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.settings import with_model
from stoker_runtime.errors import ConfigError, ModelError
from stoker_runtime.fetch.errors import FetchError
from stoker_runtime.fetch.reference import PUBLISHED, hub_name

DESCRIPTIONS = ("*.json",)
"""What tells a model's sizes, without its weights."""
TOKENIZERS = ("*.json", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt")
SHAPE_PREFIX = "shape:"

log = logging.getLogger(__name__)
Say = Callable[[str], None]


def located(config: EngineConfig, *, only: Sequence[str] = (), say: Say = log.info) -> EngineConfig:
    """The configuration with paths for its model, tokenizer and draft model, fetched where they have to be.

    `only` narrows the models to files that match, where it has a config.json. Raises ConfigError for a name that means
    nothing, FetchError where trying again may help.
    """
    model = locate(config.model, config.revision, only=only, say=say)
    tokenizer = locate(config.tokenizer, only=TOKENIZERS, say=say) if config.tokenizer else ""
    drafting, speculation = config.drafting, config.speculative_config
    if drafting is not None and drafting.model:
        speculation = with_model(speculation, locate(drafting.model, drafting.revision, only=only, say=say))
    return replace(config, model=model, tokenizer=tokenizer, revision="", speculative_config=speculation)


def locate(model: str, revision: str = "", *, only: Sequence[str] = (), say: Say = log.info) -> str:
    """The path of `model`; `model` itself for what is none, whose reader will say so. Raises as `located` does."""
    if model.startswith(PUBLISHED):
        return _published(model, revision, tuple(only), say)
    here = model.startswith(SHAPE_PREFIX) or os.path.lexists(model)
    reference = None if model.startswith(SHAPE_PREFIX) else hub_name(model)
    if here or reference is None:
        if revision:
            what = "lies on this machine" if here else "is no name of the hub"
            raise ConfigError(f"revision is {revision!r}, but {model!r} {what}; leave it out.", param="revision")
        if reference is not None:
            say(f"{model} is a path on this machine, which wins; hf://{model} means the hub's repository")
        return model
    from stoker_runtime.fetch.local_copy import LocalCopy

    try:
        return str(LocalCopy(reference, revision, tuple(only), say).path())
    except FetchError as error:
        if error.exit_status != 3:
            raise
        hint = "" if model.startswith("hf://") else f" (Nor is there a folder or file {model!r} here.)"
        raise ModelError(f"{error.message}{hint}", param="model") from None


def _published(uri: str, revision: str, only: tuple[str, ...], say: Say) -> str:
    """The path of what a URI names, fetched and published as `stoker fetch` does. Raises as `located` does."""
    from stoker_runtime.fetch.download import Patience
    from stoker_runtime.fetch.interrupt import stopped_by_signals
    from stoker_runtime.fetch.order import Order, endpoint_for
    from stoker_runtime.fetch.prefetch import Prefetch, serve_path
    from stoker_runtime.fetch.progress import Progress, Terminal
    from stoker_runtime.fetch.volume import DEFAULT_ROOT, Volume

    if revision and not uri.startswith("modelscope://"):
        raise ConfigError(f"revision is {revision!r}, but only a hub has revisions; leave it out.", param="revision")
    root, stop, progress = DEFAULT_ROOT.expanduser(), threading.Event(), Progress()
    whole = Order(uri, root, revision, endpoint=endpoint_for(uri, ""))
    order = whole if not only or Volume(root).recall(whole.key(revision)) else replace(whole, only=only)
    try:
        with stopped_by_signals(stop), Terminal(progress, log=say) as terminal:
            path = serve_path(Prefetch(order, progress, stop, terminal.say, Patience()).run())
    except FetchError as error:
        if error.exit_status != 3:
            raise
        raise ModelError(error.message, param="model") from None
    say(f"{uri.partition('?')[0]}: as published at {path}")
    return str(path)
