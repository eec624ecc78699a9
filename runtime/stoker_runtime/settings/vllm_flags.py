"""Flags of vLLM that have no setting here: those that say what Stoker does anyway, and those that it cannot do.

Invariants: none of them is taken in silence where it would change what comes out: either it asks for what is so
already, or how vLLM is to do its work, or it is an error that says why.
Knows nothing of the settings that there are; see flags.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from stoker_runtime.errors import ConfigError

ALWAYS = {
    "async-scheduling": "steps are always launched one ahead",
    "enable-chunked-prefill": "prompts are always computed in chunks beside running requests",
    "enable-prompt-tokens-details": "usage always counts cached tokens",
    "enable-request-id-headers": "answers always carry x-request-id",
    "enable-server-load-tracking": "/load always answers",
    "enable-ssl-refresh": "a renewed certificate is always loaded",
    "enable-tokenizer-info-endpoint": "/tokenizer_info always answers",
    "disable-frontend-multiprocessing": "",
    "disable-log-stats": "",
    "trust-remote-code": "",
}
"""Switches that are accepted; where there is a reason, switching it off is refused with it."""

ONE_VALUE = {
    "lora-dtype": (("auto",), "adapters have the model's own type"),
    "load-format": (("auto",), "safetensors and GGUF are told apart by the files"),
    "config-format": (("auto",), "it is told by the files"),
    "tokenizer-mode": (("auto",), "there is one kind of tokenizer"),
    "chat-template-content-format": (("auto", "string"), "templates get a message's parts as one text"),
    "response-role": (("assistant",), "answers are the assistant's"),
    "max-logprobs": (("20",), "it is what a step has room for"),
    "cpu-offload-gb": (("0",), "weights stay on the device"),
    "root-path": (("",), "routes begin at the root; let the proxy cut the prefix off"),
}
"""Flags with the values that they may have: what is so, and vLLM's own default where it makes no difference."""

_WORD = (r"[A-Za-z0-9_.-]+", "a name")
_NUMBER = (r"\d+", "a whole number")
_NUMBERS = (r"\d+(,\d+)*|\[\s*\d+(\s*,\s*\d+)*\s*\]", "whole numbers")
_OBJECT = ("", "a JSON object")
_LEVEL_OR_OBJECT = (r"[0-3]", "0 to 3, or a JSON object")
_COUNTS = (r"\w+=\d+(,\w+=\d+)*", "a JSON object, or image=1")

INNER: dict[str, tuple[str, str]] = {
    "attention-backend": _WORD,
    "attention-config": _OBJECT,
    "compilation-config": _LEVEL_OR_OBJECT,
    "cuda-graph-sizes": _NUMBERS,
    "cudagraph-capture-sizes": _NUMBERS,
    "distributed-executor-backend": ("ray|mp|uni|external_launcher", "ray, mp, uni or external_launcher"),
    "guided-decoding-backend": (
        "auto|xgrammar|guidance|outlines|lm-format-enforcer",
        "auto, xgrammar, guidance, outlines or lm-format-enforcer",
    ),
    "limit-mm-per-prompt": _COUNTS,
    "max-num-partial-prefills": _NUMBER,
    "max-parallel-loading-workers": _NUMBER,
    "max-seq-len-to-capture": _NUMBER,
    "mm-processor-kwargs": _OBJECT,
    "model-impl": ("auto|vllm|transformers|terratorch", "auto, vllm, transformers or terratorch"),
    "optimization-level": (r"[0-3]", "0 to 3"),
    "structured-outputs-config": _OBJECT,
}
"""How vLLM is to do its work, or to read media: what comes out does not depend on it, so it is read and ignored.

Each with the pattern of its values, and that in words; where the words say so, a JSON object is one too.
"""

VARIABLES = {"VLLM_BATCH_INVARIANT": "batch-invariant"}
"""vLLM's variables that say what comes out, and the flag of ours that says it; others are not looked at."""

SPELLINGS = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv-cache-dtype": {"fp8_e4m3": "fp8"},
    "generation-config": {"vllm": "none"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
}
"""vLLM's words for values of our own flags."""

UNSUPPORTED = {
    "num-speculative-tokens": "it is a field of --speculative-config",
    "rope-scaling": "it is read from the model's configuration; change it there",
    "hf-overrides": "the model's configuration is used as it is; --pooler-config takes what rerankers need of it",
    "enable-force-include-usage": "streams report usage where a request asks for it",
    "override-generation-config": "change the model's generation_config.json, or use --generation-config none",
    "return-tokens-as-token-ids": "requests ask for it by the field of that name",
    "stream-interval": "requests ask for it by the field of that name",
    "tool-server": "clients run the tools",
    "tokenizer-revision": "fetch the tokenizer first, and give its folder as --tokenizer",
    "code-revision": "a model's own code is never run",
    "kv-transfer-config": "prefill and decode run in one engine",
    "middleware": "no code is loaded into the server",
    "download-dir": "set HF_HOME, or HF_HUB_CACHE: models are kept in the hub's cache",
    "hf-token": "set HF_TOKEN, or log in with `hf auth login`: other users of the machine see command lines",
    "uvicorn-log-level": "there is one log: use --log-level",
    "max-log-len": "prompts are never logged",
    "headless": "leave it out; nodes with a --node-rank above 0 answer no clients",
}
"""Flags that are refused, and why."""


def accept(spelled: str, name: str, negated: bool, value: str | None) -> bool:
    """Whether `--name` is one of vLLM's and asks for what is so; `value` is None where none was given.

    Raises ConfigError for one that asks for anything else. False: the flag is not known here either.
    """
    if name in UNSUPPORTED:
        raise ConfigError(f"{spelled} is not supported: {UNSUPPORTED[name]}.", param=name)
    if name in ALWAYS:
        if negated and ALWAYS[name]:
            raise ConfigError(f"{spelled} is not possible: {ALWAYS[name]}.", param=name)
        return True
    if name in ONE_VALUE:
        allowed, why = ONE_VALUE[name]
        if value not in allowed:
            raise ConfigError(f"{spelled} can only be {' or '.join(allowed) or 'empty'}: {why}.", param=name)
        return True
    return name in INNER


def check_inner(spelled: str, name: str, values: Sequence[str]) -> None:
    """Raises ConfigError unless `values` are what vLLM would take for `name`, one of INNER."""
    pattern, words = INNER[name]
    if not values:
        raise ConfigError(f"{spelled} needs a value: {words}.", param=name)
    for value in values:
        if not (re.fullmatch(pattern, value) and pattern) and not ("JSON" in words and _is_object(value)):
            raise ConfigError(f"{spelled} is {value!r}; it must be {words}.", param=name)


def _is_object(value: str) -> bool:
    try:
        return isinstance(json.loads(value), dict)
    except ValueError:
        return False
