"""`lm-eval`'s `local-completions` with a task of our own: its log-likelihoods equal those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from known_names import KEY, MODEL, client

client("lm_eval")

# They belong to lm-eval and what it imports; our own warnings stay errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:::(lm_eval|datasets|evaluate|dill|multiprocess|pandas|aiohttp|fsspec)"),
    pytest.mark.filterwarnings("ignore:.*unclosed"),
]

DOCUMENTS = [
    {"country": "France", "choices": ["Paris", "Rome", "a river"], "answer": 0},
    {"country": "Italy", "choices": ["Madrid", "Rome", "Berlin"], "answer": 1},
    {"country": "Japan", "choices": ["Kyoto", "a long way off", "Tokyo"], "answer": 2},
    {"country": "Egypt", "choices": ["Cairo", "Lima"], "answer": 0},
]


def task(folder: Path) -> dict[str, Any]:
    """A task whose documents lie in `folder`."""
    data = folder / "capitals.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    return {
        "task": "capitals",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "The capital of {{country}} is",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}],
    }


def likelihood(model: Any, prompt: list[int], answer: list[int]) -> float:
    """The log-likelihood of `answer` after `prompt`, by transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
    rows = range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    return sum(logits[row, token].item() for row, token in zip(rows, answer, strict=True))


def test_log_likelihoods_equal_transformers(
    url: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from lm_eval.tasks import TaskManager

    api = LocalCompletionsAPI(
        model=MODEL, base_url=f"{url}/v1/completions", auth_token=KEY, num_concurrent=1, max_retries=1, batch_size=1
    )
    assert api.tokenizer_backend == "remote", "it tokenizes through the server"
    found = simple_evaluate(
        model=api,
        tasks=[task(tmp_path)],
        bootstrap_iters=0,
        log_samples=True,
        task_manager=TaskManager(include_defaults=False),
    )
    assert found is not None
    assert found["results"]["capitals"]["acc,none"] == 1.0

    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32
    ).eval()
    encode = api.tokenizer.encode
    for sample in found["samples"]["capitals"]:
        prompt = encode(f"The capital of {sample['doc']['country']} is")
        for choice, (given, _) in zip(sample["doc"]["choices"], sample["filtered_resps"], strict=True):
            assert given == pytest.approx(likelihood(reference, prompt, encode(f" {choice}")), abs=1e-3)
