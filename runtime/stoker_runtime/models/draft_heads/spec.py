"""The description of a head that drafts: a decoder of one layer that reads two vectors side by side.

Invariants: those of `ModelSpec`; what the head reads of the model is counted in `taps` and `state`.
Knows nothing of config.json, and of how the head is chained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stoker_runtime.models.parameter import Parameter, Role
from stoker_runtime.models.spec import ModelSpec


@dataclass(frozen=True)
class HeadSpec(ModelSpec):
    """One layer with a norm of its own for the model's state; `within` begins its tensors' names in the model's files.

    EAGLE-3: `fuse` brings the model's residual stream before the layers `taps`, each `state` wide, to one vector.

    Attention reads the token's normed embedding and that vector, normed by `hidden_norm`, side by side; the residual
    stream begins with the vector, or with its norm (`norm_first`). `vocab` are the model's tokens; the output head has
    a row for each of `drafted` tokens alone. `own_table`: it brings an embedding; else the model's is read.
    """

    taps: tuple[int, ...] = ()
    state: int = 0
    drafted: int = 0
    own_table: bool = True
    norm_first: bool = False
    within: str = ""

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        """Those of a decoder's layer, its first projection twice as wide."""
        yield self._parameter(f"layers.{layer}.hidden_norm", (self.hidden,), Role.NORM)
        for each in super().layer_parameters(layer):
            wide = each.name == f"layers.{layer}.qkv"
            yield replace(each, shape=(each.shape[0], 2 * self.hidden)) if wide else each

    def _unkept(self) -> Iterator[Parameter]:
        if self.own_table:
            yield Parameter("embed", (self.vocab, self.hidden), Role.EMBEDDING)
        yield self._parameter("fuse", (self.hidden, len(self.taps) * self.state), Role.LINEAR)
        yield from self.layer_parameters(0)
        yield self._parameter("final_norm", (self.hidden,), Role.NORM)
        yield Parameter("head", (self.drafted, self.hidden), Role.HEAD)


@dataclass(frozen=True)
class NextSpec(HeadSpec):
    """A model's own layer for the token after the next (MTP): `join` makes the residual stream of the embedding, normed
    by `embed_norm`, and the model's last state, normed by `hidden_norm`. The model lends both its ends.
    """

    def layer_parameters(self, layer: int) -> Iterator[Parameter]:
        """Those of one of the model's layers, and what joins the two vectors."""
        for norm in ("embed_norm", "hidden_norm"):
            yield self._parameter(f"layers.{layer}.{norm}", (self.hidden,), Role.NORM)
        yield self._parameter(f"layers.{layer}.join", (self.hidden, 2 * self.hidden), Role.LINEAR)
        yield from ModelSpec.layer_parameters(self, layer)

    def _unkept(self) -> Iterator[Parameter]:
        yield from self.layer_parameters(0)
        yield self._parameter("final_norm", (self.hidden,), Role.NORM)
