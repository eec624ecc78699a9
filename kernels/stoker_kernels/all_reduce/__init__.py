"""Sums over the GPUs of one machine, by kernels that write to each other's memory.

`peer_sums.py` is the public side of sums within a launch, `row_shares.py` of those whose rows ranks share out;
`memory.py` is what peers write to, `sm90_all_reduce.py` the launches, `rule.py` which way takes which size,
`reference.py` the oracle.
Must never know: processes, communicators (how ranks tell each other anything arrives as a function), models.
"""

from stoker_kernels.all_reduce.memory import Exchange, NoPeers
from stoker_kernels.all_reduce.peer_sums import PeerSums, peer_sums
from stoker_kernels.all_reduce.row_shares import RowShares, row_shares
from stoker_kernels.all_reduce.rule import LEAST_SHARE, Share, largest

__all__ = [
    "LEAST_SHARE",
    "Exchange",
    "NoPeers",
    "PeerSums",
    "RowShares",
    "Share",
    "largest",
    "peer_sums",
    "row_shares",
]
