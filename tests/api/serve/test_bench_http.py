"""`stoker bench http`: it measures what it should, and a wrong answer fails the run."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from api_server import Running
from fake_engine import EOS

from stoker_runtime.bench import cli, http_load
from stoker_runtime.bench.http_client import Connection, LoadError, Result
from stoker_runtime.request import Request

SMALL = ["--n", "2,3", "--input-len", "8", "--output-len", "5", "--vocab", "300", "--rounds", "2"]


def test_table_and_json(server: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.engine.delay = 0.005
    file = tmp_path / "out.json"
    assert cli.main(["http", "--url", server.url, *SMALL, "--processes", "2", "--json", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"byte-model at {server.url}: 8 tokens in, 5 out; times in ms"
    assert [line.split()[:2] for line in lines[2:]] == [["2", "4"], ["3", "6"]]
    rows = json.loads(file.read_text())["rows"]
    for row in rows:
        assert row["tok_s"] == pytest.approx(5 * row["req_s"])
        assert 5 <= row["ttft_p50"] <= row["e2e_p50"]
        assert row["itl_p50"] >= 4
    prompts = {request.prompt_token_ids for request in server.engine.requests}
    assert len(prompts) == len(server.engine.requests) == 2 + 4 + 3 + 6
    assert all(request.params.ignore_eos for request in server.engine.requests)


@pytest.mark.parametrize(
    ("breakage", "says"),
    [
        (lambda engine: setattr(engine, "full", True), "status 429"),
        (lambda engine: setattr(engine, "fail_after", 0), "status 500"),
    ],
)
def test_errors_fail_the_run(server: Running, capsys: pytest.CaptureFixture[str], breakage: object, says: str) -> None:
    breakage(server.engine)  # type: ignore[operator]
    assert http_load.main(["--url", server.url, *SMALL]) == 1
    assert says in capsys.readouterr().err


def test_error_in_mid_stream_fails_the_request(server: Running) -> None:
    server.engine.fail_after, server.engine.delay = 2, 0.005
    with pytest.raises(LoadError, match="The step failed"):
        one_request(server)


def test_short_answers_are_refused(server: Running) -> None:
    def short(request: Request) -> list[int]:
        return [65, EOS]

    server.engine.script = short
    load = http_load.Load(server.url, "byte-model", 300, 8, 5)
    result = one_request(server, ignore_eos=False)
    with pytest.raises(LoadError, match="got 8 \\+ 2"):
        http_load.check(result, load)
    with pytest.raises(LoadError, match="finished with 'stop'"):
        http_load.check(Result(0.0, tokens=5, prompt_tokens=8, finish="stop"), load)


def one_request(server: Running, **changes: object) -> Result:
    body = {"prompt": [1] * 8, "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}, **changes}

    async def run() -> Result:
        connection = Connection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), {})
        try:
            return await connection.complete(json.dumps(body).encode())
        finally:
            connection.close()

    return asyncio.run(run())


def test_events_are_counted_against_tokens() -> None:
    # Nine tokens in four events, and three of which none had text yet.
    results = [
        Result(0.0, arrivals=[1.0, 2.0, 3.0, 4.0], ended=5.0, tokens=9),
        Result(0.5, arrivals=[], ended=4.5, tokens=3),
    ]
    row = http_load.summarize([(results, 0.5)], clients=2)
    assert row.event_tokens == 12 / 4
    assert len(http_load.line(row)) == len(http_load.HEADINGS) * http_load.WIDTH


def test_quantiles() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (http_load.quantile(values, 0.5), http_load.quantile(values, 0.95)) == (51.0, 96.0)
    assert http_load.quantile([], 0.5) == 0.0


def test_unknown_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["htp"]) == 2
    assert "did you mean 'http'" in capsys.readouterr().err
    assert cli.main([]) == 0
    assert "engine" in capsys.readouterr().out


def test_no_server_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert http_load.main(["--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr().err
    assert "no server at http://127.0.0.1:9" in said
    assert "urlopen" not in said


def test_the_servers_own_words_are_shown(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    assert http_load.main(["--url", server.url, "--model", "other", *SMALL]) == 1
    assert "status 404: The model `other` does not exist." in capsys.readouterr().err


def test_numbers_of_clients_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("x", "0", "1,,2"):
        with pytest.raises(SystemExit) as stopped:
            http_load.main(["--n", wrong])
        assert stopped.value.code == 2
        assert "no list of whole numbers" in capsys.readouterr().err
