"""Tensors whose rows lie in groups, a head's part of one thing beside its part of the next, and where each part goes.

Invariants: plain arithmetic on a spec, without torch. The parts of all tensors of a field fill its rows once.
Knows nothing of names and files.
"""

from __future__ import annotations

from dataclasses import dataclass

from stoker_runtime.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Groups:
    """One tensor: `count` groups; of each the `sizes` rows of its parts, part p of group g to `starts[p] + g·sizes[p]`.
    """

    count: int
    sizes: tuple[int, ...]
    starts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows of the tensor."""
        return self.count * sum(self.sizes)


def grouped_rows(spec: ModelSpec, field: str) -> tuple[Groups, ...]:
    """The tensors of `field`, in the order of their names."""
    if field in ("qkv", "qkv_bias") and not spec.attention_gate:
        # Of each KV head its queries, its key and its value.
        queries = spec.heads // spec.kv_heads * spec.head_dim
        starts = (0, spec.q_size, spec.q_size + spec.kv_size)
        return (Groups(spec.kv_heads, (queries, spec.head_dim, spec.head_dim), starts),)
    if field == "qkv":
        # Queries with a gate, head by head; keys; values. The gates stand last.
        gates = spec.q_size + 2 * spec.kv_size
        return (
            Groups(spec.heads, (spec.head_dim, spec.head_dim), (0, gates)),
            Groups(1, (spec.kv_size,), (spec.q_size,)),
            Groups(1, (spec.kv_size,), (spec.q_size + spec.kv_size,)),
        )
    state = spec.recurrent
    assert state is not None, f"no rows of {field} are grouped"
    # Of each key head its query, its key, its heads' values and gates; then what its heads learn and forget by.
    heads, keys = state.heads // state.groups, state.groups * state.size
    wide, beyond = heads * state.head_dim, 0 if field == "state_gates" else state.channels + state.inner
    learned = Groups(state.groups, (heads, heads), (beyond, beyond + state.heads))
    if field == "state_gates":
        return (learned,)
    read = Groups(state.groups, (state.size, state.size, wide, wide), (0, keys, 2 * keys, state.channels))
    return (read,) if state.gates_apart else (read, learned)


def row_order(tensors: tuple[Groups, ...]) -> list[int]:
    """For each final row, which it is of all rows of the tensors, one behind the other."""
    found = [0] * sum(each.rows for each in tensors)
    source = 0
    for each in tensors:
        for group in range(each.count):
            for start, rows in zip(each.starts, each.sizes, strict=True):
                at = start + group * rows
                found[at : at + rows] = range(source, source + rows)
                source += rows
    return found
