"""Sums over the GPUs of one machine, by kernels that write to each other's memory.

`peer_sums.py` is the public side, `memory.py` what peers write to, `sm90_all_reduce.py` the launches, `rule.py`
which kernel takes which size, `reference.py` the oracle.
Must never know: processes, communicators (how ranks tell each other anything arrives as a function), models.
"""

from stoker_kernels.all_reduce.memory import Exchange, NoPeers
from stoker_kernels.all_reduce.peer_sums import PeerSums, peer_sums
from stoker_kernels.all_reduce.rule import LARGEST

__all__ = ["LARGEST", "Exchange", "NoPeers", "PeerSums", "peer_sums"]
