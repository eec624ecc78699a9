"""A rank's process that outlives its leader's model: follows one `RankStart` after another from its standard input.

Importing torch takes most of a rank's start; here once for all tests. Everything else is the rank's own code.
"""

from __future__ import annotations

import ctypes
import gc
import pickle
import signal
import sys
import traceback

from stoker_runtime.ranks.follower import PR_SET_PDEATHSIG, follow_leader


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sys.stdout.write("here\n")
    sys.stdout.flush()
    while True:
        try:
            start = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            follow_leader(start)
        except Exception:
            traceback.print_exc()
            sys.exit(1)
        gc.unfreeze()
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
