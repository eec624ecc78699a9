"""Flags of vLLM that have no setting here: those that say what Stoker does anyway, and those that it cannot do.

Invariants: none of them is taken in silence where it would change something: either it asks for what is so already,
or it is an error that says why.
Knows nothing of the settings that there are; see flags.py.
"""

from __future__ import annotations

from stoker_runtime.errors import ConfigError

ALWAYS = {
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
    "pipeline-parallel-size": ("1", "a model runs in one piece"),
    "data-parallel-size": ("1", "start several servers, or several replicas of an InferenceService"),
    "load-format": ("auto", "safetensors and GGUF are told apart by the files"),
    "tokenizer-mode": ("auto", "there is one kind of tokenizer"),
    "chat-template-content-format": ("auto", "it is read off the template"),
    "cpu-offload-gb": ("0", "weights stay on the device"),
    "root-path": ("", "routes begin at the root; let the proxy cut the prefix off"),
}
"""Flags with the one value that they may have."""

UNSUPPORTED = {
    "enable-lora": "LoRA adapters are not served yet",
    "lora-modules": "LoRA adapters are not served yet",
    "speculative-config": "speculative decoding is not there yet",
    "num-speculative-tokens": "speculative decoding is not there yet",
    "rope-scaling": "it is read from the model's configuration; change it there",
    "hf-overrides": "the model's configuration is used as it is; change it there",
    "limit-mm-per-prompt": "models take text only",
    "kv-transfer-config": "prefill and decode run in one engine",
    "middleware": "no code is loaded into the server",
    "download-dir": "fetch the model first: stoker fetch",
    "revision": "fetch the model first: stoker fetch URI@REVISION",
    "hf-token": "fetch the model first: stoker fetch, with HF_TOKEN in the environment",
    "uvicorn-log-level": "there is one log: use --log-level",
    "max-log-len": "prompts are never logged",
    "otlp-traces-endpoint": "traces are not sent yet",
    "headless": "a model runs on one machine",
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
        only, why = ONE_VALUE[name]
        if value != only:
            raise ConfigError(f"{spelled} can only be {only or 'empty'}: {why}.", param=name)
        return True
    return False
