"""The description of an encoder: sizes, and the parameters that follow from them with their names.

Invariants: frozen plain data without torch; `tensors()` is the one list of final tensors, which allocation, loading
and byte counts all walk.
Knows nothing of devices, of pooling, or of how a parameter is computed with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker_runtime.models.encoders.names import EncoderNames, Piece
from stoker_runtime.models.layer_specs.rope_spec import RopeSpec
from stoker_runtime.models.parameter import Parameter, Role, stored_bytes

Named = tuple[Parameter, tuple[Piece, ...]]
"""A final tensor, and the pieces of it in a checkpoint, stacked by rows in this order; modules are tensors here."""

LINEARS = frozenset(("qkv", "output", "up", "down", "head_dense", "head_out"))


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A transformer that sees its whole text at once (BERT, Devlin et al. 2018).

    `max_position`: the longest text in tokens. Positions are a table of so many rows, from `position_offset` on
    (RoBERTa counts from its padding id), or with `rope` queries and keys rotate: layers with a window by `local_rope`
    where there is one. `windows[i]`: how far away, on either side, tokens may be that layer i's tokens see; None: all.
    `types`: kinds of tokens, 0 for none. `biases`: the linears that have one. `gated`: a feed-forward of
    act(gate) · up. Norms stand behind each addition; with `pre_norm` before attention and feed-forward, but the first
    layer's attention, which reads the embedding's norm, and behind the last layer.
    `scores`: a head turns one pooled state into a score: dense, `head_activation`, with `head_norm` a norm, dense.
    """

    architecture: str
    names: EncoderNames
    num_layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    max_position: int
    eps: float
    activation: str
    types: int = 0
    position_offset: int = 0
    rope: RopeSpec | None = None
    local_rope: RopeSpec | None = None
    windows: tuple[int | None, ...] = ()
    pre_norm: bool = False
    norm_bias: bool = True
    biases: frozenset[str] = LINEARS
    gated: bool = False
    scores: bool = False
    head_activation: str = "tanh"
    head_norm: bool = False
    dtype: str = "float32"

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def working(self) -> int:
        """Values that a token takes within a layer: projected, copied where they rotate, or of its feed-forward."""
        return max((3 if self.rope is None else 6) * self.hidden, (3 if self.gated else 1) * self.ffn)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """Each way in which layers rotate."""
        return tuple(each for each in (self.rope, self.local_rope) if each is not None)

    @property
    def rope_table_bytes(self) -> int:
        """Device bytes of the rotary tables."""
        return sum(4 * self.max_position * rope.dim for rope in self.ropes)

    def window_of(self, layer: int) -> int | None:
        """How far a layer's tokens see; None: to the ends of their text."""
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> RopeSpec | None:
        """How a layer's queries and keys rotate."""
        return self.local_rope if self.local_rope is not None and self.window_of(layer) is not None else self.rope

    def norm_before(self, part: str, layer: int) -> str:
        """The norm that the next part reads behind the `part` ("attention" or "ffn") of a layer."""
        if not self.pre_norm:
            return f"layers.{layer}.{part}_norm"
        if part == "attention":
            return f"layers.{layer}.ffn_norm"
        return f"layers.{layer + 1}.attention_norm" if layer + 1 < self.num_layers else "final_norm"

    def tensors(self, prefix: str) -> Iterator[Named]:
        """Every final tensor in the order of use; `prefix` stands before the encoder's own names."""
        top = {name: Piece(prefix + module) for name, module in self.names.top.items()}
        yield from self._tensors("word", (self.vocab, self.hidden), (top["word"],))
        if self.rope is None:
            rows = self.max_position + self.position_offset
            yield from self._tensors("position", (rows, self.hidden), (top["position"],))
        if self.types:
            yield from self._tensors("type", (self.types, self.hidden), (top["type"],))
        yield from self._tensors("embed_norm", (self.hidden,), (top["embed_norm"],))
        for layer in range(self.num_layers):
            yield from self._layer(layer, f"{prefix}{self.names.layers}{layer}.")
        if self.pre_norm:
            yield from self._tensors("final_norm", (self.hidden,), (top["final_norm"],))
        if self.scores:
            heights = {"head_dense": self.hidden, "head_out": 1}
            for name, module in self.names.head.items():
                shape = (heights[name], self.hidden) if name in heights else (self.hidden,)
                yield from self._tensors(name, shape, (Piece(module.format(prefix=prefix)),))

    def _layer(self, layer: int, source: str) -> Iterator[Named]:
        hidden, wide = self.hidden, (2 if self.gated else 1) * self.ffn
        shapes: dict[str, tuple[int, ...]] = {
            "qkv": (3 * hidden, hidden),
            "output": (hidden, hidden),
            "up": (wide, hidden),
            "down": (hidden, self.ffn),
        }
        for name, pieces in self.names.layer.items():
            if self.pre_norm and layer == 0 and name == "attention_norm":
                continue
            found = tuple(piece._replace(module=source + piece.module) for piece in pieces)
            yield from self._tensors(f"layers.{layer}.{name}", shapes.get(name, (hidden,)), found)

    def _tensors(self, name: str, shape: tuple[int, ...], pieces: tuple[Piece, ...]) -> Iterator[Named]:
        """A module's weight, and its bias where it has one."""
        short = name.rpartition(".")[2]
        norm = len(shape) == 1
        role = Role.NORM if norm else Role.LINEAR if short in LINEARS else Role.EMBEDDING
        yield Parameter(name, shape, role), tuple(each._replace(module=f"{each.module}.weight") for each in pieces)
        if self.norm_bias if norm else short in self.biases:
            biases = tuple(each._replace(module=f"{each.module}.bias") for each in pieces)
            yield Parameter(f"{name}_bias", shape[:1], Role.BIAS), biases

    def parameter_bytes(self, dtype: str) -> int:
        """Device bytes of all weights, exactly as allocated."""
        return sum(stored_bytes(parameter, dtype, "none") for parameter, _ in self.tensors(""))
