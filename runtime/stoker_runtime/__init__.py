"""Stoker's runtime: the inference engine and its OpenAI API server. Never imports kopf or kubernetes.

`from stoker_runtime import LLM, SamplingParams` is the Python interface; importing the package alone imports nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker_runtime.llm import LLM
    from stoker_runtime.llm_output import Completion, Delta, Output
    from stoker_runtime.llm_params import SamplingParams

__all__ = ["LLM", "Completion", "Delta", "Output", "SamplingParams"]

_HOMES = {
    "LLM": "stoker_runtime.llm",
    "Completion": "stoker_runtime.llm_output",
    "Delta": "stoker_runtime.llm_output",
    "Output": "stoker_runtime.llm_output",
    "SamplingParams": "stoker_runtime.llm_params",
}


def __getattr__(name: str) -> object:
    """Import a public name where it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    return value
