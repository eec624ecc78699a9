"""Sums over the ranks of one machine's GPUs, alone, or with the addition to the residual stream and the norm after it.

Invariants: a call queues one kernel on the current stream, allocates nothing but its result and never waits for the
host, so that it can be captured; all ranks make the same calls in the same order, with the same shapes, and get the
same bits, run after run.
Knows nothing of what is summed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from stoker_kernels.all_reduce.memory import Exchange, Inboxes, open_inboxes
from stoker_kernels.all_reduce.rule import shots_for
from stoker_kernels.all_reduce.sm90_all_reduce import Norm, launch_all_reduce, load
from stoker_kernels.quant import Quantized


class PeerSums:
    """One rank's end. `peer_sums` makes one."""

    def __init__(self, inboxes: Inboxes) -> None:
        self._inboxes = inboxes

    def serves(self, x: Tensor) -> bool:
        """Whether the kernels take `x [T,H]`; what they do not is for another way to sum. The same on all ranks."""
        return x.dtype is torch.bfloat16 and x.is_contiguous() and self._shots(x) is not None

    def sum(self, x: Tensor) -> Tensor:
        """`x [T,H]`, in place its sum over the ranks."""
        launch_all_reduce(self._inboxes, self._taken(x), x, x)
        return x

    def sum_add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`residual [T,H] += sum of x [T,H]` in place, then the norm of the rounded stream, in `x`."""
        launch_all_reduce(self._inboxes, self._taken(x), x, x, Norm(residual, weight, eps))
        return x

    def sum_add_rms_norm_quant(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Quantized:
        """`sum_add_rms_norm`, then fp8 e4m3 `[T,H]` with one scale a token `[T,1]`: amax / 448."""
        data = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
        scale = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
        launch_all_reduce(self._inboxes, self._taken(x), x, data, Norm(residual, weight, eps, scale))
        return Quantized(data, scale)

    def close(self, exchange: Exchange) -> None:
        """Give the memory back. Every rank calls it, none while a sum is under way."""
        self._inboxes.memory.close(self._inboxes.state.device, exchange)

    def _shots(self, x: Tensor) -> int | None:
        return shots_for(x.shape[0], x.shape[1] * x.element_size(), self._inboxes.memory.ranks)

    def _taken(self, x: Tensor) -> int:
        shots = self._shots(x)
        if shots is None or not self.serves(x):
            raise ValueError(f"all_reduce: {x.dtype} {tuple(x.shape)} is not what the kernels take: ask `serves` first")
        return shots


def peer_sums(device: torch.device, rank: int, ranks: int, exchange: Exchange) -> PeerSums:
    """The end of rank `rank` of `ranks`, once all have opened each other's memory and loaded the kernels.

    Every rank calls it, and on every one it comes to the same end. Raises NoPeers with the reason where the kernels
    cannot run: one GPU does not reach another's memory over NVLink, is no Hopper, or a cubin is missing.
    """
    return PeerSums(open_inboxes(device, rank, ranks, exchange, functools.partial(load, device)))
