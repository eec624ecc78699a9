"""The description of an encoder of BERT's kind: sizes, and the parameters that follow from them with their names.

Invariants: frozen plain data without torch; `tensors()` is the one list of final tensors, which allocation, loading
and byte counts all walk.
Knows nothing of devices, of pooling, or of how a parameter is computed with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stoker_runtime.models.parameter import Parameter, Role, stored_bytes

Named = tuple[Parameter, tuple[str, ...]]
"""A final tensor, and the names of its pieces in a checkpoint, stacked by rows in this order."""


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A transformer that sees its whole text at once, with the norm after each addition (BERT, Devlin et al. 2018).

    `positions` rows of position embeddings serve texts of `positions - position_offset` tokens: RoBERTa counts from
    its padding id on. `base` is the prefix of the encoder's tensors in checkpoints that hold a head besides.
    `head`: "" gives hidden states; "bert" and "roberta" turn the first token's into one score.
    """

    architecture: str
    base: str
    num_layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    positions: int
    position_offset: int
    types: int
    eps: float
    activation: str
    head: str = ""
    dtype: str = "float32"

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def max_position(self) -> int:
        """The longest text in tokens."""
        return self.positions - self.position_offset

    def tensors(self, prefix: str) -> Iterator[Named]:
        """Every final tensor in the order of use; `prefix` stands before the encoder's own names."""
        top = f"{prefix}embeddings."
        yield _table("word", (self.vocab, self.hidden), f"{top}word_embeddings.weight")
        yield _table("position", (self.positions, self.hidden), f"{top}position_embeddings.weight")
        yield _table("type", (self.types, self.hidden), f"{top}token_type_embeddings.weight")
        yield from _norm("embed_norm", self.hidden, f"{top}LayerNorm")
        for layer in range(self.num_layers):
            yield from self._layer(f"layers.{layer}", f"{prefix}encoder.layer.{layer}")
        if self.head:
            dense, last = {
                "bert": (f"{prefix}pooler.dense", "classifier"),
                "roberta": ("classifier.dense", "classifier.out_proj"),
            }[self.head]
            yield from _linear("head_dense", (self.hidden, self.hidden), dense)
            yield from _linear("head_out", (1, self.hidden), last)

    def _layer(self, name: str, source: str) -> Iterator[Named]:
        hidden, ffn, attention = self.hidden, self.ffn, f"{source}.attention"
        parts = tuple(f"{attention}.self.{part}" for part in ("query", "key", "value"))
        yield from _linear(f"{name}.qkv", (3 * hidden, hidden), *parts)
        yield from _linear(f"{name}.output", (hidden, hidden), f"{attention}.output.dense")
        yield from _norm(f"{name}.attention_norm", hidden, f"{attention}.output.LayerNorm")
        yield from _linear(f"{name}.up", (ffn, hidden), f"{source}.intermediate.dense")
        yield from _linear(f"{name}.down", (hidden, ffn), f"{source}.output.dense")
        yield from _norm(f"{name}.ffn_norm", hidden, f"{source}.output.LayerNorm")

    def parameter_bytes(self, dtype: str) -> int:
        """Device bytes of all weights, exactly as allocated."""
        return sum(stored_bytes(parameter, dtype, "none") for parameter, _ in self.tensors(""))


def _table(name: str, shape: tuple[int, int], source: str) -> Named:
    return Parameter(name, shape, Role.EMBEDDING), (source,)


def _linear(name: str, shape: tuple[int, int], *sources: str) -> Iterator[Named]:
    yield Parameter(name, shape, Role.LINEAR), tuple(f"{source}.weight" for source in sources)
    yield Parameter(f"{name}_bias", shape[:1], Role.BIAS), tuple(f"{source}.bias" for source in sources)


def _norm(name: str, hidden: int, source: str) -> Iterator[Named]:
    yield Parameter(name, (hidden,), Role.NORM), (f"{source}.weight",)
    yield Parameter(f"{name}_bias", (hidden,), Role.BIAS), (f"{source}.bias",)
