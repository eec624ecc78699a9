"""The catalog of presets: InferenceServices that are ready to apply, with the facts by which they were chosen.

Invariants: a preset is a whole manifest; its facts are annotations under `PREFIX`; a file that lacks one is refused.
Knows nothing of clusters.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stoker_operator.plugin.errors import PluginError
from stoker_operator.spec.service import InferenceService, parse

PREFIX = "presets.stoker.dev/"
_NUMBERS = {
    "weights-bytes": "bytes", "layers": "layers", "kv-heads": "kv_heads", "head-dim": "head_dim",
    "max-context": "max_context",
}  # fmt: skip
# In a checkout the catalog lies where people look for it; a wheel brings it beside its packages.
_HOMES = (Path(__file__).parents[3] / "crds" / "presets", Path(sys.prefix) / "share" / "stoker" / "presets")


@dataclass(frozen=True, slots=True)
class Preset:
    """One preset. `facts` are fields of a FetchedModel; `taken`: bytes of the weights as it quantizes them, 0 where
    nobody says; `measured` says what was measured and where, "" = nothing.
    """

    text: str
    manifest: Mapping[str, Any]
    service: InferenceService
    facts: Mapping[str, int]
    title: str
    measured: str
    taken: int = 0

    @property
    def name(self) -> str:
        """What people call it."""
        return self.service.name

    def serves(self, other: InferenceService) -> bool:
        """Whether another service serves the same files, so that the facts are its as well."""
        mine, its = self.service.model, other.model
        return (mine.uri, mine.revision, mine.allow, mine.ignore) == (its.uri, its.revision, its.allow, its.ignore)


def catalog() -> list[Preset]:
    """All presets, by name. Raises PluginError where they are not installed."""
    home = next((folder for folder in _HOMES if folder.is_dir()), None)
    if home is None:
        raise PluginError("the catalog of presets is not installed; reinstall the package.")
    return [read(file.read_text(encoding="utf-8")) for file in sorted(home.glob("*.yaml"))]


def read(text: str) -> Preset:
    """A preset from its file. Raises SpecError for no InferenceService, KeyError where a fact is missing."""
    manifest = yaml.safe_load(text)
    notes = manifest["metadata"]["annotations"]
    facts = {field: int(notes[PREFIX + key]) for key, field in _NUMBERS.items()}
    measured = str(notes.get(f"{PREFIX}measured", ""))
    service = parse(manifest)
    # Of 16 bits that stay so the files tell.
    kept = service.model.quantization == "Auto" and not any(name.endswith(".gguf") for name in service.model.allow)
    taken = int(notes.get(f"{PREFIX}quantized-bytes", facts["bytes"] if kept else 0))
    return Preset(text, manifest, service, facts, str(notes[f"{PREFIX}title"]), measured, taken)


def named(name: str, presets: Sequence[Preset]) -> Preset:
    """The preset of this name. Raises PluginError with the names there are."""
    found = next((preset for preset in presets if preset.name == name), None)
    if found is None:
        raise PluginError(f"there is no preset {name!r}; there is {', '.join(preset.name for preset in presets)}.")
    return found
