"""What ranks exchange within a step: sums of their parts, logits, states between stages, sampled tokens.

By NCCL on GPUs, where each exchange is queued on the device behind the kernels before it and can be part of a CUDA
graph; sums of a few MiB by kernels of our own, where GPUs reach each other's memory, and of long prompts by copies
beside what is computed (`row_shares`). By gloo on CPUs, where it blocks.
Every communicator is made by `warm`, none while requests are served.

Invariants: all ranks of a group make the same calls with the same shapes in the same order. Sums and tokens are
bit-identical on all ranks that get them. Nothing that is part of a step waits for the host.
Knows nothing of models beyond the shapes that it is given, nor of how ranks are started.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.nn.functional import pad

from stoker_kernels.all_reduce import NoPeers, PeerSums, RowShares, largest, peer_sums, row_shares
from stoker_kernels.sampling import PEAK_DIGITS, PEAKS_DTYPE
from stoker_runtime.parallel.group import open_group
from stoker_runtime.parallel.place import DEALT, LEADER, Place, dealt_part, even_part, most_dealt
from stoker_runtime.parallel.store import START_TIMEOUT

log = logging.getLogger(__name__)

# Rows that are gathered at a time where sums have one order.
ORDERED_ROWS = 512
# Bytes of what a rank tells the others in words.
MOST_WORDS = 1024


class Collectives:
    """One rank's end of the exchanges. `quiet` leaves them out: for a rehearsal, whose values do not count."""

    def __init__(
        self,
        place: Place,
        device: torch.device,
        store: Store,
        *,
        ordered: bool = False,
        has_met: bool = False,
    ) -> None:
        """Meet the other ranks through `store`, unless all of them have; blocks until they are there.

        `ordered`: sums are taken in the order of the ranks, whatever their size.
        Raises ConfigError in a process that has ranks already.
        """
        self.place = place
        self._device = device
        self._ordered = ordered
        self._quiet = False
        self._store = store
        self._told = 0
        self._peers: PeerSums | None = None
        self.row_shares: RowShares | None = None
        """How ranks share out the rows of long prompts, where they can."""
        if not has_met:
            open_group(place, device, store)
        # Of one stage, the group of all is the stage's: another communicator costs a start 0.2 s.
        stages = range(0, place.world, place.tensors) if place.stages > 1 else ()
        groups = [dist.new_group(list(range(at, at + place.tensors)), timeout=START_TIMEOUT) for at in stages]
        self._tensors = groups[place.rank // place.tensors] if groups else None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Exchange nothing meanwhile."""
        self._still(True)
        try:
            yield
        finally:
            self._still(False)

    def _still(self, quiet: bool) -> None:
        self._quiet = quiet
        if self.row_shares is not None:
            self.row_shares.quiet = quiet

    def open_peers(self) -> None:
        """Sum by this stage's own kernels from now on, where they can; log why not. Every rank calls it."""
        if not self.place.stage_is_on_one_node:
            log.info("ranks: sums go by NCCL alone: --tensor-parallel-size is spread over nodes")
            return
        try:
            self._peers = peer_sums(self._device, self.place.tensor, self.place.tensors, self._tell)
        except NoPeers as reason:
            log.info("ranks: sums go by NCCL alone: %s", reason)
        else:
            log.info("ranks: sums of up to %d MiB go from GPU to GPU", largest(self.place.tensors) >> 20)

    def share_rows(self, tokens: range, hidden: int) -> None:
        """Share out the rows of steps of so many `tokens` from now on, where `open_peers` has opened what GPUs sum by;
        log why not. Every rank calls it.
        """
        if self._peers is None or not tokens:
            return
        place = self.place
        try:
            shares = row_shares(self._device, place.tensor, place.tensors, self._tell, tokens, hidden)
        except NoPeers as reason:
            log.info("ranks: rows of long prompts are not shared out: %s", reason)
        else:
            shares.try_once()
            self.row_shares = shares
            log.info("ranks: rows of steps of %d tokens and more are shared out", tokens.start)

    def _tell(self, mine: str) -> list[str]:
        """What each rank of this stage says, in their order. Waits: for the start alone."""
        self._told += 1
        keys = [f"stage {self.place.stage} said {self._told}, rank {index}" for index in range(self.place.tensors)]
        self._store.set(keys[self.place.tensor], mine)
        return [self._store.get(key).decode() for key in keys]

    def _meet(self, mine: str) -> list[str]:
        """Wait for each rank of this stage, and for what it has queued."""
        here = torch.zeros(1, dtype=torch.int32, device=self._device)
        dist.all_reduce(here, group=self._tensors)
        here.item()
        return [mine] * self.place.tensors

    def warm(self, hidden: int, vocab: int, dtype: torch.dtype) -> None:
        """Make every kind of exchange once, so that none of them is made for the first time under load."""
        state = torch.zeros((1, hidden), dtype=dtype, device=self._device)
        self.sum(state)
        # Means of norms are in fp32, for which NCCL has a kernel of its own.
        self.sum(torch.zeros((1, 1), dtype=torch.float32, device=self._device))
        if self.place.tensors > 1:
            dist.all_reduce(state, group=self._tensors)  # of what is too large for `sum`'s other way
        if not self.place.is_first:
            self.receive(state)
        if not self.place.is_last:
            self.send(state)
        else:
            shard = torch.zeros((1, len(self.place.rows(vocab))), dtype=dtype, device=self._device)
            self.gather(shard, torch.empty((1, vocab), dtype=dtype, device=self._device))
            if self.place.tensors > 1:
                self._warm_sampling(vocab, dtype)
        self.share(torch.zeros(1, dtype=torch.int32, device=self._device))
        self.least(0)

    def _warm_sampling(self, vocab: int, dtype: torch.dtype) -> None:
        """What ranks exchange that sample together."""
        self.sum(torch.zeros((1, self.place.tensors * PEAK_DIGITS), dtype=PEAKS_DTYPE, device=self._device))
        rows = DEALT * self.place.tensors
        shards = torch.zeros((rows, len(self.place.rows(vocab))), dtype=dtype, device=self._device)
        self.deal(shards, vocab)
        self.collect(torch.zeros(DEALT, dtype=torch.int32, device=self._device), rows)

    def sum(self, x: Tensor) -> Tensor:
        """`x`, in place the sum over the ranks of this stage."""
        if self.place.tensors == 1 or self._quiet:
            return x
        peers = self.peers_for(x)
        if peers is not None:
            return peers.sum(x)
        if self._ordered:
            for part in x.split(ORDERED_ROWS):
                self._sum_in_order(part)
            return x
        dist.all_reduce(x, group=self._tensors)
        return x

    def _sum_in_order(self, x: Tensor) -> None:
        """Gathered and added here: NCCL and gloo add in an order that depends on how much there is."""
        parts = torch.empty((self.place.tensors, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(parts.flatten(0, 1), x.contiguous(), group=self._tensors)
        sums = parts[0].float()
        for part in parts[1:]:
            sums += part
        x.copy_(sums)

    def peers_for(self, x: Tensor) -> PeerSums | None:
        """What sums `x` from GPU to GPU; None where it goes another way, or nowhere. The same on all ranks."""
        return self._peers if self._peers is not None and not self._quiet and self._peers.serves(x) else None

    def gather(self, shard: Tensor, out: Tensor) -> Tensor:
        """`out [S, V]`, on the leader filled with the shards `[S, V / tensors]` of its stage; on others as it was."""
        if self.place.tensors == 1:
            return out.copy_(shard)
        if self._quiet:
            return out
        vocab = out.shape[1]
        widths = [len(even_part(vocab, self.place.tensors, index)) for index in range(self.place.tensors)]
        # Shards of one width: a vocabulary that does not divide leaves the last ranks a row short.
        if shard.shape[1] < widths[0]:
            shard = pad(shard, (0, widths[0] - shard.shape[1]))
        parts = [torch.empty_like(shard) for _ in widths] if self.place.leads else None
        dist.gather(shard, parts, dst=LEADER, group=self._tensors)
        at = 0
        for part, width in zip(parts or (), widths, strict=False):
            out[:, at : at + width] = part[:, :width]
            at += width
        return out

    def deal(self, shard: Tensor, vocab: int) -> Tensor:
        """Each rank's `[S, V / tensors]` → all logits `[R, V]` of the rows that are dealt to this one."""
        place = self.place
        rows = [len(dealt_part(len(shard), place.tensors, index)) for index in range(place.tensors)]
        widths = [len(even_part(vocab, place.tensors, index)) for index in range(place.tensors)]
        mine, own = rows[place.tensor], widths[place.tensor]
        came = shard.new_empty(mine * vocab)
        if not self._quiet:
            takes, gives = [mine * width for width in widths], [count * own for count in rows]
            dist.all_to_all_single(came, shard.reshape(-1), takes, gives, group=self._tensors)
        parts = came.split([mine * width for width in widths])
        return torch.cat([part.view(mine, width) for part, width in zip(parts, widths, strict=True)], dim=1)

    def collect(self, tokens: Tensor, count: int) -> Tensor:
        """The tokens of the rows that are dealt to each rank, int32 → those of all `count` rows."""
        each = most_dealt(count, self.place.tensors)
        everyone = tokens.new_empty(self.place.tensors * each)
        if len(tokens) < each:
            tokens = pad(tokens, (0, each - len(tokens)))
        if not self._quiet:
            dist.all_gather_into_tensor(everyone, tokens, group=self._tensors)
        return everyone[:count]

    def send(self, state: Tensor) -> None:
        """Give the residual stream `[T, H]` to the next stage."""
        if not self._quiet:
            dist.send(state, self.place.after)

    def receive(self, state: Tensor) -> Tensor:
        """`state`, filled with the residual stream `[T, H]` of the stage before."""
        if not self._quiet:
            dist.recv(state, self.place.before)
        return state

    def share(self, tokens: Tensor) -> Tensor:
        """`tokens [S]` int32, on every rank those of the leader."""
        if not self._quiet:
            dist.broadcast(tokens, LEADER)
        return tokens

    def share_all(self, numbers: list[int]) -> list[int]:
        """On every rank the leader's `numbers`, int32, however many there are. Waits: between steps alone."""
        count = int(self.share(torch.tensor([len(numbers)], dtype=torch.int32, device=self._device)).item())
        room = numbers if self.place.leads else [0] * count
        return self.share(torch.tensor(room, dtype=torch.int32, device=self._device)).tolist() if count else []

    def told_by(self, rank: int, words: str) -> str:
        """On every rank the words of one of them, cut short where they are many. Waits: between steps alone."""
        said = words.encode()[:MOST_WORDS].ljust(MOST_WORDS, b"\0")
        told = torch.tensor(list(said), dtype=torch.uint8, device=self._device)
        dist.broadcast(told, rank)
        return bytes(told.tolist()).rstrip(b"\0").decode(errors="ignore")

    def least(self, number: int) -> int:
        """The least of all ranks' numbers. Waits: at the start, and between steps."""
        value = torch.tensor([number], dtype=torch.int64, device=self._device)
        dist.all_reduce(value, op=dist.ReduceOp.MIN)
        return int(value.item())

    def close(self) -> None:
        """Leave. On GPUs a group that has lost a rank is left behind instead: leaving it would wait for that rank.

        Graphs that hold exchanges must be gone: NCCL waits for them.
        """
        if self.row_shares is not None:
            self.row_shares.close(self._meet)
            self.row_shares = None
        if self._peers is not None:
            self._peers.close(self._meet)
            self._peers = None
        dist.destroy_process_group()
        # The last references: a group that ends later would look for the store where the ranks met.
        del self._tensors, self._store
