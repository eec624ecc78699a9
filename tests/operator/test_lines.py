"""No client writes a line of the operator's log."""

from __future__ import annotations

import logging
import random
import re
import sys

import pytest

from stoker_operator.lines import LineFormatter
from stoker_operator.process import write_logs

FORGED = "/v1/x\n2026-01-01 00:00:00,000 ERROR stoker_operator gone\x1b[2J\u2028\u202eend"


def said(message: str, *values: object, **more: object) -> str:
    record = logging.LogRecord("stoker_operator.activator.handler", logging.WARNING, "f", 1, message, values, None)
    record.__dict__.update(more)
    return LineFormatter().format(record)


def test_control_characters_are_escaped() -> None:
    line = said("%s: %s", "web/one", FORGED)
    assert line.endswith(
        "web/one: /v1/x\\n2026-01-01 00:00:00,000 ERROR stoker_operator gone\\x1b[2J\\u2028\\u202eend"
    )
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} WARNING stoker_operator\.activator\.handler web", line)
    assert said("%s", "é 中 😀").endswith(" é 中 😀")


def test_no_character_forges_anything() -> None:
    """Of all that there are, lone halves of pairs included."""
    seed = random.randrange(1 << 32)
    pick = random.Random(seed)
    for _ in range(200):
        ends = [pick.choice((0x300, 0x2100, 0x110000)) for _ in range(40)]
        assert said("%s", "".join(chr(pick.randrange(end)) for end in ends)).isprintable(), seed


def test_a_traceback_is_indented() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError:
        lines = said("failed", exc_info=sys.exc_info()).split("\n")
    assert len(lines) > 3
    assert all(line.startswith("    ") for line in lines[1:])
    assert said("here", stack_info="a\rb\nc").endswith("here\n    a\\rb\n    c")


def test_every_process_logs_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    level = logging.root.level
    try:
        write_logs("warning")
        logging.getLogger("web").warning("GET %s", FORGED)
    finally:
        logging.root.setLevel(level)
    assert capsys.readouterr().err.count("\n") == 1
