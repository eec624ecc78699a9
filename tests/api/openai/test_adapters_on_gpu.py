"""Adapters that come and go while streams run on a GPU: no stream feels it, and none loses a token."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from api_server import CLIENT, wait_until
from server_process import FRESH, ServerProcess
from tests.api.openai.test_adapters import MOST_PAUSE, complete, load, said, unload
from waiting import TRIES

from stoker_runtime.bench.random_adapters import write_adapters
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="gpu: needs a CUDA device"),
]
SHAPE, DEVICE = "qwen2.5-7b", "cuda"
SERVED = 8
TOKENS = 1200


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of rank 64, the largest that the server takes."""
    return write_adapters(build_spec(read_source(f"shape:{SHAPE}")), 1, 64, tmp_path_factory.mktemp("large"))[0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """With eight adapters of rank 16, and one place more than they take."""
    folders = write_adapters(build_spec(read_source(f"shape:{SHAPE}")), SERVED, 16, tmp_path_factory.mktemp("adapters"))
    found = ServerProcess(
        [sys.executable, "-m", "stoker_cli", "serve", f"shape:{SHAPE}"],
        *("--device", DEVICE, "--enable-lora", "--allow-runtime-lora-updating", "--max-loras", str(SERVED + 1)),
        *("--max-lora-rank", "64", "--max-model-len", "2048"),
        *("--lora-modules", *(f"a{number}={folder}" for number, folder in enumerate(folders))),
    )  # fmt: skip
    try:
        wait_until(lambda: "ready in" in found.log or found.popen.poll() is not None, 300)
        assert "ready in" in found.log, found.log
        yield found
    finally:
        found.close()


class Stream:
    """A stream of one adapter: when each of its events came, and its tokens."""

    def __init__(self, server: ServerProcess, number: int, tokens: int) -> None:
        self.ids: list[int] = []
        self.times: list[float] = []
        self._body = {
            "model": f"a{number}", "prompt": [5 + number, 72, 101, 108], "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        self._url = f"{server.url}/v1/completions"

    def run(self) -> None:
        with CLIENT.stream("POST", self._url, json=self._body, headers=FRESH, timeout=120) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                self.times.append(time.perf_counter())
                self.ids += [token for choice in event["choices"] for token in choice["token_ids"]]

    def longest_gap(self, since: float, until: float) -> float:
        within = [at for at in self.times if since <= at <= until]
        assert len(within) > 20, "the stream has to run meanwhile"
        return max(after - before for before, after in pairwise(within))


@pytest.mark.parametrize("streams", [1, SERVED])
def test_no_stream_pauses_while_adapters_of_the_largest_rank_come_and_go(
    server: ServerProcess, large: Path, streams: int
) -> None:
    """Each pair of a load and an unload with what says something through it."""
    found: list[tuple[float, float]] = []
    while len(found) < TRIES:
        running = [Stream(server, number, TOKENS) for number in range(streams)]
        with ThreadPoolExecutor(streams) as pool:
            done = [pool.submit(each.run) for each in running]
            assert wait_until(lambda given=running: min(len(each.times) for each in given) > 50, 60)
            calm, began = running[0].times[10], time.perf_counter()
            worker = threading.Thread(target=come_and_go, args=(server, large))
            worker.start()
            worker.join()
            ended = time.perf_counter()
            for future in done:
                future.result()
        assert [len(each.ids) for each in running] == [TOKENS] * streams
        before = max(each.longest_gap(calm, began) for each in running)
        during = max(each.longest_gap(began, ended) for each in running)
        found.append((before, during))
        print(f"{streams} streams, longest gap before and during: {before * 1e3:.1f} and {during * 1e3:.1f} ms")
        if during < MOST_PAUSE:
            return
    raise AssertionError(f"the longest gaps of a stream, before and during, in seconds: {found}")


def come_and_go(server: ServerProcess, large: Path) -> None:
    for _ in range(3):
        assert load(server, "large", large).status_code == 200
        assert len(said(complete(server, "large", max_tokens=2))) == 2
        assert unload(server, "large").status_code == 200
