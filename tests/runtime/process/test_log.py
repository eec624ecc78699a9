"""Lines of the log: one a record, with a date, whatever a client put into it."""

from __future__ import annotations

import json
import logging
import random
import re
import sys

import pytest

from stoker_runtime.process.log import JsonFormatter, LineFormatter

FORGED = "/a\r\n2031-05-06 07:08:09.010 ERROR server: all is lost\x1b[2J\x85\u2028\u202e\x7f end"


def record(message: str, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("stoker_runtime.serve.server", logging.INFO, "f.py", 1, "%s asked", (message,), None)
    made.__dict__.update(extra)
    return made


@pytest.mark.parametrize("formatter", [LineFormatter(), LineFormatter("api 3"), JsonFormatter("api 3")])
def test_a_record_is_one_printable_line(formatter: logging.Formatter) -> None:
    line = formatter.format(record(FORGED, request_id="r\n1"))
    assert line.isprintable()
    assert len(line.splitlines()) == 1


@pytest.mark.parametrize("formatter", [LineFormatter(), LineFormatter("api 3"), JsonFormatter("api 3")])
def test_no_character_forges_anything(formatter: logging.Formatter) -> None:
    """Of all that there are, lone halves of pairs included."""
    seed = random.randrange(1 << 32)
    pick = random.Random(seed)
    for _ in range(300):
        ends = [pick.choice((0x300, 0x2100, 0x110000)) for _ in range(40)]
        said = "".join(chr(pick.randrange(end)) for end in ends)
        line = formatter.format(record(said, request_id=said[::-1]))
        assert line.isprintable(), seed
        if isinstance(formatter, JsonFormatter):
            assert json.loads(line)["message"] == f"{said} asked", seed


def test_what_was_said_can_be_read() -> None:
    line = LineFormatter().format(record("Zürich 🙂 C:\\x\tand\n"))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO serve\.server: Zürich 🙂 C:\\x\\tand\\n asked", line
    )
    assert json.loads(JsonFormatter().format(record(FORGED)))["message"] == f"{FORGED} asked"


def test_a_traceback_forges_no_line() -> None:
    try:
        raise ValueError("bad\n2031-05-06 07:08:09.010 ERROR server: all is lost")
    except ValueError:
        made = record("x", exc_info=sys.exc_info())
    first, *rest = LineFormatter().format(made).split("\n")
    assert first.endswith("x asked")
    assert len(rest) > 3
    assert all(line.startswith("    ") for line in rest)
    assert "\n" not in JsonFormatter().format(made)
