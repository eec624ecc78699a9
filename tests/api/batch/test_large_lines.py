"""Lines of megabytes: read in steps while nobody else waits, bounded, and their results found again."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

from api_server import CLIENT
from batch_server import CHAT, batch_server, begin, client_of, request_line, wait_for
from waiting import FOX, MOST_SECONDS, TRIES, watched_stream

from stoker_runtime.api.batch.lines import ResultFile, raw_lines

RANDOM = random.Random()


def large_line(at: int) -> dict[str, Any]:
    """As large as a body may be, in numbers, many values or one text."""
    ids = [RANDOM.randrange(250) for _ in range(2_000_000)]
    kinds: list[dict[str, Any]] = [
        {"metadata": {"a": ids}},
        {"stop": ["é😀\n" * 700_000]},
        {"chat_template_kwargs": {"x": [{"a": 1}] * 60_000}},
    ]
    return request_line(f"line-{at}", **kinds[at % len(kinds)])


def test_nobody_waits_for_large_lines(tmp_path: Path) -> None:
    with batch_server(tmp_path) as host, client_of(host) as client:
        lines = [large_line(at) for at in range(3)]
        name = client.files.create(
            file=("in.jsonl", "\n".join(json.dumps(line, separators=(",", ":")) for line in lines).encode()),
            purpose="batch",
        ).id
        lines.clear()
        found: list[tuple[float, float]] = []
        for _ in range(TRIES):
            host.engine.delay = 0.005
            with watched_stream(host.url, FOX) as gaps:
                batch = client.batches.create(input_file_id=name, endpoint=CHAT, completion_window="24h")
                slowest = 0.0
                while client.batches.retrieve(batch.id).status not in ("completed", "failed"):
                    began = time.perf_counter()
                    CLIENT.get(f"{host.url}/health")
                    slowest = max(slowest, time.perf_counter() - began)
            found.append((slowest, gaps[-1]))
            counts = client.batches.retrieve(batch.id).request_counts
            assert counts is not None, client.batches.retrieve(batch.id)
            assert counts.total == 3
            if min(each[0] for each in found) < MOST_SECONDS and min(each[1] for each in found) < MOST_SECONDS:
                return
        raise AssertionError(f"slowest /health and longest gap by try: {found}")


def test_a_line_beyond_the_largest_body_is_refused_by_its_number(tmp_path: Path) -> None:
    most = RANDOM.randrange(2000, 90_000)
    with batch_server(tmp_path, max_body_bytes=most) as host, client_of(host) as client:
        long = request_line("b", stop=["x" * (most - 100)])
        batch = wait_for(client, begin(client, [request_line("a"), long, request_line("c")]).id, "failed")
        assert batch.errors is not None
        (error,) = batch.errors.data or ()
        assert (error.code, error.line) == ("line_too_large", 2)
        assert f"more than {most} bytes" in str(error.message)


def test_lines_of_any_length_and_ending(tmp_path: Path) -> None:
    """Whatever the bound: what is within it comes whole, of what is longer too much comes to be taken for a line."""
    for _ in range(200):
        lines = [bytes(RANDOM.choices(b"ab \t", k=RANDOM.randrange(40))) for _ in range(RANDOM.randrange(7))]
        ending = RANDOM.choice((b"\n", b"\r\n"))
        (tmp_path / "in").write_bytes(ending.join(lines) + RANDOM.choice((b"", ending)))
        most = RANDOM.randrange(1, 50)
        found = dict(raw_lines(tmp_path / "in", most))
        for number, line in enumerate(lines, 1):
            if len(line) <= most:
                assert found.get(number, b"") == line.strip(), (most, lines)
            else:
                assert len(found.get(number, b"")) > most or found.get(number, b"") == line.strip(), (most, lines)


def test_results_are_found_again_whatever_their_ids(tmp_path: Path) -> None:
    """Also those that an earlier version wrote."""
    ids = {"".join(RANDOM.choices('ab"\\{},é😀\n\u2028', k=RANDOM.randrange(1, 20))) for _ in range(100)}
    file = ResultFile(tmp_path / "out.jsonl")
    with (tmp_path / "old.jsonl").open("w") as old:
        for name in ids:
            entry = {"id": "batch_req_1", "custom_id": name, "response": {"body": {"custom_id": "no"}}, "error": None}
            file.append(name, entry)
            old.write(json.dumps(entry) + "\n")
    assert ResultFile(tmp_path / "out.jsonl").done == ResultFile(tmp_path / "old.jsonl").done == ids


def test_half_a_character_is_no_id(tmp_path: Path) -> None:
    with batch_server(tmp_path) as host, client_of(host) as client:
        batch = wait_for(client, begin(client, [request_line("\ud83d")]).id, "failed")
        assert batch.errors is not None
        assert [each.param for each in batch.errors.data or ()] == ["custom_id"]
