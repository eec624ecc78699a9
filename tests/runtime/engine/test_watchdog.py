"""What counts as hung."""

from __future__ import annotations

from stoker_runtime.engine.watchdog import Watchdog


def tick(watchdog: Watchdog, start: float, seconds: float, *, pending: bool, computing: bool = False) -> str | None:
    reason = None
    for count in range(int(seconds / 0.25) + 1):
        reason = watchdog.tick(start + count * 0.25, pending=pending, computing=computing)
    return reason


def make() -> Watchdog:
    return Watchdog(interval=0.25, silence_seconds=5.0, hang_seconds=30.0)


def test_a_long_step_is_not_a_hang() -> None:
    watchdog = make()
    watchdog.heard(1)
    assert tick(watchdog, 0, 29.0, pending=True) is None
    watchdog.heard(2)
    assert tick(watchdog, 29.0, 29.0, pending=True) is None


def test_work_without_steps_is_a_hang_even_with_heartbeats() -> None:
    watchdog = make()
    reason = None
    for second in range(32):
        watchdog.heard(1)
        reason = tick(watchdog, second, 0.75, pending=True)
    assert reason is not None
    assert "took no step" in reason


def test_silence_without_work_is_a_hang() -> None:
    watchdog = make()
    watchdog.heard(1)
    assert tick(watchdog, 0, 4.5, pending=False) is None
    assert "no heartbeat" in (tick(watchdog, 4.5, 1.0, pending=False) or "")
    watchdog.heard(1)
    assert watchdog.tick(6.0, pending=False) is None


def test_time_without_work_does_not_count_as_stall() -> None:
    watchdog = make()
    for second in range(100):
        watchdog.heard(1)
        assert tick(watchdog, second, 0.75, pending=False) is None
    assert tick(watchdog, 100, 10.0, pending=True) is None


def test_a_stall_of_the_watcher_is_not_the_engines() -> None:
    watchdog = make()
    watchdog.heard(1)
    watchdog.tick(0.0, pending=True)
    assert watchdog.tick(1000.0, pending=True) is None
    assert watchdog.tick(2000.0, pending=False) is None


def test_a_process_that_computes_is_given_ten_times_as_long() -> None:
    watchdog = make()
    watchdog.heard(1)
    assert tick(watchdog, 0, 290.0, pending=True, computing=True) is None
    assert tick(watchdog, 290.0, 20.0, pending=True, computing=True) is not None
    stopped = make()
    stopped.heard(1)
    assert tick(stopped, 0, 100.0, pending=True, computing=True) is None
    assert tick(stopped, 100.0, 31.0, pending=True, computing=False) is not None
