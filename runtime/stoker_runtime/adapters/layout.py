"""Where an adapter's matrices lie: one line of memory a rank, with a place for each linear that can be adapted.

A line holds, for every linear, a row of each piece's A and a column of B. So an adapter of rank r fills the first r
lines of its slot, one block to copy, and a lower rank costs no more than its own bytes.

Of several ranks each has the rows of B of its heads and units, and the columns of A of what it reads; the other matrix
of each is whole. So what is added to its part of a product is a part, too, and the sum over the ranks counts both.

Invariants: torch-free arithmetic over the spec; places do not overlap and begin at multiples of ALIGNMENT elements.
Knows nothing of files and devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.parameter import Parameter, Role
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.routing import Vocabulary, piece_rows, stored_form, tensor_names

ALIGNMENT = 16
EMBEDDINGS = ("embed", "head")
ADAPTABLE = ("qkv", "output", "gate_up", "down")
"""Linears of a layer that an adapter may change; experts, and those that all tokens share, are none of them."""


class ModelCut(Protocol):
    """A rank's part of the model `whole`."""

    whole: ModelSpec

    def whole_name(self, parameter: str) -> str:
        """The name in the whole model of a parameter of the rank's."""
        ...

    def window(self, parameter: Parameter, piece: int) -> tuple[range, range]:
        """The rank's rows and columns of piece `piece` of the whole model's `parameter`."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """A matrix as checkpoints name it, `shape` [N, K], of which these `rows` and `columns` are here."""

    module: str
    shape: tuple[int, int]
    rows: range
    columns: range


@dataclass(frozen=True, slots=True)
class Place:
    """One linear `[N, K]` of the model, of `pieces` one upon the other.

    `a` and `b` are offsets within a line; rows of A are `width` apart. Of the embedding, K is the vocabulary. What the
    model multiplies the linear's result with afterwards is a `factor` of B.
    """

    name: str
    pieces: tuple[Piece, ...]
    a: int
    b: int
    factor: float = 1.0

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of its pieces."""
        return tuple(piece.module for piece in self.pieces)

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows each piece has here."""
        return tuple(len(piece.rows) for piece in self.pieces)

    @property
    def columns(self) -> int:
        """How many columns there are here: of all pieces the same."""
        return len(self.pieces[0].columns)

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
    """The places of one model, in the order of its parameters, and the elements of a line.

    `whole`: of a rank's part, the layout of the model that it is a part of.
    """

    places: tuple[Place, ...]
    line: int
    whole: AdapterLayout | None = None

    @classmethod
    def of(cls, spec: ModelSpec, *, embeddings: bool, cut: ModelCut | None = None) -> AdapterLayout:
        """The layout for `spec`; with `embeddings` the embedding and the output head have places too.

        `cut` made `spec` of a whole model. Without it a rank's layout has the right sizes, and names of its own.
        """
        places: list[Place] = []
        at = 0
        whole = cut.whole if cut else spec
        named = {each.name: each for each in _adaptable(whole, embeddings=embeddings)}
        for parameter in _adaptable(spec, embeddings=embeddings):
            full = named[cut.whole_name(parameter.name)] if cut else parameter
            pieces = tuple(_pieces(whole, full, cut))
            factor = spec.embedding_multiplier if parameter.role is Role.EMBEDDING else 1.0
            b = at + len(pieces) * _aligned(len(pieces[0].columns))
            places.append(Place(parameter.name, pieces, at, b, factor))
            at = places[-1].end
        return cls(tuple(places), at, cls.of(whole, embeddings=embeddings) if cut else None)

    @property
    def model(self) -> AdapterLayout:
        """The layout of the whole model."""
        return self.whole or self

    @property
    def modules(self) -> list[str]:
        """Every module that can be adapted."""
        return [module for place in self.places for module in place.modules]


def _pieces(whole: ModelSpec, parameter: Parameter, cut: ModelCut | None) -> Iterator[Piece]:
    """The matrices that a parameter of the whole model is made of; `cut` says what of them is here."""
    # A checkpoint's tied head is its embedding, an adapter's is not.
    names = tensor_names(replace(whole, tie_embeddings=False), parameter.name, Vocabulary.HF)
    columns = parameter.shape[1]
    for index, (name, rows) in enumerate(zip(names, piece_rows(whole, parameter, len(names)), strict=True)):
        here = cut.window(parameter, index) if cut else (range(rows), range(columns))
        shape = (rows, columns)
        if parameter.role is Role.EMBEDDING:
            # What A reads of a token is its place in the vocabulary.
            here, shape = here[::-1], shape[::-1]
        yield Piece(name.removesuffix(".weight"), shape, *here)


def _adaptable(spec: ModelSpec, *, embeddings: bool) -> list[Parameter]:
    """The linears of the layers, and the ends of the model: of a tied one both, for adapters tell them apart."""
    shape, part = (spec.vocab_rows, spec.hidden), spec.part
    first = [Parameter("embed", shape, Role.EMBEDDING)] if part is None or part.begins else []
    last = [Parameter("head", shape, Role.HEAD)] if part is None or part.ends else []
    linears = [
        each
        for each in spec.parameters()
        # Rows that lie otherwise in checkpoints would have to be brought into our order in B, too.
        if each.name.rpartition(".")[2] in ADAPTABLE
        and stored_form(spec, each.name, Vocabulary.HF) not in (Stored.GROUPED, Stored.PAIRED)
    ]
    return [*first, *linears, *last] if embeddings else linears


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
