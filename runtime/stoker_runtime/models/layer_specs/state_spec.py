"""Layers with a state by numbers: which they are, and what a sequence's state is made of, in place of cached tokens.

Invariants: plain data without torch. A model has one kind of them; a sequence's state takes the same memory at any
length.
Knows nothing of configurations, and of how any of it is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

# Tokens whose triangle the delta rule solves at once (`scratch_values` of the kernels).
SOLVED = 32


class Mixer(StrEnum):
    """What of a layer brings tokens together: attention, Mamba-2, the gated delta rule, or nothing."""

    ATTENTION = "attention"
    MAMBA2 = "mamba2"
    GATED_DELTA = "gated_delta"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """`mixers[i]` is that of layer i, `kind` that of all which have a state; layers in `unfed` have no feed-forward.

    Mamba-2: `heads` of `head_dim`, whose state is `[head_dim, size]`, with B and C of `groups`. The delta rule: `heads`
    are those of values, of `head_dim`, whose state is `[size, head_dim]`, and `groups` those of queries and keys, of
    `size`. Before either stands a convolution over the last `taps` tokens. `gates_apart`: a matrix of its own projects
    what the delta rule learns and forgets by, where a checkpoint has it in other numbers than the rest.
    Of a rank's part: `sharing` ranks have heads of one group, and `most_layers` is the most that a rank has.
    """

    kind: Mixer
    mixers: tuple[Mixer, ...]
    heads: int
    head_dim: int
    size: int
    groups: int
    taps: int
    unfed: frozenset[int] = frozenset()
    conv_bias: bool = False
    bias: bool = False
    gates_apart: bool = False
    sharing: int = 1
    most_layers: int = 0

    @property
    def layers(self) -> int:
        """Layers that have a state."""
        return self.mixers.count(self.kind)

    @property
    def inner(self) -> int:
        """Width of all heads together."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """What the convolution goes over: x, B and C; or queries, keys and values."""
        return self.inner + 2 * self.groups * self.size

    @property
    def projected(self) -> int:
        """What is projected first: what the convolution reads, a gate as wide as the heads, and one number a head that
        says how much is forgotten; of the delta rule another one, of how much is learned.
        """
        return self.channels + self.inner + self.gates

    @property
    def gates(self) -> int:
        """Numbers of all heads that say how much is forgotten, and learned."""
        return self.heads * (2 if self.kind is Mixer.GATED_DELTA else 1)

    @property
    def shape(self) -> tuple[int, int, int]:
        """A sequence's state in one layer."""
        rows, columns = (self.head_dim, self.size) if self.kind is Mixer.MAMBA2 else (self.size, self.head_dim)
        return self.heads, rows, columns

    @property
    def window(self) -> tuple[int, int]:
        """What the convolution of one layer remembers of a sequence."""
        return self.taps - 1, self.channels

    def bytes_of_sequence(self, item: int) -> int:
        """Bytes of one sequence's states in all layers: those of heads in fp32, of convolutions `item` a number."""
        return self._bytes_of(self.layers, item)

    def _bytes_of(self, layers: int, item: int) -> int:
        rows, channels = self.window
        return layers * (4 * self.inner * self.size + item * rows * channels)

    def sequences(self, room: int, item: int) -> int:
        """How many sequences, a power of two, have their states in `room` bytes; one at least. All ranks say the same.
        """
        most = self._bytes_of(max(self.most_layers, self.layers), item)
        return 1 << max(room // most, 1).bit_length() - 1

    def working(self) -> int:
        """Numbers that a token takes while such a layer runs: projected, convolved, what came of it and its norm.

        Of the delta rule a line of each head's triangle besides, in fp32.
        """
        solved = 2 * SOLVED * self.heads if self.kind is Mixer.GATED_DELTA else 0
        return self.projected + self.channels + 2 * self.inner + solved

    def of_layers(self, layers: Sequence[int]) -> StateSpec:
        """The same for a model of these layers alone, in this order."""
        unfed = frozenset(place for place, layer in enumerate(layers) if layer in self.unfed)
        return replace(self, mixers=tuple(self.mixers[layer] for layer in layers), unfed=unfed)

    def rows(self, hidden: int, *, adds_bias: bool) -> list[tuple[str, tuple[int, ...], str]]:
        """The parameters of a layer: name, shape, and the name of its role. One rank of several adds the last bias."""
        mamba = self.kind is Mixer.MAMBA2
        found: list[tuple[str, tuple[int, ...], str, bool]] = [
            ("state_in", (self.projected - (self.gates if self.gates_apart else 0), hidden), "linear", True),
            ("state_gates", (self.gates, hidden), "linear", self.gates_apart),
            ("state_in_bias", (self.projected,), "bias", self.bias),
            ("conv", (self.channels, 1, self.taps), "bias", True),
            ("conv_bias", (self.channels,), "bias", self.conv_bias),
            ("a_log", (self.heads,), "bias", True),
            ("skip", (self.heads,), "bias", mamba),
            ("dt_bias", (self.heads,), "bias", True),
            ("state_norm", (self.inner if mamba else self.head_dim,), "gain", True),
            ("state_out", (hidden, self.inner), "linear", True),
            ("state_out_bias", (hidden,), "bias", self.bias and adds_bias),
        ]
        return [(name, shape, role) for name, shape, role, present in found if present]
