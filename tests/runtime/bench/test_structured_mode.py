"""`stoker bench engine --structured`: it runs, it validates, and a wrong output would be seen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from stoker_runtime.bench import engine_mode
from stoker_runtime.bench.structured_mode import choose_schema, records_schema, validate_records
from stoker_runtime.errors import ConfigError

GOOD = {"id": 5, "name": "ab", "kind": "garden", "open": True}


@pytest.mark.parametrize(
    "value",
    [
        GOOD,
        [],
        [GOOD, GOOD],
        [{**GOOD, "id": 1000}],
        [{**GOOD, "id": True}],
        [{**GOOD, "name": "a1"}],
        [{**GOOD, "name": "a" * 13}],
        [{**GOOD, "kind": "barn"}],
        [{**GOOD, "open": 1}],
        [{**GOOD, "more": 1}],
    ],
)
def test_a_wrong_record_is_seen_by_both_opinions(value: Any) -> None:
    validate_records([GOOD], 1)
    jsonschema.validate([GOOD], records_schema(1))
    with pytest.raises(ValueError, match=r"."):
        validate_records(value, 1)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, records_schema(1))


def test_a_schema_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    schema, validate = choose_schema(file, 100)
    assert schema == {"type": "integer"}
    validate(3)
    with pytest.raises(ValueError, match="not of type"):
        validate("x")
    for text in ("{", '{"type": 5}'):
        file.write_text(text)
        with pytest.raises(ConfigError, match="--json-schema"):
            choose_schema(file, 100)


def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "rows.json"
    sizes = ["--max-model-len", "256", "--input-len", "8", "--output-len", "90", "--device", "cpu"]
    argv = ["--shape", "tiny", "--structured", "--n", "1,3", "--json", str(written), *sizes]
    assert engine_mode.main(argv) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["N", "tokens", "free", "tok/s", "JSON", "tok/s", "cost", "valid", "cut"]
    assert [row.split()[-2:] for row in rows] == [["1/1", "0"], ["3/3", "0"]]
    found = json.loads(written.read_text())["rows"]
    assert [row["n"] for row in found] == [1, 3]
    assert all(row["cost"] == pytest.approx(1 - row["json_tok_s"] / row["free_tok_s"]) for row in found)
