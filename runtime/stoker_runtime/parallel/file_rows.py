"""Which rows of a checkpoint's tensors are a rank's: those that become rows of its part of a parameter.

A tensor may be one of a parameter's pieces, several of them one behind the other, or groups with a part of each. What
a rank takes of it, in the order of the file, is laid out as the whole's is: the loader of its part finds what it knows.

Invariants: torch-free and pure. Rows that follow each other are one range.
Knows nothing of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from stoker_runtime.checkpoint.tensor_entry import TensorEntry
from stoker_runtime.models.architectures.row import Stored
from stoker_runtime.models.grouped_rows import Groups, grouped_rows
from stoker_runtime.models.parameter import Parameter
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.place import Place
from stoker_runtime.parallel.windows import field_of, row_pieces
from stoker_runtime.weights.routing import Vocabulary, piece_rows, state_parts, stored_form, tensor_names

Rows = tuple[int, list[range]]
"""How many rows a tensor has, and which of them are the rank's."""


def file_rows(
    whole: ModelSpec, place: Place, parameter: Parameter, vocabulary: Vocabulary, entries: Mapping[str, TensorEntry]
) -> dict[str, Rows]:
    """Of each tensor that a whole parameter, other than of experts, is made of: its rows, and the rank's.

    The names are those of the whole model's layer, and `entries` what its checkpoint holds.
    """
    mine = list(_final_rows(row_pieces(whole, place, parameter)))
    names = tensor_names(whole, parameter.name, vocabulary)
    stored = stored_form(whole, parameter.name, vocabulary)
    if stored is Stored.PAIRED:
        # Gate and up take turns, so the rank's units are neighbours.
        units = mine[0]
        return {names[0]: (parameter.shape[0], [range(2 * units.start, 2 * units.stop)])}
    parts = state_parts(parameter.name, entries) if vocabulary is Vocabulary.GGUF else ()
    if stored is Stored.GROUPED or parts:
        groups = grouped_rows(whole, field_of(parameter.name))
        tensors: list[list[range]] = [list(_of_groups(each)) for each in groups]
        if parts and whole.recurrent is not None:
            state, names = whole.recurrent, (*parts, *names[1:])
            channels = range(state.channels)
            tensors[:1] = [[channels], [range(channels.stop, channels.stop + state.inner)]]
    else:
        tensors = [[each] for each in _behind_each_other(piece_rows(whole, parameter, len(names)))]
    return {
        name: (sum(map(len, spans)), merged(_found(spans, mine))) for name, spans in zip(names, tensors, strict=True)
    }


def _final_rows(pieces: Iterable[tuple[int, range]]) -> Iterator[range]:
    """The rank's rows of a whole parameter, piece by piece."""
    at = 0
    for rows, window in pieces:
        yield range(at + window.start, at + window.stop)
        at += rows


def _of_groups(groups: Groups) -> Iterator[range]:
    """Where the rows of a tensor in groups stand in the parameter, in the order of the file."""
    for group in range(groups.count):
        for start, rows in zip(groups.starts, groups.sizes, strict=True):
            yield range(start + group * rows, start + (group + 1) * rows)


def _behind_each_other(sizes: Iterable[int]) -> Iterator[range]:
    at = 0
    for rows in sizes:
        yield range(at, at + rows)
        at += rows


def _found(spans: Iterable[range], mine: list[range]) -> Iterator[range]:
    """Which rows of a tensor, whose rows stand at `spans` of the parameter, are among `mine`."""
    at = 0
    for span in spans:
        for each in mine:
            first, last = max(span.start, each.start), min(span.stop, each.stop)
            if first < last:
                yield range(at + first - span.start, at + last - span.start)
        at += len(span)


def merged(spans: Iterable[range]) -> list[range]:
    """The same rows, neighbours as one range."""
    found: list[range] = []
    for span in spans:
        if found and found[-1].stop == span.start:
            found[-1] = range(found[-1].start, span.stop)
        else:
            found.append(span)
    return found
