"""The padded shape of a step, which shapes are worth a CUDA graph, and what is uploaded for one.

Invariants: pure; a batch fits the shape chosen for it. Rows come decodes first, then prefill chunks; the padded tokens
are those of the decode rows, one each, then `tokens` of the chunks.
Knows nothing of tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stoker_runtime.sampling.modes import BY_ALL, GREEDY
from stoker_runtime.step.batch import Batch

# Prefill rows of a graph: short prompts that arrive together. Padded rows cost only their share of the output head.
GRAPH_PREFILLS = 8
GRAPH_TOKENS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Verifications of up to so many rows are captured ahead of their use, with the most drafts; others at their second.
EXPECTED_VERIFIED_ROWS = 16
# An eager step costs the host about this much; a step that takes the GPU longer hides it and needs no graph.
HOST_SECONDS = 10e-3
ACHIEVED_FLOPS = 700e12


@dataclass(frozen=True, slots=True)
class StepShape:
    """Padded counts of a step: decode rows, prefill rows, prefill tokens, and the sampling mode.

    `adapters`: at least one row goes through an adapter. Where there are `drafts`, each row decodes its last token and
    so many drafts. `scored`: log-probabilities are wanted of what several ranks would sample together. `shared`: a step
    of decodes alone, which attends once for all rows what all begin with.
    """

    decodes: int
    prefills: int
    tokens: int
    mode: str
    adapters: bool = False
    drafts: int = 0
    scored: bool = False
    shared: bool = False

    @property
    def whole(self) -> bool:
        """Whether one rank needs all logits, and samples; else all ranks do, each from its part of them."""
        # Tokens of drafts are sampled in turn, in as many exchanges; greedy ones all at once.
        return self.scored or self.mode not in BY_ALL or (self.drafts > 0 and self.mode != GREEDY)

    @property
    def rows(self) -> int:
        """All rows."""
        return self.decodes + self.prefills

    @property
    def total_tokens(self) -> int:
        """All tokens."""
        return self.decodes * (1 + self.drafts) + self.tokens


def decode_sizes(maximum: int) -> list[int]:
    """Decode row counts of graphs: powers of two up to 16, then steps of an eighth to a quarter, and `maximum`."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128]
    sizes += [*range(160, 257, 32), *range(320, 513, 64), *range(640, 4097, 128)]
    return [*(size for size in sizes if size < maximum), maximum]


def mixed_sizes(maximum: int) -> list[int]:
    """Decode row counts of graphs that also prefill: fewer, because they multiply with the token counts."""
    return [0, *(size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if size < maximum), maximum]


