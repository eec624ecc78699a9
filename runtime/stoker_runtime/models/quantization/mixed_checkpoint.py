"""A checkpoint whose layers are quantized in several schemes: which module has which, and how a matrix that is made of
several modules' weights rests.

Invariants: frozen plain data, torch-free. What a matrix rests in holds the weights of all its modules without loss.
Knows nothing of tensors, nor of how a configuration says so (`mixed_settings.py`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from stoker_runtime.errors import ModelError
from stoker_runtime.models.quantization.fp4_checkpoint import Fp4Checkpoint
from stoker_runtime.models.quantization.fp8_checkpoint import Fp8Checkpoint
from stoker_runtime.models.quantization.int8_checkpoint import Int8Checkpoint
from stoker_runtime.models.quantization.integer_checkpoint import IntegerCheckpoint
from stoker_runtime.models.quantization.integer_scheme import common
from stoker_runtime.models.quantization.module_names import is_matched

OneCheckpoint = Fp8Checkpoint | Int8Checkpoint | IntegerCheckpoint | Fp4Checkpoint
Pieces = tuple[OneCheckpoint, ...]
"""In which scheme each weight is that a matrix is made of: one for all, or one for each; none: in 16 or 32 bits."""


@dataclass(frozen=True, slots=True)
class MixedCheckpoint:
    """`parts` are the schemes, of which rules have the number; None: not quantized.

    Of `ignored` modules none is quantized. Others go by their full names (`named`; with `within` by those of what they
    are part of, too), then by the first of `patterns` that matches from the beginning of their names, else by `rest`.
    `single`: two patterns that give a module different schemes are an error.
    """

    method: str
    parts: Pieces
    named: Mapping[str, int] = field(default_factory=dict, hash=False)
    patterns: tuple[tuple[str, int | None], ...] = ()
    rest: int | None = None
    ignored: tuple[str, ...] = ()
    within: bool = False
    single: bool = False

    @property
    def described(self) -> str:
        """What its weights are, in words."""
        return ", ".join(dict.fromkeys(scheme_words(part) for part in self.parts))

    @property
    def note(self) -> str:
        """What of the checkpoint is not used."""
        return " and ".join(dict.fromkeys(part.note for part in self.parts if part.note))

    def of(self, module: str) -> OneCheckpoint | None:
        """The scheme of `module` (`model.layers.0.mlp.up_proj`). Raises ModelError where two patterns disagree."""
        if any(is_matched(pattern, module) for pattern in self.ignored):
            return None
        found = self._number(module)
        return None if found is None else self.parts[found]

    def _number(self, module: str) -> int | None:
        name = module
        while name:
            if name in self.named:
                return self.named[name]
            name = name.rpartition(".")[0] if self.within else ""
        matching = [(pattern, part) for pattern, part in self.patterns if re.match(pattern, module)]
        if self.single and len({part for _, part in matching}) > 1:
            patterns = ", ".join(pattern for pattern, _ in matching)
            raise ModelError(
                f"quantization_config gives {module} several schemes, by the patterns {patterns}; it must be one.",
                param="quantization_config",
            )
        return matching[0][1] if matching else self.rest


def scheme_words(part: OneCheckpoint) -> str:
    """A scheme in words, by which it is told from others of the same checkpoint."""
    if isinstance(part, IntegerCheckpoint):
        scheme = part.scheme
        return f"{part.described} in {scheme.grouping}{' with act-order' if scheme.order else ''}"
    return f"{part.described} by blocks" if part.kind == "fp8_block" else part.described


def alike(one: OneCheckpoint, other: OneCheckpoint) -> bool:
    """Whether weights of both rest in one matrix as they are."""
    return (one.kind, one.scheme) == (other.kind, other.scheme)


def resting(pieces: Pieces) -> OneCheckpoint:
    """How a matrix of these pieces rests; of integers in several schemes, in one that holds all of them exactly."""
    first = pieces[0]
    if not isinstance(first, IntegerCheckpoint):
        return first
    return replace(first, scheme=common([each.scheme for each in pieces if isinstance(each, IntegerCheckpoint)]))


def counted(matrices: Iterable[Pieces]) -> str:
    """How many matrices rest in which scheme, in words: most of them first."""
    found = Counter(scheme_words(resting(pieces)) if pieces else "" for pieces in matrices)
    dense = found.pop("", 0)
    parts = [f"{count} matrices in {words}" for words, count in found.most_common()]
    return ", ".join([*parts, *([f"{dense} not quantized"] if dense else [])])
