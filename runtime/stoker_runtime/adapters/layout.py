"""Where an adapter's matrices lie: one line of memory a rank, with a place for each linear that can be adapted.

A line holds, for every linear, a row of each piece's A and a column of B. So an adapter of rank r fills the first r
lines of its slot, one block to copy, and a lower rank costs no more than its own bytes.

Invariants: torch-free arithmetic over the spec; places do not overlap and begin at multiples of ALIGNMENT elements.
Knows nothing of files and devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.parameter import Parameter, Role
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.routing import Vocabulary, piece_rows, stored_form, tensor_names

ALIGNMENT = 16
EMBEDDINGS = ("embed", "head")
ADAPTABLE = ("qkv", "output", "gate_up", "down")
"""Linears of a layer that an adapter may change; experts, and those that all tokens share, are none of them."""


@dataclass(frozen=True, slots=True)
class Place:
    """One linear `[N, K]` of the model. `modules` are its pieces as checkpoints name them, `rows` how many each has.

    `a` and `b` are offsets within a line; rows of A are `width` apart. Of the embedding, K is the vocabulary. What the
    model multiplies the linear's result with afterwards is a `factor` of B.
    """

    name: str
    modules: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int
    a: int
    b: int
    factor: float = 1.0

    @property
    def width(self) -> int:
        """Elements from one piece's row of A to the next one's."""
        return _aligned(self.columns)

    @property
    def end(self) -> int:
        """Where the next place begins."""
        return self.b + _aligned(sum(self.rows))


@dataclass(frozen=True, slots=True)
class AdapterLayout:
    """The places of one model, in the order of its parameters, and the elements of a line."""

    places: tuple[Place, ...]
    line: int

    @classmethod
    def of(cls, spec: ModelSpec, *, embeddings: bool) -> AdapterLayout:
        """The layout for `spec`; with `embeddings` the embedding and the output head have places too."""
        places: list[Place] = []
        at = 0
        apart = replace(spec, tie_embeddings=False)  # a checkpoint's tied head is its embedding, an adapter's is not
        for parameter in _adaptable(spec, embeddings=embeddings):
            names = tensor_names(apart, parameter.name, Vocabulary.HF)
            modules = tuple(name.removesuffix(".weight") for name in names)
            rows, columns = piece_rows(spec, parameter, len(modules)), parameter.shape[1]
            factor = 1.0
            if parameter.role is Role.EMBEDDING:
                rows, columns, factor = (parameter.shape[1],), parameter.shape[0], spec.embedding_multiplier
            b = at + len(modules) * _aligned(columns)
            places.append(Place(parameter.name, modules, rows, columns, at, b, factor))
            at = places[-1].end
        return cls(tuple(places), at)

    @property
    def modules(self) -> list[str]:
        """Every module that can be adapted."""
        return [module for place in self.places for module in place.modules]


def _adaptable(spec: ModelSpec, *, embeddings: bool) -> list[Parameter]:
    """The linears of the layers, and the ends of the model: of a tied one both, for adapters tell them apart."""
    ends = {
        "embed": Parameter("embed", (spec.vocab, spec.hidden), Role.EMBEDDING),
        "head": Parameter("head", (spec.vocab, spec.hidden), Role.HEAD),
    }
    linears = [
        each
        for each in spec.parameters()
        # Rows that lie otherwise in checkpoints would have to be brought into our order in B, too.
        if each.name.rpartition(".")[2] in ADAPTABLE
        and stored_form(spec, each.name, Vocabulary.HF) is not Stored.BY_KV_HEAD
    ]
    return [ends["embed"], *linears, ends["head"]] if embeddings else linears


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
