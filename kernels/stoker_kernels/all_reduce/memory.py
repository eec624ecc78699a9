"""The memory by which ranks of one machine sum: of each GPU a piece that its peers have mapped and write to.

Ranks tell each other twice: what they have, then whether they could open it, so that all use the kernels or none does.
An inbox is full of the word that stands for nothing when its handle is given away.
Invariants: nothing of a rank that could not take part is left open.
Knows nothing of kernels, nor of how ranks tell each other anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stoker_kernels.all_reduce.rule import MOST_RANKS, inbox_bytes, largest
from stoker_kernels.launch.cuda import CudaError, checked, missing_cubin
from stoker_kernels.launch.dispatch import sm_of

Exchange = Callable[[str], Sequence[str]]
"""One rank's text → those of all ranks, in their order."""
ABSENT = 0x80008000  # two negative zeros, as in csrc/sm90_all_reduce.cuh
STATE_WORDS = 8  # AllReduceState there
STEM, ARCH, SM = "sm90_all_reduce", "sm_90a", 90


class NoPeers(RuntimeError):
    """These GPUs cannot sum by their own kernels; says why."""


@dataclass(slots=True)
class PeerMemory:
    """Where each rank's piece lies in this rank's address space; `own` is to be freed."""

    rank: int
    addresses: list[int]
    own: int = 0
    _opened: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.addresses)

    def close(self, device: torch.device, exchange: Exchange) -> None:
        """Unmap the peers' and free the own one, once every rank has unmapped it. Every rank calls it."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        while self._opened:
            from cuda.bindings import driver

            checked("cuIpcCloseMemHandle", driver.cuIpcCloseMemHandle(self._opened.pop()))
        exchange("unmapped")
        _free(self.own)
        self.own = 0


@dataclass(slots=True)
class Inboxes:
    """Each rank's inbox; `state` is this rank's own, `capacity` the bytes of the largest message."""

    memory: PeerMemory
    state: Tensor
    capacity: int


def open_inboxes(
    device: torch.device, rank: int, ranks: int, exchange: Exchange, prepare: Callable[[], None]
) -> Inboxes:
    """As `open_memory`, of what the sums' kernels write to."""
    memory = open_memory(device, rank, ranks, exchange, inbox_bytes(ranks), ABSENT, prepare)
    return Inboxes(memory, torch.zeros(STATE_WORDS, dtype=torch.int32, device=device), largest(ranks))


def open_memory(
    device: torch.device, rank: int, ranks: int, exchange: Exchange, size: int, word: int, prepare: Callable[[], None]
) -> PeerMemory:
    """Make `size` bytes full of `word`, and map the others', after `prepare`, which may raise CudaError.

    Every rank calls it with the same size; raises NoPeers on all of them or on none.
    """
    own, offer = 0, {"reason": _unfit(device, ranks)}
    if offer["reason"] is None:
        try:
            prepare()
            own, handle = _make(size, word)
            offer = {"handle": handle.hex(), "bus": _bus_of(device)}
        except CudaError as error:
            offer = {"reason": f"rank {rank} cannot take part: {error}"}
    offers = [json.loads(text) for text in exchange(json.dumps(offer))]
    memory = PeerMemory(rank, [own] * ranks, own)
    refused = next((each["reason"] for each in offers if each.get("reason")), None)
    if refused is None:
        refused = _map(memory, device, offers)
        refused = next((text for text in exchange(refused or "") if text), None)
    if refused is not None:
        memory.close(device, exchange)
        raise NoPeers(refused)
    return memory


def _unfit(device: torch.device, ranks: int) -> str | None:
    """Why this rank cannot take part, from what it knows by itself."""
    if ranks > MOST_RANKS:
        return f"{ranks} ranks are more than {MOST_RANKS}"
    if sm_of(device) != SM:
        return f"the kernels are for sm_{SM}, and {device} is sm_{sm_of(device)}"
    return missing_cubin(STEM, ARCH)


def _make(size: int, word: int) -> tuple[int, bytes]:
    """`size` bytes full of `word`: (their address, what others open them by)."""
    from cuda.bindings import driver

    address = int(checked("cuMemAlloc", driver.cuMemAlloc(size)))
    try:
        checked("cuMemsetD32", driver.cuMemsetD32(address, word, size // 4))
        torch.cuda.synchronize()
        handle = checked("cuIpcGetMemHandle", driver.cuIpcGetMemHandle(address))
    except CudaError:
        _free(address)
        raise
    return address, bytes(handle.reserved)


def _free(address: int) -> None:
    """Give a piece back; 0 is none."""
    if address:
        from cuda.bindings import driver

        checked("cuMemFree", driver.cuMemFree(address))


def _bus_of(device: torch.device) -> str:
    from cuda.bindings import driver

    text = checked("cuDeviceGetPCIBusId", driver.cuDeviceGetPCIBusId(32, device.index or 0))
    return bytes(text).split(b"\0")[0].decode()


def _map(memory: PeerMemory, device: torch.device, offers: list[dict[str, Any]]) -> str | None:
    """Open what the others offered; why that failed, if it did."""
    from cuda.bindings import driver

    lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    for index, offer in enumerate(offers):
        if index == memory.rank:
            continue
        try:
            apart = _apart(device.index or 0, offer["bus"])
            if apart is not None:
                return apart
            handle = driver.CUipcMemHandle()
            handle.reserved = bytes.fromhex(offer["handle"])
            address = int(checked("cuIpcOpenMemHandle", driver.cuIpcOpenMemHandle(handle, lazily)))
        except CudaError as error:
            return f"rank {memory.rank} cannot open the memory of rank {index}: {error}"
        memory.addresses[index] = address
        memory._opened.append(address)
    return None


def _apart(own: int, bus: str) -> str | None:
    """Why one GPU cannot write to another as to its own memory: over PCIe alone it has no native atomics there."""
    from cuda.bindings import driver

    other = checked("cuDeviceGetByPCIBusId", driver.cuDeviceGetByPCIBusId(bus.encode()))
    if int(other) == own:
        return None  # of two ranks on one GPU the driver gives no attribute
    kinds = driver.CUdevice_P2PAttribute
    for kind, meaning in (
        (kinds.CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, "cannot reach each other's memory"),
        (kinds.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED, "are joined by PCIe alone"),
    ):
        if not checked("cuDeviceGetP2PAttribute", driver.cuDeviceGetP2PAttribute(kind, own, other)):
            return f"GPU {own} and the one at {bus} {meaning}"
    return None
