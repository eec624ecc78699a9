"""Models, tokenize and detokenize, probes, load, version and metrics."""

from __future__ import annotations

import os

import httpx
from api_server import Running
from prometheus_client.parser import text_string_to_metric_families

from stoker_runtime.api.answering.state import Phase


def test_models(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["byte-model", "alias"]
    assert listed["data"][0]["max_model_len"] == 256
    assert http.get("/v1/models/alias").json()["id"] == "alias"
    assert http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_answers_carry_the_name_that_was_asked_for(http: httpx.Client) -> None:
    assert http.post("/v1/completions", json={"prompt": "a", "model": "alias"}).json()["model"] == "alias"
    assert http.post("/v1/completions", json={"prompt": "a"}).json()["model"] == "byte-model"


def test_tokenize_and_back(http: httpx.Client) -> None:
    found = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert found == {"count": 3, "max_model_len": 256, "tokens": [104, 195, 169], "token_strs": ["h", "Ã", "©"]}
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "hé"}
    messages = [{"role": "user", "content": "x"}]
    found = http.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert bytes(found["tokens"]) == b"[user]x\n"


def test_long_prompts_are_encoded_too(http: httpx.Client) -> None:
    assert http.post("/tokenize", json={"prompt": "ab" * 10_000}).json()["count"] == 20_000


def test_health_follows_the_engine(server: Running, http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok", "phase": "ready", "step_age_seconds": 0.0}
    assert http.post("/ping").status_code == 200
    server.engine.dead = True
    for path in ("/health", "/ready", "/ping"):
        response = http.get(path)
        assert (response.status_code, response.json()["error"]["type"]) == (503, "engine_dead")
    answer = http.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "engine_dead")


def test_phases(server: Running, http: httpx.Client) -> None:
    server.state.phase, server.state.detail = Phase.DRAINING, "it is shutting down"
    assert http.get("/health").status_code == 200
    for response in (http.get("/ready"), http.post("/v1/completions", json={"prompt": "a"})):
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == "server_draining"
    service, server.state.service = server.state.service, None
    server.state.phase, server.state.detail = Phase.STARTING, "the engine is starting"
    try:
        assert http.get("/health").json()["error"]["message"] == "The server is starting: the engine is starting."
        assert http.get("/v1/models").status_code == 200
        assert http.get("/version").status_code == 200
        assert http.get("/load").json()["ready"] is False
        assert http.get("/metrics").status_code == 200
    finally:
        server.state.service = service


def test_load_and_version(http: httpx.Client) -> None:
    load = http.get("/load").json()
    process = load.pop("process")
    expected = {"server_load": 0, "running": 0, "waiting": 0, "kv_pages": 25, "host_kv_pages": 10, "ready": True}
    assert load == expected
    assert (process["pid"], process["requests"]) == (os.getpid(), 0)
    assert process["tasks"] >= 1
    assert 3 < process["descriptors"] <= len(os.listdir("/proc/self/fd")) + 100
    assert list(http.get("/version").json()) == ["version"]


def samples(http: httpx.Client) -> dict[str, float]:
    """Every sample of a scrape by name and labels other than the model's."""
    response = http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            assert sample.labels["model_name"] == "byte-model"
            found[sample.name + str(labels or "")] = sample.value
    return found


def test_metrics_have_vllms_names_and_count(server: Running, http: httpx.Client) -> None:
    before = samples(http)
    server.engine.delay = 0.002
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 5})
    after = samples(http)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert after["vllm:kv_cache_usage_perc"] == 0.25
    assert after["vllm:prefix_cache_queries_total"] == 8
    assert after["vllm:prefix_cache_hits_total"] == 4
    for name in ("num_requests_running", "num_requests_waiting", "num_preemptions_total", "prompt_tokens_total"):
        assert f"vllm:{name}" in after
    assert grown("vllm:request_success_total{'finished_reason': 'length'}") == 1
    assert grown("vllm:time_to_first_token_seconds_count") == 1
    assert grown("vllm:inter_token_latency_seconds_count") == 4
    assert grown("vllm:inter_token_latency_seconds_sum") > 0.008
    assert grown("vllm:e2e_request_latency_seconds_count") == 1
    assert grown("vllm:request_queue_time_seconds_sum") == 0.25
    assert grown("vllm:request_time_per_output_token_seconds_count") == 1
    assert grown("vllm:request_generation_tokens_sum") == 5
    assert grown("vllm:time_to_first_token_seconds_bucket{'le': '+Inf'}") == 1
    assert after["vllm:num_requests_swapped"] == 2
    assert after["vllm:cpu_cache_usage_perc"] == 0.5
    assert after["vllm:external_prefix_cache_hits_total"] == 3
    assert after["stoker:kv_pages_swapped_out_total"] == 9
    sizes = {"block_size": "16", "num_cpu_blocks": "20", "num_gpu_blocks": "100"}
    assert after[f"vllm:cache_config_info{sizes}"] == 1


def test_idle_is_counted_from_the_last_request(server: Running, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})
    after = samples(http)["stoker:idle_seconds"]
    assert after > 0
    http.get("/v1/models")
    later = samples(http)["stoker:idle_seconds"]
    assert later > after, "what makes no work is no request"
    server.engine.delay = 0.2
    with http.stream("POST", "/v1/completions", json={"prompt": "a", "max_tokens": 200, "stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert samples(http)["stoker:idle_seconds"] == 0


def test_openapi_document_lists_the_routes_and_their_bodies(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    post = document["paths"]["/v1/completions"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/CompletionBody"
    }
    schemas = document["components"]["schemas"]
    assert {"type": "number"} in schemas["CompletionBody"]["properties"]["temperature"]["anyOf"]
    assert "StreamOptions" in schemas
    assert {"/v1/chat/completions", "/v1/models/{name}", "/metrics"} <= set(document["paths"])
