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
from functools import cache
from itertools import groupby
from typing import Protocol

from stoker_runtime.models.architectures import ROWS
from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.grouped_rows import Groups, grouped_rows, row_order
from stoker_runtime.models.parameter import Parameter, Role
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.weights.routing import Vocabulary, piece_rows, stored_form, tensor_names

ALIGNMENT = 16
EMBEDDINGS = ("embed", "head")
ADAPTABLE = (
    "qkv", "output", "state_in", "state_gates", "state_out", "gate_up", "down", "shared_gate_up", "shared_down",
)  # fmt: skip
"""Linears of a layer that an adapter may change; routers, and experts that some tokens choose, are none of them."""


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
    """A matrix as the makers of adapters name it, `shape` [N, K], of which these `rows` and `columns` are here.

    `order`: which of `rows` follow each other here, where others do in checkpoints; (): they lie as they are.
    """

    module: str
    shape: tuple[int, int]
    rows: range
    columns: range
    order: tuple[int, ...] = ()

    @property
    def height(self) -> int:
        """Rows that are here."""
        return len(self.order or self.rows)


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
        return tuple(piece.height for piece in self.pieces)

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

    `whole`: of a rank's part, the layout of the model that it is a part of. Modules begin with the first of `bases`;
    some adapters have another one in its place.
    """

    places: tuple[Place, ...]
    line: int
    whole: AdapterLayout | None = None
    bases: tuple[str, ...] = ("",)

    @classmethod
    def of(cls, spec: ModelSpec, *, embeddings: bool, cut: ModelCut | None = None) -> AdapterLayout:
        """The layout for `spec`; with `embeddings` the embedding and the output head have places too.

        `cut` made `spec` of a whole model. Without it a rank's layout has the right sizes, and names of its own.
        """
        whole = cut.whole if cut else spec
        # Rows that lie in groups are not cut into ranks.
        layout = cls._of(spec, whole, embeddings, cut, grouped=spec.part is None)
        return replace(layout, whole=cls._of(whole, whole, embeddings, None, grouped=False)) if cut else layout

    @classmethod
    def _of(
        cls, spec: ModelSpec, whole: ModelSpec, embeddings: bool, cut: ModelCut | None, *, grouped: bool
    ) -> AdapterLayout:
        places: list[Place] = []
        at = 0
        row = ROWS[whole.architecture]
        named = {each.name: each for each in _adaptable(whole, embeddings=embeddings, grouped=grouped)}
        for parameter in _adaptable(spec, embeddings=embeddings, grouped=grouped):
            full = named[cut.whole_name(parameter.name)] if cut else parameter
            pieces = tuple(_pieces(whole, full, cut))
            factor = spec.embedding_multiplier if parameter.role is Role.EMBEDDING else 1.0
            b = at + len(pieces) * _aligned(len(pieces[0].columns))
            places.append(Place(parameter.name, pieces, at, b, factor))
            at = places[-1].end
        bases = (row.modules, row.base) if row.modules and row.modules != row.base else (row.base,)
        return cls(tuple(places), at, None, bases)

    @property
    def model(self) -> AdapterLayout:
        """The layout of the whole model."""
        return self.whole or self

    @property
    def modules(self) -> list[str]:
        """Every module that can be adapted."""
        return list(dict.fromkeys(module for place in self.places for module in place.modules))


def _pieces(whole: ModelSpec, parameter: Parameter, cut: ModelCut | None) -> Iterator[Piece]:
    """The matrices that a parameter of the whole model is made of; `cut` says what of them is here."""
    # A checkpoint's tied head is its embedding, an adapter's is not.
    found = tensor_names(replace(whole, tie_embeddings=False), parameter.name, Vocabulary.HF)
    names = [_module(whole, name) for name in found]
    columns = parameter.shape[1]
    if stored_form(whole, parameter.name, Vocabulary.HF) is Stored.GROUPED:
        tensors = grouped_rows(whole, parameter.name.rpartition(".")[2])
        for tensor, order in _runs(tensors):
            rows = tensors[tensor].rows
            yield Piece(names[tensor], (rows, columns), range(rows), range(columns), order)
        return
    for index, (name, rows) in enumerate(zip(names, piece_rows(whole, parameter, len(names)), strict=True)):
        here = cut.window(parameter, index) if cut else (range(rows), range(columns))
        shape = (rows, columns)
        if parameter.role is Role.EMBEDDING:
            # What A reads of a token is its place in the vocabulary.
            here, shape = here[::-1], shape[::-1]
        yield Piece(name, shape, *here)


@cache
def _runs(tensors: tuple[Groups, ...]) -> list[tuple[int, tuple[int, ...]]]:
    """Neighbouring rows of ours that are of one of the tensors: which it is, and which of its rows they are."""
    places = [(tensor, row) for tensor, each in enumerate(tensors) for row in range(each.rows)]
    rows = (places[row] for row in row_order(tensors))
    return [(tensor, tuple(row for _, row in run)) for tensor, run in groupby(rows, key=lambda place: place[0])]


def _module(spec: ModelSpec, tensor: str) -> str:
    """The module that has a tensor of the checkpoint, as transformers names it."""
    row, name = ROWS[spec.architecture], tensor.removesuffix(".weight")
    return row.modules + name.removeprefix(row.base) if row.modules and name.startswith(row.base) else name


def _adaptable(spec: ModelSpec, *, embeddings: bool, grouped: bool) -> list[Parameter]:
    """The linears of the layers, and the ends of the model: of a tied one both, for adapters tell them apart."""
    shape, part = (spec.vocab_rows, spec.hidden), spec.part
    first = [Parameter("embed", shape, Role.EMBEDDING)] if part is None or part.begins else []
    last = [Parameter("head", shape, Role.HEAD)] if part is None or part.ends else []
    linears = [
        each
        for each in spec.parameters()
        # Rows that take turns in checkpoints would have to be brought into our order in B, too.
        if each.name.rpartition(".")[2] in ADAPTABLE
        and stored_form(spec, each.name, Vocabulary.HF) not in (Stored.PAIRED, *(() if grouped else (Stored.GROUPED,)))
    ]
    return [*first, *linears, *last] if embeddings else linears


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
