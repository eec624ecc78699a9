"""Sums of many rows that ranks share out: each owns a part of a step's rows, which it sums, adds and norms for all.

What a rank's product gives for another's rows is copied to the owner while the product of further rows runs, and what
the owner has normed while the next product runs over the rows that are there: copy engines move them, and no kernel
waits for the wire but where it needs what comes over it. (Pipelined so in PyTorch's asynchronous tensor parallelism.)
One exchange after another: `give` each share, own one last; `sum_add_rms_norm`; `rows` of each, own one first.

The memory is used again at each exchange without a handshake: who has all the sums of one exchange knows that every
rank has read all rows of the one before, for it gave its part after that; and who has all rows that all sums were read.
Invariants: nothing waits for the host. All ranks make the same exchanges in the same order, with the same tokens, not
within graphs; each rank's residual stream is right in its own rows alone.
Knows nothing of products.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.all_reduce.memory import Exchange, PeerMemory, open_memory
from stoker_kernels.all_reduce.rule import Share, fits_vectors, share_rows, shares_of
from stoker_kernels.all_reduce.sm90_all_reduce import Norm, launch_await, launch_sum_of_copied, load
from stoker_kernels.launch.cuda import checked
from stoker_kernels.launch.rehearsal import rehearsing
from stoker_kernels.quant import Quantized

NUMBERS = 1 << 16  # exchanges are told apart by their number among so many
BF16 = 2


class Told(IntEnum):
    """What a word says whose number is an exchange's."""

    PARTS = 0  # a rank's part of the owner's rows is there
    ROWS = 1  # the owner's rows are there


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie in a rank's memory: all rows, their scales, the parts of its own ones by sender, and words."""

    tokens: int
    hidden: int
    ranks: int

    def __post_init__(self) -> None:
        if not fits_vectors(self.row_bytes):
            raise ValueError(f"row_shares: rows of {self.hidden} are not of whole vectors, or too wide")

    @property
    def row_bytes(self) -> int:
        """Of a row in bf16."""
        return self.hidden * BF16

    @property
    def scales(self) -> int:
        """Where they begin; all rows do at 0."""
        return self.tokens * self.row_bytes

    @property
    def parts(self) -> int:
        """Where the first part begins, on 16 bytes."""
        return self.scales + -(-self.tokens // 4) * 16

    def part(self, owner: int, sender: int) -> int:
        """Where in the memory of `owner` the part of `sender`, another rank, begins."""
        place = (sender - owner - 1) % self.ranks
        return self.parts + place * share_rows(self.tokens, self.ranks) * self.row_bytes

    def word(self, told: Told, sender: int) -> int:
        """Where `sender` writes what it tells."""
        words = self.part(0, self.ranks)  # behind the part of the last of the others
        return words + (told * self.ranks + sender) * 4

    @property
    def size(self) -> int:
        """All of it, in bytes."""
        return self.word(Told.ROWS, self.ranks)


def others_of(rank: int, ranks: int) -> tuple[int, ...]:
    """The other ranks from the next one on: so not all ranks begin with the same one."""
    return tuple((rank + step) % ranks for step in range(1, ranks))


class CopyLane:
    """Copies from this GPU to any other's memory, one after the other, beside what the GPU computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream, self._ready = torch.cuda.Stream(device), torch.cuda.Event()

    def begin(self) -> None:
        """Let the copies that follow begin behind what is queued by now on the current stream."""
        self._ready.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._ready)

    def copy(self, to: int, source: int, size: int) -> None:
        """Queue a copy of `size` bytes between two addresses."""
        from cuda.bindings import driver

        checked("cuMemcpyAsync", driver.cuMemcpyAsync(to, source, size, self._stream.cuda_stream))


class RowShares:
    """One rank's end. `row_shares` makes one."""

    quiet = False
    """Copy nothing and wait for nobody meanwhile: for a rehearsal, whose values do not count."""

    def __init__(self, memory: PeerMemory, layout: Layout, held: Tensor, lane: CopyLane, least: int) -> None:
        """`held`: the own piece of `memory` as bytes, laid out by `layout`. `least`: tokens of a step so shared out."""
        device = held.device
        self._memory, self._layout, self._device = memory, layout, device
        self._lane, self._least = lane, least
        self._rank, self._others = memory.rank, others_of(memory.rank, memory.ranks)
        rows = held[: layout.scales]
        self._rows = rows.view(torch.bfloat16).view(-1, layout.hidden)
        self._e4m3 = rows[: layout.tokens * layout.hidden].view(torch.float8_e4m3fn).view(-1, layout.hidden)
        self._scales = held[layout.scales :][: layout.tokens * 4].view(torch.float32).view(-1, 1)
        self._numbers = torch.arange(NUMBERS, dtype=torch.int32, device=device)
        self.exchanges = 1
        """The number of the one under way, or that comes next."""
        self._quantized = False
        self._own: Tensor | None = None
        self._lent: list[Tensor] = []
        self._missing: set[int] = set()

    def shares(self, tokens: int, dtype: torch.dtype) -> tuple[Share, ...]:
        """Whose rows are whose, by rank; () where a step of `tokens` is not for this way. The same on all ranks."""
        taken = dtype is torch.bfloat16 and self._least <= tokens <= self._layout.tokens
        return shares_of(tokens, self._layout.ranks) if taken and not torch.cuda.is_current_stream_capturing() else ()

    def outgoing(self, shares: Sequence[Share]) -> list[Share]:
        """In the order in which their sums are given: the own one last."""
        return [shares[rank] for rank in (*self._others, self._rank)]

    def incoming(self, shares: Sequence[Share]) -> list[Share]:
        """In the order in which their rows come: the own one first."""
        return [shares[rank] for rank in (self._rank, *reversed(self._others))]

    def give(self, share: Share, part: Tensor, at: int = 0) -> None:
        """This rank's `part [n,H]` of the sum of these rows, from the one `at` on; the last rows come last."""
        if share.owner == self._rank:
            self._own = part
            return
        self._lent.append(part)  # until the owner has it
        place = self._layout.part(share.owner, self._rank) + at * self._layout.row_bytes
        self._send(share.owner, [(place, part)], Told.PARTS, last=at + len(part) == len(share))

    def sum_add_rms_norm(
        self, share: Share, residual: Tensor, weight: Tensor, eps: float, *, quantized: bool
    ) -> None:
        """Of the own rows: `residual [n,H] += sum` in place, then the norm of the rounded stream for all ranks.

        `quantized`: in e4m3 with a scale a token, amax / 448.
        """
        assert self._own is not None, "the own part is given before it is summed"
        layout, rows = self._layout, share.rows
        for rank in self._others:
            self._await(Told.PARTS, rank)
        own, self._own = self._own, None
        out, scales = (self._e4m3[rows], self._scales[rows]) if quantized else (self._rows[rows], None)
        parts = [self._memory.own + layout.part(self._rank, rank) for rank in range(layout.ranks)]
        launch_sum_of_copied(parts, self._rank, own, out, Norm(residual, weight, eps, scales))
        width = layout.hidden if quantized else layout.row_bytes
        sent = [(share.start * width, out)]
        if scales is not None:
            sent.append((layout.scales + share.start * 4, scales))
        for rank in self._others:
            self._send(rank, sent, Told.ROWS)
        self._quantized, self._missing = quantized, set(self._others)

    def rows(self, share: Share) -> Tensor | Quantized:
        """What was normed of these rows `[n,H]`, for what is queued from now on until the next sum is."""
        if share.owner in self._missing:
            self._await(Told.ROWS, share.owner)
            self._missing.remove(share.owner)
            if not self._missing:
                self._lent.clear()
                self.exchanges += 0 if self.quiet else 1
        if self._quantized:
            return Quantized(self._e4m3[share.rows], self._scales[share.rows])
        return self._rows[share.rows]

    def all_rows(self, tokens: int) -> Tensor:
        """What was normed of all rows `[tokens,H]`, once `rows` has been asked for each share; not of e4m3."""
        return self._rows[:tokens]

    def try_once(self) -> None:
        """Make one exchange of rows without values, in both forms, so that none is made first under load."""
        shares = shares_of(self._layout.tokens, self._layout.ranks)
        own = shares[self._rank]
        stream = torch.zeros((len(own), self._layout.hidden), dtype=torch.bfloat16, device=self._device)
        weight = torch.ones(self._layout.hidden, dtype=torch.bfloat16, device=self._device)
        for quantized in (False, True):
            for share in self.outgoing(shares):
                self.give(share, stream.new_zeros((len(share), self._layout.hidden)))
            self.sum_add_rms_norm(own, stream, weight, 1e-6, quantized=quantized)
            for share in self.incoming(shares):
                self.rows(share)

    def close(self, exchange: Exchange) -> None:
        """Give the memory back. Every rank calls it, none while an exchange is under way."""
        self._memory.close(self._device, exchange)

    def _number(self) -> int:
        return self.exchanges % NUMBERS

    def _send(self, to: int, pieces: Sequence[tuple[int, Tensor]], told: Told, *, last: bool = True) -> None:
        """Copy pieces behind what is queued, each to its place in the memory of rank `to`, and say so of the last."""
        if self.quiet or rehearsing():
            return
        begin, number = self._memory.addresses[to], self._numbers.data_ptr() + 4 * self._number()
        self._lane.begin()
        for place, piece in pieces:
            self._lane.copy(begin + place, piece.data_ptr(), piece.nbytes)
        if last:
            self._lane.copy(begin + self._layout.word(told, self._rank), number, 4)

    def _await(self, told: Told, sender: int) -> None:
        if not self.quiet:
            launch_await(self._memory.own + self._layout.word(told, sender), self._number(), self._device)


class _Held:
    """Memory of this GPU that torch did not allocate, as bytes."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip


def row_shares(
    device: torch.device, rank: int, ranks: int, exchange: Exchange, tokens: range, hidden: int
) -> RowShares:
    """The end of rank `rank` of `ranks`, for steps of so many `tokens`, rows `[hidden]`, once all have opened it.

    Every rank calls it, and on every one it comes to the same end. Raises NoPeers with the reason where these GPUs
    cannot, as `peer_sums`, or have no memory for it.
    """
    layout = Layout(tokens[-1], hidden, ranks)
    memory = open_memory(device, rank, ranks, exchange, layout.size, 0, partial(load, device))
    held = torch.as_tensor(_Held(memory.own, layout.size), device=device)
    return RowShares(memory, layout, held, CopyLane(device), tokens.start)
