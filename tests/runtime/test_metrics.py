"""What a scrape reads of an engine's numbers."""

from __future__ import annotations

import time

from prometheus_client.parser import text_string_to_metric_families

from stoker_runtime.metrics import EngineView, ServerMetrics
from stoker_runtime.request import EngineStats


def test_adapters_that_run_and_wait_stand_in_labels() -> None:
    stats, metrics = EngineStats(running_adapters=("zoe", "al", "zoe"), waiting_adapters=("mia",)), ServerMetrics("m")
    metrics.attach([EngineView(lambda: stats, 0, 0)])
    assert b"lora_requests_info" not in metrics.expose(), "a server without adapters tells of none"
    metrics.attach_adapters(7)
    before = time.time()
    families = text_string_to_metric_families(metrics.expose().decode())
    [sample] = [each for family in families if family.name == "vllm:lora_requests_info" for each in family.samples]
    assert sample.labels == {
        "max_lora": "7",
        "running_lora_adapters": "al,zoe",
        "waiting_lora_adapters": "mia",
    }
    assert before - 1 <= sample.value <= time.time() + 1
