"""Flags of vLLM that have no setting here: what each of them comes to.

Invariants: none of them is taken in silence where it asks for anything. It asks for what is so already (ALWAYS,
ONE_VALUE), or says how vLLM is to do its work, which is checked, ignored, and said in one line (`vllm_ignored.py`), or
it is an error that says what there is instead (`vllm_refused.py`).
Knows nothing of the settings that there are; see flags.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from stoker_runtime.errors import ConfigError
from stoker_runtime.settings.values import BadValue, switch
from stoker_runtime.settings.vllm_ignored import IGNORED
from stoker_runtime.settings.vllm_refused import SHORT, UNSUPPORTED
from stoker_runtime.settings.vllm_values import Values, decimal, listed, whole

ACTS = (
    *("allow-credentials", "allowed-headers", "allowed-media-domains", "allowed-methods", "allowed-origins"),
    *("api-key", "api-server-count"),
    *("block-size", "chat-template", "config", "data-parallel-size", "device", "disable-cascade-attn"),
    *("disable-custom-all-reduce", "disable-hybrid-kv-cache-manager", "disable-log-requests"),
    *("disable-uvicorn-access-log", "dtype", "enable-auto-tool-choice"),
    *("enable-expert-parallel", "enable-log-requests", "enable-lora"),
    *("enable-prefix-caching", "enable-sleep-mode", "enforce-eager", "generation-config", "gpu-memory-utilization"),
    *("host", "kv-cache-dtype", "kv-events-config", "kv-offloading-size", "language-model-only"),
    *("limit-mm-per-prompt", "lora-modules", "master-addr", "master-port"),
    *("max-cpu-loras", "max-lora-rank", "max-loras", "max-model-len", "max-num-batched-tokens", "max-num-seqs"),
    *("model", "nnodes", "node-rank", "num-gpu-blocks-override", "otlp-traces-endpoint", "override-pooler-config"),
    *("pipeline-parallel-size", "pooler-config", "port", "quantization", "reasoning-parser", "revision", "runner"),
    *("scheduling-policy", "seed", "served-model-name", "speculative-config", "ssl-ca-certs", "ssl-cert-reqs"),
    *("ssl-certfile", "ssl-ciphers", "ssl-keyfile", "swap-space", "task", "tensor-parallel-size", "tokenizer"),
    *("tool-call-parser", "trust-request-chat-template"),
)
"""vLLM's names that settings have here, for the reference; they are read by the table of flags.py alone."""

ALWAYS = {
    "async-scheduling": "steps are always launched one ahead",
    "enable-chunked-prefill": "prompts are always computed in chunks beside running requests",
    "enable-offline-docs": "/docs always answers, without the internet",
    "enable-prompt-tokens-details": "usage always counts cached tokens",
    "enable-request-id-headers": "answers always carry x-request-id",
    "enable-server-load-tracking": "/load always answers",
    "enable-ssl-refresh": "a renewed certificate is always loaded",
    "enable-tokenizer-info-endpoint": "/tokenizer_info always answers",
}
"""Switches that are always on; switching one off is refused with the reason."""

ONE_VALUE = {
    "lora-dtype": (("auto",), "adapters have the model's own type"),
    "load-format": (("auto",), "safetensors and GGUF are told apart by the files"),
    "config-format": (("auto",), "it is told by the files"),
    "tokenizer-mode": (("auto",), "there is one kind of tokenizer"),
    "chat-template-content-format": (("auto", "string"), "templates get parts as one text, or beside images as such"),
    "response-role": (("assistant",), "answers are the assistant's"),
    "max-logprobs": (("20",), "it is what a step has room for"),
    "logprobs-mode": (("raw_logprobs",), "log-probabilities are those of the model, before sampling's parameters"),
    "cpu-offload-gb": (("0",), "weights stay on the device; --cpu-offload-experts moves a mixture's experts"),
    "scheduler-delay-factor": (("0",), "a prompt starts as soon as it fits"),
    "decode-context-parallel-size": (("1",), "a sequence's KV lies whole with each rank of a stage"),
    "prefill-context-parallel-size": (("1",), "a sequence's KV lies whole with each rank of a stage"),
    "kv-offloading-backend": (("native",), "the pool in host memory is the engine's own; --swap-space sizes it"),
    "mamba-cache-dtype": (("auto",), "states have one type"),
    "worker-cls": (("auto",), "no code is loaded into the server"),
    "root-path": (("",), "routes begin at the root; let the proxy cut the prefix off"),
}
"""Flags with the values that they may have: what is so, and vLLM's own default where it makes no difference."""

VARIABLES = {"VLLM_BATCH_INVARIANT": "batch-invariant"}
"""vLLM's variables that say what comes out, and the flag of ours that says it; others are not looked at."""

