"""Adapters over HTTP: models by name in every dialect, loaded and unloaded while streams run, by a real server."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from api_server import CLIENT, wait_until
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import save_file
from server_process import FRESH, ServerProcess
from waiting import TRIES

from stoker_runtime import LLM, LoRARequest, SamplingParams

HIDDEN, LAYERS, FFN, KV = 64, 2, 128, 32
SIZES = {"q_proj": (64, 64), "v_proj": (KV, 64), "o_proj": (64, 64), "gate_proj": (FFN, 64), "down_proj": (64, FFN)}
MOST_PAUSE = 0.05
"""Seconds that a load or an unload may hold up a stream of somebody else."""
PROMPT = [72, 101, 108, 108, 111]


def write_adapter(folder: Path, seed: int, rank: int = 6) -> Path:
    """A random adapter of `shape:tiny`, strong enough to change what it says."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (rows, columns) in SIZES.items():
            room = "mlp" if module in ("gate_proj", "down_proj") else "self_attn"
            name = f"base_model.model.model.layers.{layer}.{room}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn((rank, columns), generator=generator) * 0.3
            tensors[f"{name}.lora_B.weight"] = torch.randn((rows, rank), generator=generator) * 0.3
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": sorted(SIZES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, seed) for seed, name in enumerate(("sql", "law", "chat"), 7)}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The list of adapters that the server follows; it names one that cannot be served."""
    file = tmp_path_factory.mktemp("listed") / "adapters.json"
    file.write_text('{"adapters": [{"name": "broken", "path": "/nowhere"}]}')
    return file


