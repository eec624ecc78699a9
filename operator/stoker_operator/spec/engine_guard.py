"""What a spec may not tell the engine by `runtime.args` and `runtime.env`: what the operator tells it, and what the
engine would not start with.

Invariants: names are compared as the engine reads them, never as they are spelled. The CRD refuses protected names with
the patterns below, before anything is stored; what is spelled so that only a parser can tell (a word too much, a typo)
is refused when the operator parses. A typo is only known for the engine of this version: with an image of its own a
service may have flags that this one lacks.
Knows nothing of the flags' values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker_operator.spec.engine_arguments import VARIABLES, is_unknown_variable, nearest, read, variable
from stoker_operator.spec.engine_table import ALIASES, SETTINGS, SWITCHES, VLLM_UNSUPPORTED

_ADAPTERS = "set model.adapters"
_TLS = "set endpoint.podTLS"
_NODES = "set resources.nodes"
# By which the nodes of a group know each other: no flag says it.
NODE_SECRET = "STOKER_NODE_SECRET"
PROTECTED: Mapping[str, str] = {
    "host": "the operator sets it",
    "port": "the operator sets it; endpoint.port is clients'",
    "model": "it is what spec.model names",
    "revision": "set model.revision; pods serve what was fetched of it",
    "served-model-name": "set model.servedNames",
    "max-model-len": "set runtime.contextLength",
    "max-num-seqs": "set runtime.maxConcurrency",
    "drain-seconds": "set drain.timeout",
    "api-key": "a key never goes into a manifest; set endpoint.auth.apiKeysSecretRef",
    "api-key-file": "set endpoint.auth.apiKeysSecretRef",
    "rate-limit-requests-per-minute": "set endpoint.rateLimit.requestsPerMinute",
    "rate-limit-tokens-per-minute": "set endpoint.rateLimit.tokensPerMinute",
    "quantization": "set spec.model.quantization",
    "isq": "set spec.model.quantization to FP8, W4, Q8_0 or Q4K",
    "kv-cache-dtype": "set model.kvCacheDtype",
    "tensor-parallel-size": "set parallelism.tensor",
    "pipeline-parallel-size": "set parallelism.pipeline",
    "enable-expert-parallel": "set parallelism.expert",
    "data-parallel-size": "set parallelism.data",
    "nnodes": _NODES,
    "node-rank": _NODES,
    "master-addr": _NODES,
    "master-port": _NODES,
    "node-join-seconds": _NODES,
    "node-secret-file": _NODES,
    "enable-lora": _ADAPTERS,
    "lora-modules": _ADAPTERS,
    "lora-modules-file": _ADAPTERS,
    "allow-runtime-lora-updating": "it would let clients name any folder of the pod; set model.adapters",
    "config": "a file's settings would not be seen; give them as runtime.args",
    "ssl-certfile": _TLS,
    "ssl-keyfile": _TLS,
    "ssl-ca-certs": _TLS,
    "ssl-cert-reqs": _TLS,
    "ssl-probes-without-cert": _TLS,
}
"""Settings of the engine that are the operator's, each with what to do instead."""
NEUTRAL: Mapping[str, str] = {
    "max-model-len": "0",
    "max-num-seqs": "0",
    "quantization": "auto",
    "isq": "none",
    "kv-cache-dtype": "auto",
    "tensor-parallel-size": "1",
    "pipeline-parallel-size": "1",
    "enable-expert-parallel": "false",
    "data-parallel-size": "1",
    "nnodes": "1",
    "node-rank": "0",
    "master-addr": "",
    "master-port": "29501",
    "node-join-seconds": "1800",
    "node-secret-file": "",
    "enable-lora": "false",
    "lora-modules": "",
    "lora-modules-file": "",
    "allow-runtime-lora-updating": "false",
    "config": "",
    "revision": "",
    "api-key-file": "",
    "rate-limit-requests-per-minute": "0",
    "rate-limit-tokens-per-minute": "0",
    "ssl-certfile": "",
    "ssl-keyfile": "",
    "ssl-ca-certs": "",
    "ssl-cert-reqs": "0",
    "ssl-probes-without-cert": "false",
}
"""Those that the operator may leave unsaid, as they are then: a variable of a whole Secret or ConfigMap must not set
them. The operator's own flags come before any variable."""
_SPELLINGS = sorted({
    *PROTECTED,
    *(alias for alias, name in ALIASES.items() if name in PROTECTED),
    *(f"no-{name}" for name in SWITCHES if name in PROTECTED),
})  # fmt: skip
FLAG_PATTERN = f"^-+({'|'.join(name.replace('-', '[-_]') for name in _SPELLINGS)})(=|$)"
_VARIABLES = [variable(name) for name in sorted(PROTECTED) if name != "api-key"]
VARIABLE_PATTERN = f"^(HOME|HF_TOKEN|{NODE_SECRET}|{'|'.join(_VARIABLES)})$"


def says(name: str, args: Sequence[str]) -> bool:
    """Whether the arguments give the engine this setting."""
    return any(each.ours and each.name == name for each in read(args))


def problems(args: Sequence[str], env: Sequence[Mapping[str, Any]], *, own_image: bool) -> Iterator[str]:
    """A sentence for each argument and variable that is refused."""
    for each in read(args):
        where = f"spec.runtime.args[{each.index}]: {each.spelled!r}"
        if each.name in PROTECTED and each.ours:
            why = PROTECTED[each.name]
            if each.name == "model" and not each.spelled.startswith("-"):
                why = "it belongs to no flag"
            yield f"{where} is not allowed: {why}"
        elif each.name in VLLM_UNSUPPORTED and not own_image:
            yield f"{where} is not supported by the engine"
        elif not each.name and not own_image:
            yield f"{where} is no flag of the engine{nearest(each.spelled, (f'--{name}' for name in SETTINGS))}"
    for index, entry in enumerate(env):
        name = str(entry.get("name", ""))
        where = f"spec.runtime.env[{index}].name: {name!r}"
        if re.search(VARIABLE_PATTERN, name):
            yield f"{where} is not allowed: {PROTECTED.get(VARIABLES.get(name, ''), 'the operator sets it')}"
        elif name == variable("api-key") and "value" in entry:
            yield f"{where} is not allowed: {PROTECTED['api-key']}"
        elif is_unknown_variable(name) and not own_image:
            yield f"{where} is no variable of the engine{nearest(name, VARIABLES)}"
