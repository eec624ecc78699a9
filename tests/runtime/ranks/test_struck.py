"""A rank that runs out of memory, loses its device or never answers, whichever rank it is: the server's streams end
with an error, its processes end, and it exits with a status that makes whoever runs it start it again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.ranks.server import Server
from tests.runtime.ranks.stream import Stream, struck
from tests.runtime.ranks.test_faults import PATIENCE, children, wait_for

from stoker_runtime.process.stat import process_exists

FAULTS = {"memory": "out of memory", "device": "uncorrectable ECC error", "silence": "has not ended"}
PROMISED = 5.0


@pytest.mark.matrix("fault")
@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_rank_ends_streams_and_server(fault: str, rank: int, tmp_path: Path) -> None:
    variables = struck(fault, rank, tmp_path)
    arguments = ("--device", "cpu", "--tensor-parallel-size", "2", "--cpu-threads", "1")
    server = Server("shape:tiny", *arguments, **variables)
    try:
        url = server.wait_ready(PATIENCE)
        (leader,) = children(server.pid)
        ranks = [leader, *children(leader)]
        assert len(ranks) == 2
        stream = Stream(url, "shape:tiny", 2000, PATIENCE)
        stream.wait_begun()
        (tmp_path / "now").touch()
        stream.wait_ended()
        assert len(stream.errors) == 1, server.log
        seconds = stream.ended - float((tmp_path / "struck").read_text())
        print(f"the stream ended after {seconds:.2f} s")
        # A machine with fewer cores than processes that compute is given as long again.
        assert seconds < 2 * PROMISED
        assert server.exit_status(PATIENCE) == 1
        wait_for(lambda: not any(map(process_exists, ranks)), "a rank is left")
        assert FAULTS[fault] in server.log
    finally:
        server.close()