@pytest.fixture(scope="module")
def adapted(
    folders: dict[str, Path], followed: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Of three adapters one is there from the start."""
    module = json.dumps({"name": "sql", "path": str(folders["sql"]), "base_model_name": "tiny-base"})
    server = ServerProcess(
        [sys.executable, "-m", "stoker_cli", "serve", "shape:tiny"],
        *("--device", "cpu", "--dtype", "float32", "--served-model-name", "tiny"),
        *("--enable-lora", "--allow-runtime-lora-updating", "--max-loras", "2", "--lora-modules", module),
        *("--lora-modules-file", str(followed)),
        *("--chat-template", "{% for message in messages %}[{{ message.content }}]{% endfor %}"),
        *("--max-num-seqs", "4", "--batch-dir", str(tmp_path_factory.mktemp("batches"))),
    )  # fmt: skip
    try:
        # Its socket is there before what answers.
        assert wait_until(lambda: "ready in" in server.log, 180), server.log
        yield server
    finally:
        server.close()


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, list[int]]:
    """What each model says after PROMPT, by the engine in this process."""
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, detokenize=False)
    with LLM("shape:tiny", device="cpu", dtype="float32", enable_lora=True, max_num_seqs=4) as llm:
        loras = [None, *(LoRARequest(name, at, str(path)) for at, (name, path) in enumerate(folders.items(), 1))]
        outputs = llm.generate([{"prompt_token_ids": PROMPT}] * len(loras), params, lora_request=loras)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert len(set(map(tuple, found))) == len(found), "the adapters have to say different things"
    return dict(zip(("tiny", *folders), found, strict=True))


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    return CLIENT.post(f"{server.url}{path}", json=body, headers=FRESH, timeout=120)


def complete(server: ServerProcess, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    return post(server, "/v1/completions", body | {"return_token_ids": True} | more)


def said(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def load(server: ServerProcess, name: str, path: Path | str, **more: Any) -> httpx.Response:
    return post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path), **more})


def unload(server: ServerProcess, name: str) -> httpx.Response:
    return post(server, "/v1/unload_lora_adapter", {"lora_name": name})


def listed(server: ServerProcess) -> dict[str, dict[str, Any]]:
    found = CLIENT.get(f"{server.url}/v1/models", headers=FRESH).json()["data"]
    return {model["id"]: model for model in found}


def test_an_adapter_is_a_model_in_every_route(
    adapted: ServerProcess, expected: dict[str, list[int]], folders: dict[str, Path]
) -> None:
    models = listed(adapted)
    assert (models["sql"]["parent"], models["sql"]["root"]) == ("tiny-base", str(folders["sql"]))
    assert models["tiny"]["parent"] is None
    assert CLIENT.get(f"{adapted.url}/v1/models/sql", headers=FRESH).json()["id"] == "sql"
    for model in ("tiny", "sql", "tiny"):
        answer = complete(adapted, model)
        assert said(answer) == expected[model]
        assert answer.json()["model"] == model
    best = complete(adapted, "sql", use_beam_search=True)
    assert said(best) == expected["sql"]
    messages = [{"role": "user", "content": "Hi"}]
    texts = {}
    for model in ("tiny", "sql"):
        body = {"model": model, "max_tokens": 8, "temperature": 0}
        chat = post(adapted, "/v1/chat/completions", {**body, "messages": messages}).json()
        anthropic = post(adapted, "/v1/messages", {**body, "messages": messages}).json()
        responses = {"model": model, "max_output_tokens": 8, "temperature": 0, "input": "Hi"}
        response = post(adapted, "/v1/responses", responses).json()
        assert {chat["model"], anthropic["model"], response["model"]} == {model}
        texts[model] = chat["choices"][0]["message"]["content"]
        assert anthropic["content"][0]["text"] == texts[model]
        assert response["output"][-1]["content"][0]["text"] == texts[model]
    assert texts["tiny"] != texts["sql"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/tokenize", {"prompt": "Hi there"}),
        ("/detokenize", {"tokens": PROMPT}),
        ("/v1/completions/render", {"prompt": "Hi there", "max_tokens": 3}),
        ("/v1/chat/completions/render", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
    ],
)
def test_an_adapter_is_a_model_where_nothing_is_generated(
    adapted: ServerProcess, path: str, asked: dict[str, Any]
) -> None:
    answers = {model: post(adapted, path, asked | {"model": model}) for model in ("tiny", "sql", "nobody")}
    assert {model: answer.status_code for model, answer in answers.items()} == {"tiny": 200, "sql": 200, "nobody": 404}
    assert _named(answers["sql"], "sql") == _named(answers["tiny"], "tiny")


def _named(answer: httpx.Response, model: str) -> Any:
    """What was answered, without what differs from one request to the next and without the model's name."""
    found = answer.json()
    for each in found if isinstance(found, list) else [found]:
        assert each.pop("model", model) == model
        each.pop("request_id", None)
    return found


def test_adapters_come_and_go_while_streams_run(
    adapted: ServerProcess, expected: dict[str, list[int]], folders: dict[str, Path]
) -> None:
    body = {"model": "sql", "prompt": PROMPT, "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
    options = {"return_token_ids": True, "stream_options": {"include_usage": True}}
    url = f"{adapted.url}/v1/completions"
    with CLIENT.stream("POST", url, json=body | options, headers=FRESH, timeout=120) as stream:
        events = stream.iter_lines()
        first = next(events)
        assert first.startswith("data: {")
        assert wait_until(lambda: adapters_now(adapted) == ("sql", ""), 20)
        assert load(adapted, "law", folders["law"]).text == "Success: LoRA adapter 'law' added successfully."
        assert said(complete(adapted, "law")) == expected["law"]
        assert unload(adapted, "sql").text == "Success: LoRA adapter 'sql' removed successfully."
        assert complete(adapted, "sql").status_code == 404
        assert "sql" not in listed(adapted)
        rest = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    assert rest[-1]["usage"]["completion_tokens"] == 1000, "the stream of the adapter that left goes on to its end"
    tokens = [
        token for event in [json.loads(first[6:]), *rest] for each in event["choices"] for token in each["token_ids"]
    ]
    assert tokens[:12] == expected["sql"]
    assert load(adapted, "sql", folders["chat"]).status_code == 200
    assert said(complete(adapted, "sql")) == expected["chat"], "a name that came back is another adapter"
    assert load(adapted, "sql", folders["sql"], load_inplace=True).status_code == 200
    assert said(complete(adapted, "sql")) == expected["sql"]
    assert unload(adapted, "law").status_code == 200


def longest_pause(server: ServerProcess, during: Callable[[], None]) -> float:
    """The longest time between two events of a stream that runs `during` something and a little longer, in seconds."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1000, "temperature": 0, "ignore_eos": True, "stream": True}
    worker, gaps = threading.Thread(target=during), []
    with CLIENT.stream("POST", f"{server.url}/v1/completions", json=body, headers=FRESH, timeout=120) as stream:
        last = 0.0
        for _ in stream.iter_lines():
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
            if len(gaps) == 10:
                worker.start()
            elif len(gaps) > 10 and not worker.is_alive():
                break
        assert not worker.is_alive(), "the stream was over before"
    worker.join()
    return max(gaps[10:])


def test_no_stream_pauses_while_adapters_come_and_go(adapted: ServerProcess, tmp_path: Path) -> None:
    """Of the largest rank, three times, each with what says something through it; a busy machine is late at random."""
    large = write_adapter(tmp_path / "large", 23, rank=16)

    def come_and_go() -> None:
        for _ in range(3):
            assert load(adapted, "large", large).status_code == 200
            assert len(said(complete(adapted, "large", max_tokens=2))) == 2
            assert unload(adapted, "large").status_code == 200

    found: list[float] = []
    while len(found) < TRIES:
        found.append(longest_pause(adapted, come_and_go))
        if found[-1] < MOST_PAUSE:
            return
    raise AssertionError(f"the longest pause of a stream, by try, in seconds: {found}")


def adapters_now(server: ServerProcess) -> tuple[str, str]:
    """The labels of the adapters that run, and of those that wait."""
    text = CLIENT.get(f"{server.url}/metrics", headers=FRESH).text
    [family] = [each for each in text_string_to_metric_families(text) if each.name == "vllm:lora_requests_info"]
    labels = family.samples[0].labels
    assert labels["max_lora"] == "2"
    return labels["running_lora_adapters"], labels["waiting_lora_adapters"]


@pytest.mark.parametrize(
    ("name", "path", "status", "says"),
    [
        ("sql", "sql", 400, "has already been loaded"),
        ("tiny", "law", 400, "the model's own name"),
        ("new", "nowhere", 400, "no adapter_config.json"),
        ("", "law", 400, "must be provided"),
    ],
)
def test_a_load_that_fails_leaves_everything_as_it_was(
    adapted: ServerProcess, folders: dict[str, Path], expected: dict[str, list[int]],
    name: str, path: str, status: int, says: str,
) -> None:  # fmt: skip
    before = listed(adapted)
    answer = load(adapted, name, folders.get(path, path))
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert listed(adapted) == before
    assert said(complete(adapted, "sql")) == expected["sql"]


def test_a_list_is_followed_while_the_server_runs(
    adapted: ServerProcess, followed: Path, folders: dict[str, Path], expected: dict[str, list[int]]
) -> None:
    def reports() -> dict[str, dict[str, str]]:
        answer = CLIENT.get(f"{adapted.url}/ready", headers=FRESH)
        assert answer.status_code == 200, "a bad adapter keeps no server from being ready"
        return {each["name"]: each for each in answer.json()["adapters"]}

    assert "no adapter_config.json" in reports()["broken"]["message"]
    followed.write_text(json.dumps({"adapters": [{"name": "listed", "path": str(folders["chat"])}]}))
    assert wait_until(lambda: reports().get("listed", {}).get("state") == "loaded", 60)
    assert said(complete(adapted, "listed")) == expected["chat"]
    followed.write_text('{"adapters": []}')
    assert wait_until(lambda: "listed" not in listed(adapted), 60)
    assert "sql" in listed(adapted), "what came otherwise is nobody's of the list"


def test_what_is_not_there_cannot_be_unloaded(adapted: ServerProcess) -> None:
    answer = unload(adapted, "nobody")
    assert answer.status_code == 404
    assert "'nobody' cannot be found" in answer.json()["error"]["message"]


def test_lines_of_a_batch_name_adapters(adapted: ServerProcess, expected: dict[str, list[int]]) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": body | {"model": model}}
        for model in ("tiny", "sql")
    ]
    text = "\n".join(map(json.dumps, lines))
    file = CLIENT.post(
        f"{adapted.url}/v1/files", files={"file": ("lines.jsonl", text)}, data={"purpose": "batch"}, headers=FRESH
    ).json()
    wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = post(adapted, "/v1/batches", wanted).json()
    url = f"{adapted.url}/v1/batches/{batch['id']}"
    assert wait_until(lambda: CLIENT.get(url, headers=FRESH).json()["status"] == "completed", 30)
    output = CLIENT.get(url, headers=FRESH).json()["output_file_id"]
    answers = CLIENT.get(f"{adapted.url}/v1/files/{output}/content", headers=FRESH).text.splitlines()
    found = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["token_ids"] for each in map(json.loads, answers)
    }
    assert found == {model: expected[model] for model in ("tiny", "sql")}
