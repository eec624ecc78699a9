"""Reads `--speculative-config`, a JSON object in vLLM's words.

Invariants: a key or value that would change nothing here, or mean something else, is refused by name.
Knows nothing of how drafts are found.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import Any

from stoker_runtime.errors import ConfigError

MAX_DRAFTS = 16
MAX_MATCH = 64
"""Tokens that a place in the text has to share with the end: what is beyond decides nothing any more."""
VERIFY_TOKENS = 256
"""Rows of the widest verification: beyond them a step is bound by arithmetic, and drafts are not nearly free."""

NAME = "speculative_config"
DRAFT_MODEL = "draft_model"
EAGLE3 = "eagle3"
MTP = "mtp"
MTP_NAMES = (MTP, "deepseek_mtp", "glm4_moe_mtp")
OTHER_METHODS = {
    "eagle": "EAGLE heads of the first two kinds are not there yet; those of EAGLE-3 are method eagle3",
    "medusa": "Medusa heads are not there yet",
    "mlp_speculator": "MLP speculators are not there yet",
}


@dataclass(frozen=True, slots=True)
class Drafting:
    """Where drafts come from, and at most how many a step verifies for a sequence.

    A sequence's last `least` to `match` tokens are looked for earlier in it. Of `n` that match at most `factor · n`
    tokens are drafted (0: as many as there may be), as long as `share` of equal matches went on so. From
    `batch_limit` sequences on nothing is drafted (0: no such limit).
    """

    method: str
    tokens: int
    least: int
    match: int
    factor: float = 0.0
    share: float = 0.0
    batch_limit: int = 0
    model: str = ""
    """A folder, a .gguf file or a name of the hub, of the model or head that drafts; "" where none does."""
    revision: str = ""

    @property
    def reads_states(self) -> bool:
        """Whether a head drafts, from the model's own states."""
        return self.method in (EAGLE3, MTP)

    def verify_tokens(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """Rows of the widest verification where a step has at most so many sequences and tokens; 0: none fits."""
        widest = min(max_num_seqs * (self.tokens + 1), max(VERIFY_TOKENS, self.tokens + 1), max_num_batched_tokens)
        return widest if widest > 1 else 0

    def __str__(self) -> str:
        return f"{self.method}, up to {self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """What passes of a draft model cost, in plain steps of the model: one pass, and each token that it lacked."""

    draft: float
    token: float


def read_drafting(value: str) -> Drafting | None:
    """What `value` asks for, None where it is empty. Raises ConfigError naming the field."""
    if not value:
        return None
    try:
        given = json.loads(value)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ConfigError(f"{NAME} is {value!r:.100}; it must be a JSON object with a method.", param=NAME)
    method = given.get("method")
    if method is None and "model" in given:
        method = DRAFT_MODEL
    if method in MTP_NAMES:
        method = MTP
    if isinstance(method, str) and (method in OTHER_METHODS or method.endswith("_mtp")):
        why = "such heads are not there yet; those of DeepSeek-V3 and GLM-4.5 are method mtp"
        raise _refused("method", method, OTHER_METHODS.get(method, why))
    if not isinstance(method, str) or method not in _READERS:
        raise _refused("method", method, f"it must be one of {', '.join(_READERS)}")
    fields = _READERS[method]
    for name in given.keys() - {"method", "num_speculative_tokens", "disable_by_batch_size"} - fields.keys():
        near = difflib.get_close_matches(name, [*fields, "num_speculative_tokens"], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise _refused(name, given[name], f"{method} has no such field{hint}")
    limit = _whole(given, "disable_by_batch_size", 0, 0, 1 << 20)
    if method in (DRAFT_MODEL, EAGLE3):
        return _with_model(method, given, limit)
    if method == MTP:
        return Drafting(MTP, _needed_tokens(method, given), 0, 0, batch_limit=limit)
    return {"ngram": _ngram, "suffix": _suffix}[method](given, limit)


def with_model(value: str, path: str) -> str:
    """`value`, which names a draft model, with `path` in the place of its name and revision."""
    given = json.loads(value)
    given.pop("revision", None)
    return json.dumps({**given, "model": path})


_READERS: dict[Any, dict[str, None]] = {
    "ngram": dict.fromkeys(("prompt_lookup_max", "prompt_lookup_min")),
    "suffix": dict.fromkeys(
        (
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        )
    ),
    DRAFT_MODEL: dict.fromkeys(("model", "revision", "draft_tensor_parallel_size")),
    MTP: dict.fromkeys(("draft_tensor_parallel_size",)),
    EAGLE3: dict.fromkeys(("model", "revision", "draft_tensor_parallel_size")),
}


def _ngram(given: dict[str, Any], batch_limit: int) -> Drafting:
    if "num_speculative_tokens" not in given:
        raise _refused("num_speculative_tokens", None, "ngram needs it: how many tokens a step verifies")
    tokens = _whole(given, "num_speculative_tokens", 0, 1, MAX_DRAFTS)
    most = _whole(given, "prompt_lookup_max", given.get("prompt_lookup_min", 5), 1, MAX_MATCH)
    least = _whole(given, "prompt_lookup_min", most, 1, MAX_MATCH)
    if least > most:
        raise _refused("prompt_lookup_min", least, f"it must be at most prompt_lookup_max, which is {most}")
    return Drafting("ngram", tokens, least, most, batch_limit=batch_limit)


def _suffix(given: dict[str, Any], batch_limit: int) -> Drafting:
    tokens = _whole(given, "num_speculative_tokens", MAX_DRAFTS, 1, MAX_DRAFTS)
    cached = _whole(given, "suffix_decoding_max_cached_requests", 0, 0, 1 << 30)
    if cached:
        why = "drafts come from the request's own prompt and output alone; it must be 0"
        raise _refused("suffix_decoding_max_cached_requests", cached, why)
    depth = _whole(given, "suffix_decoding_max_tree_depth", 24, 1, MAX_MATCH)
    factor = _number(given, "suffix_decoding_max_spec_factor", 1.0, 0.1, 100.0)
    share = _number(given, "suffix_decoding_min_token_prob", 0.1, 0.0, 1.0)
    return Drafting("suffix", tokens, 1, depth, factor, share, batch_limit)


def _with_model(method: str, given: dict[str, Any], batch_limit: int) -> Drafting:
    model, revision = given.get("model"), given.get("revision") or ""
    if not isinstance(model, str) or not model:
        what = "the model that drafts: a folder, a .gguf file" if method == DRAFT_MODEL else "an EAGLE-3 head: a folder"
        raise _refused("model", model, f"it must name {what}, a name of the hub")
    if not isinstance(revision, str):
        raise _refused("revision", revision, "it must be text")
    tokens = _needed_tokens(method, given)
    return Drafting(method, tokens, 0, 0, batch_limit=batch_limit, model=model, revision=revision)


def _needed_tokens(method: str, given: dict[str, Any]) -> int:
    """How many tokens a step verifies, by one that runs on the model's own rank."""
    if "num_speculative_tokens" not in given:
        raise _refused("num_speculative_tokens", None, f"{method} needs it: how many tokens a step verifies")
    _whole(given, "draft_tensor_parallel_size", 1, 1, 1)
    return _whole(given, "num_speculative_tokens", 0, 1, MAX_DRAFTS)


def _whole(given: dict[str, Any], name: str, default: Any, least: int, most: int) -> int:
    value = given.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _refused(name, value, f"it must be a whole number from {least} to {most}")
    return value


def _number(given: dict[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise _refused(name, value, f"it must be a number from {least:g} to {most:g}")
    return float(value)


def _refused(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(f"{NAME}: {name} is {value!r:.80}: {why}.", param=NAME)
