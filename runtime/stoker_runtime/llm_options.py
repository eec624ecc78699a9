"""The options of `LLM` under vLLM's names: which field of EngineConfig each one is, and which have one value here.

Invariants: an option that is not known is an error that names the nearest; one that asks for what is not there is an
error that says so.
Knows nothing of models.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from stoker_runtime.config import EngineConfig
from stoker_runtime.errors import ConfigError

RENAMED = {"block_size": "page_size", "num_gpu_blocks_override": "num_gpu_blocks"}
ONE_VALUE: dict[str, tuple[Any, ...]] = {
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "trust_remote_code": (False, True),
    "disable_log_stats": (False, True),
    "enable_chunked_prefill": (None, True),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto",),
    "skip_tokenizer_init": (False,),
    "cpu_offload_gb": (0,),
    "enable_lora": (False,),
    "revision": (None, "main"),
    "tokenizer_revision": (None, "main"),
}
"""What asks for nothing: a model's own code is never run, prefill is always chunked, and so on."""


def engine_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of EngineConfig that `options` ask for. Raises ConfigError naming the option."""
    known = {each.name for each in fields(EngineConfig)}
    found: dict[str, Any] = {}
    for given, value in options.items():
        name = RENAMED.get(given, given)
        if name in known:
            # vLLM's "not given" is our "decided at start", which is every field's default.
            if value is not None:
                found[name] = value
        elif given in ONE_VALUE:
            if not any(value == allowed and type(value) is type(allowed) for allowed in ONE_VALUE[given]):
                raise ConfigError(f"LLM does not support {given}={value!r}; leave it out.", param=given)
        else:
            near = difflib.get_close_matches(given, [*known, *RENAMED, *ONE_VALUE], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"LLM has no option {given!r}{hint}", param=given)
    return found
