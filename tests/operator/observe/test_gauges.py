"""gauges.py: what is read out of a page of metrics."""

from __future__ import annotations

import pytest

from stoker_operator.observe.gauges import idle_seconds, parse

PAGE = """# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 3.0
vllm:num_requests_waiting{engine="1"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
# TYPE vllm:request_success counter
vllm:request_success_total 9.0
"""


def test_counts_are_summed_and_the_share_is_the_largest() -> None:
    assert parse(PAGE) == {"vllm:num_requests_waiting": 7.0, "vllm:kv_cache_usage_perc": 0.75}


def test_what_is_no_page_of_metrics_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"."):
        parse("<html>not metrics</html>")


@pytest.mark.parametrize(
    ("running", "waiting", "idle", "said"),
    [(0, 0, 93.5, 93.5), (1, 0, 93.5, 0.0), (0, 2, 93.5, 0.0), (0, 0, None, None), (None, 0, 93.5, None)],
)
def test_a_pod_is_idle_by_its_own_word(
    running: float | None, waiting: float, idle: float | None, said: float | None
) -> None:
    series = {"vllm:num_requests_running": running, "vllm:num_requests_waiting": waiting, "stoker:idle_seconds": idle}
    assert idle_seconds({name: value for name, value in series.items() if value is not None}) == said
