"""A process in which Triton interprets, which runs a pytest of its own for each file that it is given.

It imports once what every file needs, seconds of work, and forks: what a kernel does to its process ends with its file.
Reads of stdin a line of arguments as JSON, a list of strings; after the run it writes its status, a number, to stdout.
The run's own output goes to the file that the first argument names.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import hypothesis  # noqa: F401
import pytest
import pytest_asyncio  # noqa: F401
import pytest_timeout  # noqa: F401
import torch._dynamo  # noqa: F401
import triton.language
import triton.runtime.interpreter  # noqa: F401

# Others are installed that no kernel's test needs. What these assert is not what is tested.
PLUGINS = ("-p", "pytest_asyncio.plugin", "-p", "pytest_timeout", "-W", "ignore::pytest.PytestAssertRewriteWarning")


def run(output: str, arguments: list[str]) -> int:
    """The status of a pytest with these arguments, below zero the signal that ended it."""
    child = os.fork()
    if child == 0:
        target = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(target, stream)
        status = -1
        try:
            status = pytest.main([*PLUGINS, *arguments])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status & 255)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    for line in sys.stdin:
        output, *arguments = json.loads(line)
        print(run(output, arguments), flush=True)
