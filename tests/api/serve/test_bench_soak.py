"""`stoker bench soak` against servers that hold, and against servers that do not."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from api_server import Running, wait_until

from stoker_runtime.bench import cli
from stoker_runtime.bench.soak import faults, mode
from stoker_runtime.bench.soak.held import look
from stoker_runtime.bench.soak.kinds import KINDS
from stoker_runtime.bench.soak.load import Load, Plan
from stoker_runtime.bench.soak.lone import differing_texts
from stoker_runtime.bench.soak.tally import Sampled, Tally
from stoker_runtime.bench.soak.visit import Facts

SMALL = ["--device", "cpu", "--max-model-len", "640", "--max-num-seqs", "8", "--cpu-kv-gb", "0.1"]
# Other work on the same machine stops a server for moments, so no bound on times or memory is near.
LOOSE = ["--drift", "1000", "--growth-mib", "400", "--patience", "120"]


def test_a_real_server_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "soak.json"
    flags = ["--seconds", "4", "--streams", "5", "--output-len", "24", "--json", str(file), *LOOSE]
    status = cli.main(["soak", "shape:tiny", *flags, "--serve", *SMALL])
    told = capsys.readouterr()
    assert status == 0, told
    report = json.loads(file.read_text())
    assert report["passed"]
    assert report["left_out"] == {}
    found = {finding["name"]: finding["held"] for finding in report["findings"]}
    assert {name for name, held in found.items() if held} >= {"answers", "held", "end"}
    assert {each["end"] for each in report["requests"]} <= {"ok", "full"}
    assert report["tokens"] > 0


def test_a_server_that_fails_is_found(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    """The fake engine knows no schemas and no batches: they are left out by name, for it was not started here."""
    flags = ["--url", server.url, "--seconds", "2", "--streams", "3", "--output-len", "8", *LOOSE]
    server.engine.delay = 0.001
    assert cli.main(["soak", *flags]) == 0
    told = capsys.readouterr().out
    assert "batch is not served" in told
    assert "soak: passed" in told
    server.engine.fail_after = 3
    assert cli.main(["soak", *flags]) == 1
    last = capsys.readouterr().out.partition("soak: FAILED")[2].splitlines()
    assert any(line.startswith("  answers: ") and "failed" in line for line in last), last


def test_a_server_that_is_gone_afterwards_is_a_finding(
    server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Load.run

    async def then_gone(self: Load, memory_of: Any) -> None:
        await load(self, memory_of)
        monkeypatch.setattr(mode, "settled", lambda *_: look(f"http://127.0.0.1:{unused_port()}"))

    monkeypatch.setattr(Load, "run", then_gone)
    flags = ["--url", server.url, "--seconds", "20", "--requests", "7", "--output-len", "5", *LOOSE]
    assert cli.main(["soak", *flags]) == 1
    *_, before, last = capsys.readouterr().out.splitlines()
    assert before.startswith("soak: FAILED by 1 of ")
    assert last.startswith("  afterwards: the server did not answer")


def unused_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def load_of(server: Running, **changes: Any) -> Load:
    plan = {"streams": 3, "seconds": 30.0, "requests": 6, "patience": 5.0, "seed": 1, "ladder": False, **changes}
    facts = Facts("byte-model", 200, tuple(range(97, 120)), 8, 200)
    return Load(Plan(server.url, "", **plan), facts, Tally())


def run(load: Load) -> Tally:
    asyncio.run(load.run(lambda: None))
    return load.tally


def test_a_request_that_never_ends_is_told_from_a_slow_one(server: Running) -> None:
    server.engine.delay = 60.0
    tally = run(load_of(server, patience=0.5, requests=3, kinds={"whole": KINDS["whole"]}))
    assert tally.ends == {("whole", "unended"): 3}
    assert wait_until(lambda: server.state.load == 0, 30)


def test_a_full_queue_is_an_answer(server: Running) -> None:
    server.engine.full = True
    assert run(load_of(server, kinds={"stream": KINDS["stream"]})).ends.keys() == {("stream", "full")}


def test_a_bad_body_that_is_taken_is_wrong(server: Running) -> None:
    async def taken(visit: Any) -> None:
        visit.draw.choice = lambda _: {"model": "byte-model", "prompt": "a", "max_tokens": 1}
        await KINDS["bad body"].run(visit)

    tally = run(load_of(server, requests=2, kinds={"bad body": KINDS["bad body"]._replace(run=taken)}))
    assert tally.ends == {("bad body", "wrong"): 2}


def test_what_is_left_of_a_stream_that_failed_is_no_answer_to_the_next_request(server: Running) -> None:
    server.engine.fail_after = 2
    kinds = {name: KINDS[name] for name in ("stream", "bad body")}
    tally = run(load_of(server, streams=1, requests=12, kinds=kinds))
    assert {("stream", "failed"), ("bad body", "ok")} <= tally.ends.keys()
    assert tally.wrong.keys() == {("stream", "failed")}


def test_what_is_held_is_seen_while_it_is_held(server: Running) -> None:
    server.engine.delay = 60.0

    async def during() -> tuple[Any, Any]:
        before = await look(server.url)
        load = load_of(server, streams=4, patience=60.0, kinds={"stream": KINDS["stream"]})
        running = asyncio.create_task(load.run(lambda: None))
        while (held := await look(server.url)).handles < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})
        return before, held

    before, held = asyncio.run(asyncio.wait_for(during(), 30))
    assert held.beyond(before)
    assert wait_until(lambda: asyncio.run(look(server.url)).handles == 0, 30)


def test_a_text_that_comes_out_differently_is_shown(server: Running) -> None:
    body: dict[str, object] = {"model": "byte-model", "prompt": "a", "max_tokens": 9, "seed": 4}
    same, other = Sampled(body, "The quick", "length"), Sampled(body, "The quack", "length")
    assert asyncio.run(differing_texts(server.url, "", [same])) == []
    (said,) = asyncio.run(differing_texts(server.url, "", [same, other]))
    assert "character 6: 'ack' among others, 'ick' alone" in said


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ([], "exactly one"),
        (["shape:tiny", "--url", "http://127.0.0.1:1"], "exactly one"),
        (["--url", "http://127.0.0.1:1", "--faults", "kill-engine"], "--faults"),
        (["shape:tiny", "--faults", "flood"], "flood"),
        (["shape:tiny", "--pid", "7"], "--pid"),
        (["shape:tiny", "--streams", "0"], "--streams"),
        (["shape:tiny", "--streams", "900000000"], "ulimit"),
        (["--url", "https://127.0.0.1:1", "--served-model", "m"], "http://"),
    ],
)
def test_flags_that_cannot_work(flags: list[str], names: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert mode.main(flags) == 2
    assert names in capsys.readouterr().err


def test_an_api_process_is_killed_and_healed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "faults.json"
    flags = ["--faults", "kill-api", "--streams", "5", "--output-len", "12", "--ready-within", "200", *LOOSE]
    status = cli.main(["soak", "shape:tiny", *flags, "--json", str(file), "--serve", *SMALL])
    assert status == 0, capsys.readouterr()
    (healed,) = json.loads(file.read_text())["healed"]
    assert healed["fault"] == "kill-api"
    assert healed["unended"] == 0
    assert 0 < healed["ready_seconds"] < 200
    assert healed["ends"]["ok"] > 0


def test_a_disk_is_filled_to_the_last_byte() -> None:
    room = 3 * 2**20 + 12_345

    class SmallDisk:
        taken = 0

        def write(self, data: bytes) -> int:
            if self.taken + len(data) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.taken += len(data)
            return len(data)

    disk = SmallDisk()
    faults.write_all_there_is(disk)  # type: ignore[arg-type]
    assert disk.taken == room