class ShapeTable:
    """Chooses the padded shape of a step. `parameters` is the model's weight count, which bounds graphed prefill.

    A step verifies at most `most_drafts` drafts a row and `verify_tokens` tokens in all; 0: none does.
    """

    def __init__(
        self, max_rows: int, max_tokens: int, parameters: int, *, padded: bool, most_drafts: int = 0,
        verify_tokens: int = 0,
    ) -> None:  # fmt: skip
        self._decode_sizes = decode_sizes(max_rows)
        self._mixed_sizes = mixed_sizes(max_rows)
        hidden_by_gpu = int(HOST_SECONDS * ACHIEVED_FLOPS / (2 * max(parameters, 1)))
        self._tokens = [size for size in GRAPH_TOKENS if size <= min(max_tokens, max(128, hidden_by_gpu))]
        self._max_rows = max_rows
        self._max_tokens = max_tokens
        self._padded = padded
        self._most_drafts = most_drafts
        self._verify_tokens = verify_tokens

    @property
    def verifies(self) -> bool:
        """Whether there are steps that verify drafts."""
        return self._verify_tokens > 0

    @property
    def most_graphed(self) -> int:
        """Tokens of the largest step that can be a graph."""
        longest = self._tokens[-1] if self._tokens else 0
        mixed = (rows + longest for rows in self._mixed_sizes if rows + GRAPH_PREFILLS <= self._max_rows)
        return max(self._decode_sizes[-1], self._verify_tokens, min(self._max_tokens, max(mixed, default=0)))

    def decode(self, count: int, mode: str, adapters: bool = False, *, shared: bool = False) -> StepShape:
        """The shape of a pure decode step of `count` rows."""
        rows = self._decode_sizes[bisect_left(self._decode_sizes, count)] if self._padded else count
        return StepShape(rows, 0, 0, mode, adapters, shared=shared)

    def verify(self, count: int, drafts: int, mode: str, adapters: bool = False) -> StepShape:
        """The shape of a step of `count` rows that verifies up to `drafts` drafts each."""
        rows = min(self.decode(count, mode).rows, self._verify_tokens // (drafts + 1))
        return StepShape(rows, 0, 0, mode, adapters, drafts)

    def ragged(
        self, decodes: int, prefills: int, tokens: int, mode: str, adapters: bool = False
    ) -> tuple[StepShape, bool]:
        """The shape of a step with prefill chunks, and whether a graph pays; unpadded where it does not."""
        if self._padded and self._tokens and tokens <= self._tokens[-1] and prefills <= GRAPH_PREFILLS:
            rows = self._mixed_sizes[bisect_left(self._mixed_sizes, decodes)]
            bucket = self._tokens[bisect_left(self._tokens, tokens)]
            if rows + GRAPH_PREFILLS <= self._max_rows and rows + bucket <= self._max_tokens:
                return StepShape(rows, GRAPH_PREFILLS, bucket, mode, adapters), True
        return StepShape(decodes, prefills, tokens, mode, adapters), False

    def planned(self, modes: tuple[str, ...], *, adapters: bool = False) -> list[StepShape]:
        """The graphs to have before they are needed, in order of use: decodes, then prefill alone."""
        kinds = [(mode, adapted) for mode in modes for adapted in ((False, True) if adapters else (False,))]
        decodes = [StepShape(size, 0, 0, *kind) for kind in kinds for size in self._decode_sizes]
        prefills = [StepShape(0, GRAPH_PREFILLS, tokens, *kind) for kind in kinds for tokens in self._tokens]
        most = self._most_drafts if self._verify_tokens else 0
        verified = [
            self.verify(size, most, *kind)
            for kind in kinds
            for size in self._decode_sizes
            if most and size <= EXPECTED_VERIFIED_ROWS and size * (most + 1) <= self._verify_tokens
        ]
        return decodes + verified + [shape for shape in prefills if shape.rows <= self._max_rows]


def sampled_rows(batch: Batch, shape: StepShape) -> list[int]:
    """The row of `shape` of each of `batch.sampled_slots`: every decode, and the chunks that end their prompt."""
    chunks = (shape.decodes + i for i, chunk in enumerate(batch.prefills) if chunk.sample)
    return [*range(len(batch.decodes)), *chunks]


def pack_ragged(batch: Batch, shape: StepShape) -> npt.NDArray[np.int32]:
    """The upload of a ragged step: `[row_slots | query_start | starts | ids | sampled_slots]`, cut by RaggedBuffers.

    Padded decode rows hold one token each, padded prefill rows none.
    """
    rows = shape.rows
    packed = np.zeros(4 * rows + 1 + shape.total_tokens, dtype=np.int32)
    slots, query_start = packed[:rows], packed[rows : 2 * rows + 1]
    starts, ids = packed[2 * rows + 1 : 3 * rows + 1], packed[3 * rows + 1 : -rows]
    slots[:] = -1
    slots[: len(batch.decodes)] = batch.decodes
    query_start[: shape.decodes + 1] = np.arange(shape.decodes + 1)
    at = shape.decodes
    for row, chunk in enumerate(batch.prefills, start=shape.decodes):
        end = at + len(chunk.token_ids)
        slots[row] = chunk.slot
        starts[row] = chunk.start
        ids[at:end] = chunk.token_ids
        query_start[row + 1] = at = end
    query_start[shape.decodes + len(batch.prefills) + 1 :] = at
    counts = sampled_rows(batch, shape)
    packed[-rows:] = -1
    packed[-rows:][counts] = slots[counts]
    return packed


def prompt_targets(batch: Batch) -> tuple[list[int], list[int]]:
    """Ids whose prompt log-probabilities are wanted, and the token of the (unpadded) step that predicts each."""
    targets: list[int] = []
    rows: list[int] = []
    at = len(batch.decodes)
    for chunk in batch.prefills:
        targets += chunk.targets
        rows += range(at, at + len(chunk.targets))
        at += len(chunk.token_ids)
    return targets, rows
