"""What `stoker bench drafts` has a real model go on with: source text that is copied, changed or picked from, or new.

Invariants: pure but for `read_sources`; the same text gives the same prompts. Knows nothing of engines.
"""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path

from stoker_runtime.errors import ConfigError
from stoker_runtime.text.tokenizer import Tokenizer

KINDS = ("copied", "renamed", "extracted", "new")
MODULES = ("textwrap", "bisect", "heapq", "shlex", "string", "csv", "queue", "sched")
BEGUN = 40
"""Tokens of a copy that the prompt holds already."""

Prompt = tuple[int, ...]


def read_sources(paths: Sequence[Path]) -> str:
    """The text of these files, or of some of Python's modules. Raises ConfigError naming the flag and the file."""
    found = (importlib.util.find_spec(name) for name in MODULES)
    texts = []
    for path in paths or [Path(spec.origin) for spec in found if spec and spec.origin]:
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path} cannot be read: {error}.", param="text") from error
    return "\n".join(texts)


def real_prompts(kind: str, n: int, length: int, text: str, tokenizer: Tokenizer) -> list[Prompt]:
    """`n` prompts of about `length` tokens from other places of `text`. Raises ConfigError for too short a text."""
    lines = text.splitlines()
    step = max(1, len(lines) // (n + 1))
    prompts = []
    for i in range(n):
        piece = tokenizer.decode(tokenizer.encode("\n".join(lines[i * step :]))[:length])
        if len(tokenizer.encode(piece)) < length // 2:
            raise ConfigError(f"--text is too short for {n} prompts of {length} tokens.", param="text")
        prompts.append(tuple(tokenizer.encode(_asked(kind, piece, tokenizer))))
    return prompts


def _asked(kind: str, piece: str, tokenizer: Tokenizer) -> str:
    if kind == "new":
        return piece
    if kind == "extracted":
        lines = [line for line in piece.splitlines() if line.strip()]
        return "\n".join(f"{i}: {line}" for i, line in enumerate(lines)) + "\n\nThe lines in their order:\n0: "
    told, copy = "The same text again", piece
    if kind == "renamed":
        words = [word for word in piece.split() if word.isidentifier() and len(word) > 3]
        old = statistics.mode(words) if words else "self"
        told, copy = f"The same text with {old} renamed to {old}_2", piece.replace(old, f"{old}_2")
    begun = tokenizer.decode(tokenizer.encode(copy)[:BEGUN])
    return f"```\n{piece}\n```\n\n{told}:\n\n```\n{begun}"
