"""The numbers that API processes share."""

from __future__ import annotations

import errno
import os
import random

import pytest

from stoker_runtime.metrics import ServerMetrics
from stoker_runtime.process.board import ABSENT_SECONDS, ACTIVE, CELLS, LAST, ROW_BYTES, WARM, Board
from stoker_runtime.request import FinishReason


def test_every_process_tells_of_all() -> None:
    file, parent = Board.create(3)
    boards = [Board.mapped(file, 3, row) for row in range(3)]
    servers = [ServerMetrics("m", board) for board in boards]
    for count, server in enumerate(servers, 1):
        server.request_finished(FinishReason.LENGTH, 1.5, 0.5, 10, count)
        server.request_rejected()
        server.inter_token(0.02, count)
    texts = {server.expose() for server in servers}
    assert len(texts) == 1
    text = texts.pop().decode()
    assert 'vllm:request_success_total{finished_reason="length",model_name="m"} 3.0' in text
    assert 'stoker:requests_rejected_total{model_name="m"} 3.0' in text
    assert 'vllm:inter_token_latency_seconds_count{model_name="m"} 6.0' in text
    assert 'vllm:request_generation_tokens_sum{model_name="m"} 6.0' in text
    boards[0].cells[ACTIVE], boards[2].cells[ACTIVE] = 4.0, 5.0
    assert parent.total(ACTIVE) == 9.0
    parent.bury(2)
    assert boards[0].total(ACTIVE) == 4.0
    os.close(file)


def test_warm_means_all() -> None:
    file, parent = Board.create(2)
    for row in range(2):
        assert not parent.all_warm
        Board.mapped(file, 2, row).cells[WARM] = 1.0
    assert parent.all_warm
    os.close(file)


def test_a_server_is_idle_since_the_last_of_its_processes_was() -> None:
    file, parent = Board.create(3)
    assert parent.idle_seconds(1000.0) == 0.0, "before any process is warm"
    for row, when in enumerate((811.5, 903.25, 640.0)):
        Board.mapped(file, 3, row).cells[LAST] = when
    assert parent.idle_seconds(1000.0) == 96.75
    other = Board.mapped(file, 3, 2)
    other.cells[ACTIVE] = 1.0
    assert parent.idle_seconds(1000.0) == 0.0, "one is under way in another process"
    other.cells[ACTIVE] = 0.0
    assert parent.idle_seconds(903.0) == 0.0, "a process wrote since `now` was read"
    os.close(file)


def test_a_process_that_takes_over_a_row_counts_on() -> None:
    file, _ = Board.create(1)
    for _ in range(2):
        server = ServerMetrics("m", Board.mapped(file, 1, 0))
        server.request_rejected()
    assert b'stoker:requests_rejected_total{model_name="m"} 2.0' in server.expose()
    os.close(file)


def test_a_full_row_is_an_error() -> None:
    board = Board()
    with pytest.raises(ValueError, match=str(CELLS)):
        board.take(CELLS)


def test_a_board_on_a_full_disk_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without room would be a signal at its first write, in the middle of a request."""
    asked: list[tuple[int, int]] = []

    def refuse(_: int, offset: int, size: int) -> None:
        asked.append((offset, size))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space"):
        Board.create(3)
    assert asked == [(0, 3 * ROW_BYTES)]


def test_a_connection_is_for_who_has_the_fewest_and_then_for_whose_turn_it_is() -> None:
    file, first = Board.create(3)
    second, third = (Board.mapped(file, 3, row) for row in (1, 2))
    now = 1e6 * random.random()
    first.accept(random.randrange(3, 9), 2, now)
    assert first.part_of(1, now), "nobody else accepts"
    second.accept(2, 50, now)
    assert (first.part_of(1, now), second.part_of(1, now)) == (0, 1)
    third.accept(2, 49, now)
    assert (second.part_of(1, now), third.part_of(1, now)) == (0, 1)
    assert third.most_turns == 50
    third.accept(None, 49, now)
    assert second.part_of(1, now)
    first.accept(4, 3, now + 2)
    assert first.part_of(1, now + 2), "the second has not been heard of since"
    second.accept(2, 50, now + 2)
    assert not first.part_of(1, now + 2)
    first.bury(1)
    assert first.part_of(1, now + 2)
    os.close(file)


def test_of_many_connections_each_process_has_what_makes_its_share_whole() -> None:
    for _ in range(200):
        count = random.randrange(2, 7)
        file, first = Board.create(count)
        boards = [first, *(Board.mapped(file, count, row) for row in range(1, count))]
        held = [random.randrange(random.choice((1, 40))) for _ in boards]
        for board, connections in zip(boards, held, strict=True):
            board.accept(connections, random.randrange(99), 7.0)
        waiting = random.randrange(2, 300)
        parts = [board.part_of(waiting, 7.1) for board in boards]
        most = -(-(sum(held) + waiting) // count)
        assert sum(parts) >= waiting, "nobody is left without a taker"
        assert all(part == 0 or before + part <= most for before, part in zip(held, parts, strict=True))
        assert first.even_part(waiting, 7.1) == -(-waiting // count)
        os.close(file)


def test_who_is_silent_has_no_part() -> None:
    file, first = Board.create(3)
    others = [Board.mapped(file, 3, row) for row in (1, 2)]
    for board in (first, *others):
        board.accept(4, 0, 7.0)
    waiting = random.randrange(30, 90)
    assert first.part_of(waiting, 7.1) < waiting
    assert first.part_of(waiting, 7.0 + 2 * ABSENT_SECONDS) == waiting
    others[0].accept(4, 0, 7.0 + ABSENT_SECONDS)
    assert first.part_of(waiting, 7.1 + ABSENT_SECONDS) == -(-(waiting + 8) // 2) - 4
    os.close(file)
