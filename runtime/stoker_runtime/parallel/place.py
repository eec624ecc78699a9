"""Where a rank stands: its part of each layer's matrices (tensor parallel), and its layers (pipeline parallel).

Rank 0 leads: it schedules, samples, and talks to the API processes. So it is of the last stage, where the logits are;
the ranks of the first stage have the highest numbers. Nodes have as many ranks each, neighbours, so that a stage is
spread over nodes only where a node has not as many ranks as it.

Invariants: plain data, torch-free; the same arithmetic on every rank.
Knows nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass

LEADER = 0
DEALT = 4
"""Rows are dealt by fours, so that an int32 a row begins at 16 bytes for all: another alignment is another kernel."""


@dataclass(frozen=True, slots=True)
class Place:
    """Rank `rank` of `tensors · stages`. Ranks of one stage follow each other; stage 0 has the embedding.

    `whole_experts`: each rank of a stage has some experts of a mixture, and not a part of each. `nodes` divides them.
    """

    rank: int
    tensors: int
    stages: int
    whole_experts: bool = False
    nodes: int = 1

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.tensors * self.stages

    @property
    def node(self) -> int:
        """The node that this rank is on; the leader's is 0."""
        return self.rank // (self.world // self.nodes)

    @property
    def stage_is_on_one_node(self) -> bool:
        """Whether all ranks of its stage are on its node."""
        first, share = self.rank - self.tensor, self.world // self.nodes
        return first // share == (first + self.tensors - 1) // share

    @property
    def tensor(self) -> int:
        """Which part of each matrix is this rank's."""
        return self.rank % self.tensors

    @property
    def stage(self) -> int:
        """Which of the stages is this rank's."""
        return self.stages - 1 - self.rank // self.tensors

    @property
    def is_first(self) -> bool:
        """Whether this stage begins with the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage ends with the output head."""
        return self.stage == self.stages - 1

    @property
    def leads(self) -> bool:
        """Whether this is the rank that schedules and samples."""
        return self.rank == LEADER

    @property
    def before(self) -> int:
        """The rank of the stage before that has the same part of its matrices."""
        return self.rank + self.tensors

    @property
    def after(self) -> int:
        """Likewise of the stage after."""
        return self.rank - self.tensors

    def layers(self, count: int) -> range:
        """This rank's layers of a model with `count`: as even as can be, the last stages with one less."""
        return even_part(count, self.stages, self.stage)

    def experts(self, count: int) -> range:
        """This rank's whole experts of `count`: as even as can be."""
        return even_part(count, self.tensors, self.tensor)

    def units(self, count: int) -> range:
        """This rank's feed-forward units, or heads, of a `count` that divides."""
        return range(self.tensor * count // self.tensors, (self.tensor + 1) * count // self.tensors)

    def rows(self, count: int) -> range:
        """This rank's rows of a vocabulary of `count`: as even as can be."""
        return even_part(count, self.tensors, self.tensor)

    def dealt(self, count: int) -> range:
        """This rank's rows of a step that samples `count`."""
        return dealt_part(count, self.tensors, self.tensor)


def even_part(count: int, parts: int, index: int) -> range:
    """Part `index` of `count` things in `parts` neighbouring parts, of which the first have one more if it must be."""
    least, more = divmod(count, parts)
    start = index * least + min(index, more)
    return range(start, start + least + (index < more))


def dealt_part(count: int, parts: int, index: int) -> range:
    """Part `index` of `count` rows, of which each but the last ones has as many, a multiple of `DEALT`."""
    each = most_dealt(count, parts)
    return range(min(index * each, count), min((index + 1) * each, count))


def most_dealt(count: int, parts: int) -> int:
    """The rows of each of `parts`, the last ones' filled up."""
    return -(-count // (parts * DEALT)) * DEALT


def places(tensors: int, stages: int, *, whole_experts: bool = False, nodes: int = 1) -> list[Place]:
    """All ranks, in their order."""
    return [Place(rank, tensors, stages, whole_experts, nodes) for rank in range(tensors * stages)]
