"""What sampling knows of each slot, resting on the device, and how one packed upload changes it.

Invariants: allocated once; everything is indexed by slot, so a captured graph stays right when membership changes;
a slot's row is only ever replaced as a whole, by `apply_slot_sampling`. Counts are those of the tokens the device
sampled itself, on top of the history that came with the slot.
Knows nothing of how a token is chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from stoker_kernels.launch.dispatch import reference_supports, register, select, triton_supports

# A tile is what one program reads at once; candidates are what a row may shrink to and then be searched at once.
TILE = 4096
CANDIDATES = 4096
MIN_PADDED_TILES = 64
MAX_BIAS = 512
# Below this the division of logits by the temperature would overflow: such a row is greedy.
MIN_TEMPERATURE = 1e-5
# A count word: the low 15 bits count outputs, the sign says that the token is in the prompt.
MAX_COUNT = 0x7FFF
IN_PROMPT = -0x8000
FOREVER = 2**31 - 1
# The typical set: surprise is counted in parts of a bit, and weights lose bits so that their product's sum fits.
SURPRISE_UNITS = 4096
WEIGHT_SHIFT = 8


class Param(IntEnum):
    """Columns of `SamplingState.params`, and of an upload's header; floats are stored by their bits."""

    SLOT = 0
    TEMPERATURE = 1
    TOP_K = 2
    TOP_P = 3
    MIN_P = 4
    REPETITION = 5
    FREQUENCY = 6
    PRESENCE = 7
    SEED_LOW = 8
    SEED_HIGH = 9
    PENALIZED = 10
    BIAS_COUNT = 11
    BIAS_START = 12
    HISTORY_COUNT = 13
    HISTORY_START = 14
    TYPICAL_P = 15


PARAMS = 16
NUM_BIAS_WORDS = 3
NUM_HISTORY_WORDS = 2

register(
    "apply_slot_sampling",
    "triton",
    "stoker_kernels.sampling.triton_sampling:apply",
    triton_supports(torch.int32),
    invariant=True,
)
register(
    "apply_slot_sampling", "reference", "stoker_kernels.sampling.reference:apply", reference_supports, invariant=True
)


@dataclass(frozen=True, slots=True)
class SlotSampling:
    """The sampling parameters of the sequence that takes `slot`.

    Temperature 0 is greedy; `top_k` ≤ 0, `top_p` 1 and `typical_p` 1 switch those filters off. `bias` is added to the
    logits of its ids. `suppressed` ids are impossible while the position of the token that is run is below
    `suppress_until` (prompt length + min_tokens − 1). `prompt` and `output` are the tokens so far, needed with
    penalties only.
    """

    slot: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    bias: Sequence[tuple[int, float]] = ()
    suppressed: Sequence[int] = ()
    suppress_until: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()

    @property
    def penalized(self) -> bool:
        """Whether the choice depends on the tokens so far."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def adjusted(self) -> bool:
        """Whether logits change before the choice, by penalties or bias: `sample` then needs `adjust=True`."""
        return self.penalized or bool(self.bias) or (bool(self.suppressed) and self.suppress_until > 0)


@dataclass(frozen=True, slots=True)
class SamplingState:
    """Device tensors by slot, and the scratch memory of `sample` for as many rows as there are slots.

    `params [slots, 16]` int32 (columns: `Param`); `bias_ids`, `bias_values`, `bias_until` `[slots, MAX_BIAS]`, ids
    ascending; `counts [slots, V]` int16.
    """

    params: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    bias_until: Tensor
    counts: Tensor
    tile_max: Tensor
    tile_arg: Tensor
    tile_mass: Tensor
    candidate_values: Tensor
    candidate_ids: Tensor

    @staticmethod
    def allocate(slots: int, vocab: int, device: torch.device) -> SamplingState:
        """State for `slots` sequences over `vocab` tokens; every slot starts greedy."""
        return SamplingState(
            **{
                name: torch.zeros(shape, dtype=dtype, device=device)
                for name, (shape, dtype) in _layout(slots, vocab).items()
            }
        )

    @staticmethod
    def nbytes(slots: int, vocab: int) -> int:
        """Bytes that `allocate` takes."""
        return sum(rows * columns * dtype.itemsize for (rows, columns), dtype in _layout(slots, vocab).values())

    @property
    def adjustments(self) -> tuple[Tensor, ...]:
        """What kernels that call `adjusted_logits` take, in their order: fields, bias ids, values and ends, counts."""
        return self.params, self.bias_ids, self.bias_values, self.bias_until, self.counts

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.counts.shape[1]


def padded_tiles(tiles: int) -> int:
    """A row's tiles as a power of two: the same constant, so the same kernel, for all vocabularies up to 262,144."""
    return max(MIN_PADDED_TILES, 1 << (tiles - 1).bit_length())


def tiles_ahead(*, wide: bool) -> tuple[int, ...]:
    """The padded numbers of tiles to compile for: of up to 262,144 tokens, and if `wide` of up to 524,288."""
    return (MIN_PADDED_TILES, 2 * MIN_PADDED_TILES) if wide else (MIN_PADDED_TILES,)


