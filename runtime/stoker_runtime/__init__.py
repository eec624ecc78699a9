"""Stoker's runtime: the inference engine and its OpenAI API server. Never imports kopf or kubernetes.

`from stoker_runtime import LLM, SamplingParams` is the Python interface; importing the package alone imports nothing.
A request enters the rooms in this order: `serve/` → `api/` → `text/` → `engine/` → `scheduler/` → `executor/` →
`models/` → `sampling/`; ARCHITECTURE.md draws the floors. In the root lie what a user imports, the entry point, and the
vocabulary of all rooms (`request.py`, `config.py`, `errors.py`, `metrics.py`). A new room goes onto a floor of the
contract in pyproject.toml.
Must never know: Kubernetes, and who started it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_runtime.inputs import PromptType, TextPrompt, TokensPrompt
    from stoker_runtime.offline.batched_sampling import sample
    from stoker_runtime.offline.llm import LLM
    from stoker_runtime.offline.lora import LoRARequest
    from stoker_runtime.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        CompletionOutput,
        Delta,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from stoker_runtime.sampling_params import (
        BeamSearchParams,
        GuidedDecodingParams,
        PoolingParams,
        SamplingParams,
        StructuredOutputsParams,
    )

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Delta",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "PoolingParams",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "sample",
]

_MODULES = {
    "stoker_runtime.offline.batched_sampling": ("sample",),
    "stoker_runtime.inputs": ("PromptType", "TextPrompt", "TokensPrompt"),
    "stoker_runtime.offline.llm": ("LLM",),
    "stoker_runtime.offline.lora": ("LoRARequest",),
    "stoker_runtime.sampling_params": (
        "BeamSearchParams",
        "GuidedDecodingParams",
        "PoolingParams",
        "SamplingParams",
        "StructuredOutputsParams",
    ),
}
_HOMES = dict.fromkeys(__all__, "stoker_runtime.outputs") | {
    name: module for module, names in _MODULES.items() for name in names
}


def __getattr__(name: str) -> object:
    """Import a public name where it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    return value