SPELLINGS = {
    "dtype": {"half": "float16", "float": "float32"},
    "kv-cache-dtype": {"fp8_e4m3": "fp8"},
    "generation-config": {"vllm": "none"},
    "quantization": {"awq_marlin": "awq", "gptq_marlin": "gptq"},
}
"""vLLM's words for values of our own flags."""

TAKEN = (*IGNORED, *ONE_VALUE, *ALWAYS)
"""Flags that may be given, though they are no settings."""

SWITCHES = (*ALWAYS, *(name for name, each in IGNORED.items() if each.values is None))
WORD = tuple(name for name, each in IGNORED.items() if each.values is not None and not each.values.many)
WORDS = tuple(name for name, each in IGNORED.items() if each.values is not None and each.values.many)
"""What follows a flag: nothing, one word that is no flag itself, or all of them up to the next flag."""


def find(spelled: str) -> tuple[str, bool]:
    """The flag of these tables that `--no_some-flag` is, and whether it is negated; "" for none."""
    name = spelled.lstrip("-").replace("_", "-")
    if name in UNSUPPORTED or name in TAKEN:
        return name, False
    plain = name.removeprefix("no-")
    return (plain, True) if plain != name and (plain in SWITCHES or plain in UNSUPPORTED) else ("", False)


def take_words(name: str, rest: list[str]) -> list[str]:
    """The words of `rest` that belong to `--name`, taken out of it."""
    most = 1 if name in ONE_VALUE or name in WORD else len(rest) if name in WORDS else 0
    taken: list[str] = []
    while rest and len(taken) < most and (name in ONE_VALUE or not rest[0].startswith("--")):
        taken.append(rest.pop(0))
    return taken


def accept(spelled: str, name: str, values: Sequence[str], *, negated: bool = False) -> str:
    """What the log has to say of `--name`, which find() found: a line where it is ignored, else "".

    Raises ConfigError for one that asks for what cannot be, and for values that vLLM would not take.
    """
    if name in UNSUPPORTED:
        raise ConfigError(f"{spelled} is not supported: {UNSUPPORTED[name]}.", param=name)
    if name in SWITCHES:
        is_on = _switched(spelled, name, values, negated)
        if name in ALWAYS and not is_on:
            raise ConfigError(f"{spelled} is not possible: {ALWAYS[name]}.", param=name)
    elif name in ONE_VALUE:
        _check_one_value(spelled, name, values)
    else:
        _check(spelled, name, values)
    if name not in IGNORED:
        return ""
    return f"{' '.join((spelled, *values))} is ignored: {IGNORED[name].instead}"


def _switched(spelled: str, name: str, values: Sequence[str], negated: bool) -> bool:
    if not values:
        return not negated
    try:
        if negated or len(values) > 1:
            raise ConfigError(f"{spelled} takes no value.", param=name)
        return switch(values[0])
    except BadValue as error:
        raise ConfigError(f"{spelled} is {values[0]!r}; it takes no value, or {error}.", param=name) from None


def _check_one_value(spelled: str, name: str, values: Sequence[str]) -> None:
    allowed, why = ONE_VALUE[name]
    if len(values) == 1 and (values[0] in allowed or _is_number(values[0], allowed)):
        return
    raise ConfigError(f"{spelled} can only be {listed(allowed) or 'empty'}: {why}.", param=name)


def _is_number(text: str, allowed: Sequence[str]) -> bool:
    """Whether a text is the number that alone is allowed: 0.0 is 0."""
    return not decimal(0).wrong(text) and not whole(0).wrong(allowed[0]) and float(text) == float(allowed[0])


def _check(spelled: str, name: str, values: Sequence[str]) -> None:
    wanted = IGNORED[name].values
    assert isinstance(wanted, Values)
    if not values:
        raise ConfigError(f"{spelled} needs a value: {wanted.words}.", param=name)
    if len(values) > 1 and not wanted.many:
        raise ConfigError(f"{spelled} takes one value: {wanted.words}.", param=name)
    for value in values:
        if wrong := wanted.wrong(value):
            told = wrong.removesuffix("?")
            raise ConfigError(f"{spelled} is {value!r}; it must be {told}{'?' if told != wrong else '.'}", param=name)


def hint(spelled: str, objects: Sequence[str]) -> str:
    """What to write instead of a flag that is not known, in vLLM's own short and dotted spellings; "" for others.

    `objects` are the settings that are JSON objects.
    """
    name, _, key = spelled.lstrip("-").partition(".")
    name = SHORT.get(name, name.replace("_", "-"))
    if re.fullmatch(r"O[0-9]", name):
        return f"; write --{SHORT['O']} {name[1:]}"
    if key and (name in IGNORED or name in UNSUPPORTED or name in objects):
        return f": keys are not given one by one; write --{name} with all of them in one JSON object"
    return f"; write --{name}" if not key and name in SHORT.values() else ""
