"""comparison.py: what pods count, and what of it belongs to a comparison."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from stoker_operator.observe.comparison import Comparisons, Counters, Figures, read_counters

KEY, NOW = ("ns", "demo"), datetime(2026, 1, 1, 12, tzinfo=UTC)
PAGE = """# HELP vllm:request_success_total Sequences that ended, by reason
# TYPE vllm:request_success_total counter
vllm:request_success_total{model_name="m",finished_reason="stop"} 11.0
vllm:request_success_total{model_name="m",finished_reason="length"} 30.0
vllm:request_success_total{model_name="m",finished_reason="abort"} 500.0
vllm:request_success_total{model_name="m",finished_reason="error"} 2.0
stoker:requests_rejected_total{model_name="m"} 4.0
vllm:time_to_first_token_seconds_bucket{model_name="m",le="+Inf"} 41.0
vllm:time_to_first_token_seconds_count{model_name="m"} 41.0
vllm:time_to_first_token_seconds_sum{model_name="m"} 8.2
vllm:inter_token_latency_seconds_count{model_name="m"} 900.0
vllm:inter_token_latency_seconds_sum{model_name="m"} 18.0
"""


def test_a_page_is_read_and_clients_that_left_are_no_failures() -> None:
    assert read_counters(PAGE) == Counters(41, 6, 8.2, 41, 18.0, 900)
    assert read_counters("") is None
    assert read_counters("vllm:request_success_total{{} x\n") is None


def test_what_was_before_and_what_a_restart_lost_do_not_count() -> None:
    kept = Comparisons()
    first = kept.note(KEY, "a", NOW, {"s1": Counters(100, 5)}, {"c1": Counters(7, 7)})
    assert (first.since, first.stable, first.canary) == (NOW, Figures(), Figures())
    later = NOW + timedelta(seconds=9)
    found = kept.note(KEY, "a", later, {"s1": Counters(110, 5, 2, 10), "s2": Counters(50)}, {"c1": Counters(3, 1)})
    assert found.stable == Figures(10, 0, pytest.approx(0.2), None)
    assert found.canary == Figures(4, 1), "it began anew"
    found = kept.note(KEY, "a", later, {"s2": Counters(53)}, {})
    assert (found.stable.requests, found.since) == (13, NOW)
    assert kept.note(KEY, "b", later, {}, {}).since == later, "another step is another comparison"


def test_a_moment_later_it_says_the_same_without_a_look() -> None:
    kept = Comparisons()
    assert kept.fresh(KEY, "a", NOW) is None
    found = kept.note(KEY, "a", NOW, {}, {})
    assert kept.fresh(KEY, "a", NOW + timedelta(seconds=4)) == found
    assert kept.fresh(KEY, "a", NOW + timedelta(seconds=5)) is None
    assert kept.fresh(KEY, "b", NOW) is None
    kept.forget(KEY)
    assert kept.fresh(KEY, "a", NOW) is None
