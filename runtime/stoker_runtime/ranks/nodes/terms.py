"""What nodes must have alike to run one model together, as words that can be compared.

The model is told by its configuration, and by the names and sizes of the files of its weights: their folders may differ
from node to node.

Invariants: reads no weights. Nothing secret is in it.
Knows nothing of connections.
"""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

from stoker_runtime.checkpoint.gguf_split import part_names
from stoker_runtime.config import EngineConfig
from stoker_runtime.version import VERSION

OWN = {
    *("model", "tokenizer", "revision", "cpu_threads"),
    *("node_rank", "master_addr", "master_port", "node_secret_file", "node_join_seconds"),
}
"""Settings that each node may have as it likes."""
PROGRAM, FILES = "version", "the model's files"
WEIGHTS = (".safetensors", ".gguf")
DESCRIBING = ("config.json", "model.safetensors.index.json", "stoker-manifest.json")


def terms_of(config: EngineConfig) -> dict[str, str]:
    """What this node has, by name."""
    names = [field.name for field in dataclasses.fields(config) if field.name not in OWN]
    return {
        PROGRAM: VERSION,
        FILES: fingerprint(config.model),
        **{name: str(getattr(config, name)) for name in names},
    }


def difference(mine: dict[str, str], theirs: dict[str, str]) -> str:
    """The first thing in which node 0, which has `mine`, and another differ, and what to do; "" for none."""
    for name in mine:
        if theirs.get(name) == mine[name]:
            continue
        if name == PROGRAM:
            return f"it runs stoker {theirs.get(name)}, and node 0 runs {mine[name]}; run one version on all nodes"
        if name == FILES:
            return f"its model is another one: {FILES} are {theirs.get(name)}, and node 0's {mine[name]}"
        flag = f"--{name.replace('_', '-')}"
        return f"its {name} is {theirs.get(name)}, and node 0's {mine[name]}; give all nodes the same {flag}"
    return ""


def fingerprint(model: str) -> str:
    """A model as words: the same for the same files, wherever they lie. Of `shape:NAME` the name."""
    path = Path(model.removeprefix("shape:"))
    files = files_of(path)
    if not files:
        return model
    digest = hashlib.sha256()
    total = 0
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        if file.name in DESCRIBING:
            digest.update(file.read_bytes())
        else:
            total += size
    return f"{total:,} bytes, {digest.hexdigest()[:16]}"


def files_of(path: Path) -> list[Path]:
    """The files that say what a model is, and hold its weights, in order."""
    if path.is_dir():
        return sorted(each for each in path.iterdir() if each.suffix in WEIGHTS or each.name in DESCRIBING)
    parts = [path.with_name(name) for name in part_names(path.name)] or [path]
    return [part for part in parts if part.is_file()]
