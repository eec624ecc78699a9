"""The options of `LLM` under vLLM's names: which field of EngineConfig each one is, which have one value, which any.

Invariants: an option that is not known is an error that names the nearest; one that asks for what is not there is an
error that says so.
Knows nothing of models.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError
from stoker_runtime.settings import vllm_flags, vllm_refused
from stoker_runtime.settings.flags import spell
from stoker_runtime.settings.values import BadValue, switch

log = logging.getLogger(__name__)

RENAMED = {
    "block_size": "page_size",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "override_pooler_config": "pooler_config",
}
ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "data_parallel_size": (1,),
    "skip_tokenizer_init": (False,),
    "disable_sliding_window": (False,),
    "tokenizer_revision": (None, "main"),
    "kv_events_config": (None,),
    "kv_transfer_config": (None,),
    "hf_overrides": (None, {}),
    "hf_token": (None,),
    "download_dir": (None,),
    "chat_template": (None,),
}
"""What asks for nothing, where vLLM's flag of that name is refused whatever its value, or is none."""
ANY_VALUE = ("served_model_name", "limit_mm_per_prompt", "allowed_media_domains")
"""Of a server alone."""
MAX_LOGPROBS = 20
TASKS = {"auto": "auto", "generate": "generate"} | dict.fromkeys(("embed", "embedding", "score", "pooling"), "pooling")


def engine_options(options: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The fields of EngineConfig that `options` ask for, and vLLM's variables where they do not say it.

    Raises ConfigError naming the option.
    """
    known = {each.name for each in fields(EngineConfig)} - ONE_VALUE.keys()
    found: dict[str, Any] = {}
    for variable, name in vllm_flags.VARIABLES.items():
        if environment is not None and variable in environment:
            found[name.replace("-", "_")] = _switched(variable, environment[variable])
    for given, value in options.items():
        name = RENAMED.get(given, given)
        if name in known:
            # vLLM's "not given" is our "decided at start", which is every field's default.
            if value is not None:
                found[name] = _ours(name, value)
        elif given in ("task", "convert"):
            found["runner"] = _runner(given, value)
        elif given in ONE_VALUE:
            if not any(value == allowed and type(value) is type(allowed) for allowed in ONE_VALUE[given]):
                # A token is among these: no value is quoted where there is another way to give it.
                why = vllm_refused.UNSUPPORTED.get(given.replace("_", "-"))
                said = f"LLM does not support {given}" + (f": {why}." if why else f"={value!r}; leave it out.")
                raise ConfigError(said, param=given)
        elif given == "max_logprobs":
            if not 0 <= value <= MAX_LOGPROBS:
                raise ConfigError(f"max_logprobs must be between 0 and {MAX_LOGPROBS}; got {value}.", param=given)
        elif given not in ANY_VALUE and value is not None:
            _accept(given, value, [*known, *RENAMED, *ONE_VALUE])
    return found


def _accept(given: str, value: Any, known: Sequence[str]) -> None:
    """Check an option that is no field of EngineConfig as the flag of its name, and log what is ignored."""
    name, is_off = vllm_flags.find(given)
    if not name or is_off:
        theirs = [each.replace("-", "_") for each in vllm_flags.TAKEN]
        near = difflib.get_close_matches(given, [*known, *theirs], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ConfigError(f"LLM has no option {given!r}{hint}", param=given)
    if name in vllm_refused.UNSUPPORTED:
        raise ConfigError(f"LLM does not support {given}: {vllm_refused.UNSUPPORTED[name]}.", param=given)
    values = [spell(each) for each in (value if isinstance(value, (list, tuple)) else [value])]
    if line := vllm_flags.accept(given, name, values):
        log.warning("%s", line)


def _ours(name: str, value: Any) -> Any:
    """A value as EngineConfig spells it: types by name, settings as JSON."""
    if name == "dtype":
        spelled = str(value).removeprefix("torch.")
        return vllm_flags.SPELLINGS["dtype"].get(spelled, spelled)
    return (
        json.dumps(value) if name in ("pooler_config", "speculative_config") and isinstance(value, Mapping) else value
    )


def _switched(variable: str, value: str) -> bool:
    try:
        return switch(value)
    except BadValue as error:
        raise ConfigError(f"{variable} is {value!r}; it must be {error}.", param=variable) from error


def _runner(given: str, value: Any) -> str:
    """The runner that a task, or a conversion, stands for."""
    runner = TASKS.get("auto" if value in (None, "none") else value)
    if runner is None:
        raise ConfigError(f"LLM does not support {given}={value!r}; it generates, embeds and scores.", param=given)
    return runner