def _layout(slots: int, vocab: int) -> dict[str, tuple[tuple[int, int], torch.dtype]]:
    tiles = -(-vocab // TILE)
    return {
        "params": ((slots, PARAMS), torch.int32),
        "bias_ids": ((slots, MAX_BIAS), torch.int32),
        "bias_values": ((slots, MAX_BIAS), torch.float32),
        "bias_until": ((slots, MAX_BIAS), torch.int32),
        "counts": ((slots, vocab), torch.int16),
        "tile_max": ((slots, tiles), torch.float32),
        "tile_arg": ((slots, tiles), torch.int32),
        "tile_mass": ((slots, tiles), torch.int64),
        "candidate_values": ((slots, CANDIDATES), torch.float32),
        "candidate_ids": ((slots, CANDIDATES), torch.int32),
    }


def apply_slot_sampling(packed: Tensor, updates: int, state: SamplingState) -> None:
    """Replace the rows of `updates` slots by one upload, made by `pack_slot_sampling`: `packed` int32, contiguous."""
    if updates:
        select("apply_slot_sampling", packed.device, packed.dtype)(packed, updates, state)


def pack_slot_sampling(updates: Sequence[SlotSampling], vocab: int) -> npt.NDArray[np.int32]:
    """Pack changes for `apply_slot_sampling` → 1-D int32: a header of 16 words a slot, then bias and history entries.

    Raises:
        ValueError: an id outside the vocabulary, more than MAX_BIAS bias entries, or a slot named twice.
    """
    if len({update.slot for update in updates}) != len(updates):
        raise ValueError("a slot may occur once in an upload")
    header = np.zeros((len(updates), PARAMS), np.int32)
    tail: list[npt.NDArray[np.int32]] = []
    at = header.size
    for row, update in zip(header, updates, strict=True):
        bias, history = _bias_entries(update, vocab), _history_entries(update, vocab)
        _fill(row, update)
        row[Param.BIAS_COUNT], row[Param.BIAS_START] = len(bias), at
        at += bias.size
        row[Param.HISTORY_COUNT], row[Param.HISTORY_START] = len(history), at
        at += history.size
        tail += [bias.reshape(-1), history.reshape(-1)]
    return np.concatenate([header.reshape(-1), *tail])


def _fill(row: npt.NDArray[np.int32], update: SlotSampling) -> None:
    greedy = update.temperature < MIN_TEMPERATURE
    floats = row.view(np.float32)
    row[Param.SLOT] = update.slot
    floats[Param.TEMPERATURE] = 0.0 if greedy else update.temperature
    row[Param.TOP_K] = max(0, update.top_k)
    floats[Param.TOP_P] = update.top_p
    floats[Param.MIN_P] = update.min_p
    floats[Param.TYPICAL_P] = update.typical_p
    floats[Param.REPETITION] = update.repetition_penalty
    floats[Param.FREQUENCY] = update.frequency_penalty
    floats[Param.PRESENCE] = update.presence_penalty
    seed = np.array([update.seed & 0xFFFFFFFFFFFFFFFF], np.uint64).view(np.int32)
    row[Param.SEED_LOW], row[Param.SEED_HIGH] = seed[0], seed[1]
    row[Param.PENALIZED] = update.penalized


def _bias_entries(update: SlotSampling, vocab: int) -> npt.NDArray[np.int32]:
    """(id, value's bits, position it ends at) by ascending id, so that a tile finds its own entries."""
    entries = [(token, value, FOREVER) for token, value in update.bias]
    if update.suppress_until > 0:
        entries += [(token, -np.inf, update.suppress_until) for token in update.suppressed]
    if len(entries) > MAX_BIAS:
        raise ValueError(f"a slot takes at most {MAX_BIAS} biased or suppressed tokens; got {len(entries)}")
    entries.sort(key=lambda entry: entry[0])
    packed = np.empty((len(entries), NUM_BIAS_WORDS), np.int32)
    packed[:, 0] = _checked([entry[0] for entry in entries], vocab)
    packed[:, 1] = np.array([entry[1] for entry in entries], np.float32).view(np.int32)
    packed[:, 2] = [entry[2] for entry in entries]
    return packed


def _history_entries(update: SlotSampling, vocab: int) -> npt.NDArray[np.int32]:
    """(id, count word), an id once."""
    if not update.penalized:
        return np.empty((0, NUM_HISTORY_WORDS), np.int32)
    prompt, output = _checked(update.prompt, vocab), _checked(update.output, vocab)
    ids = np.unique(np.concatenate([prompt, output]))
    counts = np.zeros(len(ids), np.int32)
    np.add.at(counts, np.searchsorted(ids, output), 1)
    words = np.minimum(counts, MAX_COUNT) + np.where(np.isin(ids, prompt), IN_PROMPT, 0)
    return np.stack([ids, words], axis=1).astype(np.int32)


def _checked(ids: Sequence[int], vocab: int) -> npt.NDArray[np.int64]:
    array = np.asarray(ids, np.int64)
    if array.size and not (array.min() >= 0 and array.max() < vocab):
        raise ValueError(f"token ids lie between 0 and {vocab - 1}; got {array.min()} to {array.max()}")
    return array
