"""fit.py: the verdict and the numbers behind it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker_operator.observe.gpu import Gpu, gpu_memory_gib
from stoker_operator.plan.fit import LARGE_GIB, Fit, asks_gpu, assess, remembered_gpu
from stoker_operator.spec.service import FetchedModel, InferenceService
from stoker_operator.spec.weights import read_weights, told_weights
from stoker_runtime.adapters.layout import AdapterLayout
from stoker_runtime.adapters.memory import slot_bytes
from stoker_runtime.executor.resolve import (
    GIB,
    LARGE_GPU_BYTES,
    RESERVE_BYTES,
    DeviceMemory,
    budget_bytes,
    graph_bytes,
    resolve,
    workspace_bytes,
)
from stoker_runtime.executor.state import sequence_state_bytes, state_bytes
from stoker_runtime.fetch.report.shape import shape_of
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.parallel.place import places
from stoker_runtime.parallel.split import split_spec
from stoker_runtime.settings.parse import parse as parse_serve

Build = Callable[..., InferenceService]
# Qwen2.5-7B in bf16: 28 layers, 4 KV heads of 128, 32,768 tokens.
WEIGHTS = read_weights(shape_of(Path("shape:qwen2.5-7b"))["weights"])
SEVEN_B = FetchedModel("r", "sha256:a", 15_231_233_024, "p", "p", 28, 4, 128, 32768, weights=WEIGHTS)


@pytest.mark.parametrize(
    ("product", "verdict"), [("NVIDIA-H100-80GB-HBM3", "Fits"), ("Tesla-T4", "TooLarge"), ("Mystery", "Unknown")]
)
def test_verdict(service: Build, product: str, verdict: str) -> None:
    fit = assess(service(resources={"gpus": 1, "gpuProducts": [product]}), SEVEN_B)
    assert fit is not None
    assert fit.verdict == verdict


def test_the_numbers_are_the_arithmetic(service: Build) -> None:
    fit = assess(service(resources={"gpus": 1, "gpuProducts": ["NVIDIA-L4"]}), SEVEN_B)
    assert fit is not None
    kv = 2 * 28 * 4 * 128 * 2 * 32768 / 2**30
    assert (fit.weights_gib, fit.kv_gib) == (14.2, round(kv, 1))
    assert fit.required_gib == pytest.approx((14.185 + kv + 2) / 0.9, abs=0.06)
    assert all(text in fit.message for text in ("14.2", "32768 tokens", "NVIDIA-L4"))


def test_a_shorter_context_may_fit(service: Build) -> None:
    def verdict(context: int) -> str:
        built = service(resources={"gpus": 1, "gpuProducts": ["NVIDIA-L4"]}, runtime={"contextLength": context})
        fit = assess(built, replace(SEVEN_B, max_context=1))
        assert fit is not None
        return fit.verdict

    assert (verdict(4096), verdict(1_000_000)) == ("Fits", "TooLarge")


def test_the_smallest_gpu_decides(service: Build) -> None:
    fit = assess(service(resources={"gpus": 1, "gpuProducts": ["NVIDIA-H200", "Tesla-T4"]}), SEVEN_B)
    assert fit is not None
    assert (fit.gpu_product, fit.verdict) == ("Tesla-T4", "TooLarge")
    assert "resources.fitCheck: Off" in fit.message


@pytest.mark.parametrize("args", [[], ["--max-loras", "3", "--max-lora-rank=48"], ["--max-lora-rank", "256"]])
def test_room_for_adapters_is_in_the_sum(service: Build, args: list[str]) -> None:
    """As the engine counts its slots, for the shape that a prefetch would report."""
    spec = build_spec(read_source("shape:qwen2.5-7b"))
    line = AdapterLayout.of(spec, embeddings=False).line
    model = replace(SEVEN_B, lora_line=line)
    asked: dict[str, Any] = {"resources": {"gpus": 1, "gpuProducts": ["NVIDIA-A10"]}, "runtime": {"args": args}}
    without = assess(service(**asked), model)
    fit = assess(service(**asked, model={"uri": "hf://a/b", "adapters": []}), model)
    engine = parse_serve(["m", "--enable-lora", "--max-loras", "4", *args], {}).engine
    slots = engine.max_loras * engine.max_lora_rank * line * 2 / GIB
    assert without is not None
    assert fit is not None
    assert without.adapters_gib == 0
    assert fit.adapters_gib == pytest.approx(slots, abs=0.01)
    assert fit.required_gib - without.required_gib == pytest.approx(slots / 0.9, abs=0.11)
    assert f"room for {engine.max_loras} adapters" in fit.message
    assert ("TooLarge" if args[:1] == ["--max-lora-rank"] else "Fits") == fit.verdict


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 3)])
def test_room_for_adapters_on_several_gpus(tensor: int, pipeline: int, service: Build) -> None:
    """No less than the fullest rank's slots take, and no more than if it had its layers whole."""
    spec = build_spec(read_source("shape:qwen2.5-7b"))
    model = replace(SEVEN_B, lora_line=AdapterLayout.of(spec, embeddings=False).line)
    asked: dict[str, Any] = {
        "resources": {"gpus": tensor * pipeline, "gpuProducts": ["NVIDIA-A10"]},
        "parallelism": {"tensor": tensor, "pipeline": pipeline},
        "model": {"uri": "hf://a/b", "adapters": []},
    }
    fit = assess(service(**asked), model)
    assert fit is not None
    config = resolve(parse_serve(["m", "--enable-lora", "--max-loras", "4"], {}).engine, spec, "cuda")

    def fullest(tensors: int) -> float:
        parts = [split_spec(spec, place) for place in places(tensors, pipeline)]
        return max(config.max_loras * slot_bytes(config, part) for part in parts) / GIB

    assert fullest(tensor) <= fit.adapters_gib + 0.01
    assert fit.adapters_gib == pytest.approx(fullest(1), abs=0.01)


@pytest.mark.parametrize(
    ("runtime", "verdict", "usable"),
    [
        # 14.2 of weights, 1.8 of KV, 2.0 of workspace: 17.9 of 22 GiB.
        ({}, "Fits", 0.9),
        ({"args": ["--gpu-memory-utilization", "0.81"]}, "TooLarge", 0.81),
        ({"args": ["--gpu-memory-utilization=0.82"]}, "Fits", 0.82),
        ({"args": ["--gpu_memory_utilization=0.82"]}, "Fits", 0.82),
        ({"env": [{"name": "STOKER_GPU_MEMORY_UTILIZATION", "value": "0.5"}]}, "TooLarge", 0.5),
        ({"args": ["--gpu-memory-reserve-gb", "4"]}, "Fits", 0.818),
        ({"args": ["--gpu-memory-reserve-gb", "5"]}, "TooLarge", 0.773),
        ({"args": ["--gpu-memory-utilization", "0.99", "--gpu-memory-reserve-gb", "1"]}, "Fits", 0.955),
        ({"args": ["--gpu-memory-reserve-gb", "30"]}, "TooLarge", 0.0),
        # 16,384 pages of 64 tokens are 56 GiB; 100 pages of 16 are 0.1.
        ({"args": ["--num-gpu-blocks", "16K"]}, "TooLarge", 0.9),
        ({"args": ["--num-gpu-blocks=100", "--block-size=16", "--gpu-memory-utilization=0.75"]}, "Fits", 0.75),
    ],
    ids=str,
)
def test_what_the_engine_is_told_to_take_is_what_is_checked(
    service: Build, runtime: dict[str, Any], verdict: str, usable: float
) -> None:
    built = service(resources={"gpus": 1, "gpuProducts": ["NVIDIA-A10"]}, runtime=runtime)
    fit = assess(built, SEVEN_B)
    assert fit is not None
    assert (fit.verdict, fit.usable) == (verdict, usable)
    assert math.isfinite(fit.required_gib)
    variables = {item["name"]: item["value"] for item in runtime.get("env", ())}
    engine = parse_serve(["m", *runtime.get("args", ())], variables).engine
    budget = budget_bytes(engine, DeviceMemory(22 * GIB, 0))
    assert budget / GIB / 22 == pytest.approx(usable, abs=0.001) or budget < 0
    tokens = engine.num_gpu_blocks * (engine.page_size or 64) or SEVEN_B.max_context
    taken = SEVEN_B.bytes + 2 * 28 * 4 * 128 * 2 * tokens + 2 * GIB
    assert (verdict == "Fits") == (taken <= budget)


DRIVER_GIB = 0.5  # what a process's context takes of an H200


@pytest.mark.parametrize(
    ("product", "runtime", "workspace"),
    [
        ("NVIDIA-L4", {}, 2.0),
        ("NVIDIA-H100-80GB-HBM3", {}, 3.2),
        ("NVIDIA-H200", {}, 3.2),
        ("NVIDIA-H200", {"maxConcurrency": 8}, 2.0),
        ("NVIDIA-H200", {"args": ["--max-num-batched-tokens", "2048"]}, 2.0),
    ],
)
def test_the_workspace_is_what_the_engine_takes(
    service: Build, product: str, runtime: dict[str, Any], workspace: float
) -> None:
    fit = assess(service(resources={"gpus": 1, "gpuProducts": [product]}, runtime=runtime), SEVEN_B)
    assert fit is not None
    assert fit.workspace_gib == workspace
    assert f"workspace {workspace}" in fit.message
    engine = parse_serve(["m", *runtime.get("args", ())], {}).engine
    asked = replace(engine, max_num_seqs=runtime.get("maxConcurrency", 0))
    spec = build_spec(read_source("shape:qwen2.5-7b"))
    config = resolve(asked, spec, "cuda", int(gpu_memory_gib(product) * GIB))
    counted = workspace_bytes(config, spec) + graph_bytes(config, spec) + state_bytes(config, spec) + RESERVE_BYTES
    assert counted / GIB + DRIVER_GIB == pytest.approx(workspace, abs=0.5)
    assert LARGE_GIB * GIB == LARGE_GPU_BYTES


@pytest.mark.parametrize("share", ["", "many", "0", "-1", "1.5", "nan"])
def test_a_share_that_the_engine_refuses_is_not_counted(service: Build, share: str) -> None:
    runtime = {"args": [f"--gpu-memory-utilization={share}"]}
    fit = assess(service(resources={"gpus": 1, "gpuProducts": ["NVIDIA-A10"]}, runtime=runtime), SEVEN_B)
    assert fit is not None
    assert fit.usable == 0.9


@pytest.mark.parametrize("resources", [{"gpus": 0}, {"gpus": 1, "gpuProducts": ["Tesla-T4"], "fitCheck": "Off"}])
def test_nothing_is_checked_unasked(service: Build, resources: dict[str, object]) -> None:
    assert assess(service(resources=resources), SEVEN_B) is None


@pytest.mark.parametrize(("kind", "gib"), [("FP8", 8.11), ("W4", 5.21), ("Q8_0", 8.49), ("Q4K", 5.54)])
def test_embedding_and_head_stay_in_16_bits(service: Build, kind: str, gib: float) -> None:
    """What the engine's log says that this model takes."""
    model = {"uri": "hf://a/b", "quantization": kind, "kvCacheDtype": "FP8"}
    fit = assess(service(model=model, resources={"gpus": 1, "gpuProducts": ["Tesla-T4"]}), SEVEN_B)
    assert fit is not None
    assert fit.weights_gib == pytest.approx(gib, abs=0.06)
    assert (fit.kv_gib, fit.verdict) == (0.9, "Fits")


def test_weights_of_an_unknown_shape_are_not_said_to_fit(service: Build) -> None:
    def verdict(size: int) -> str:
        model = replace(SEVEN_B, weights=told_weights(size, ["auto"]), layers=0)
        fit = assess(service(resources={"gpus": 1, "gpuProducts": ["NVIDIA-L4"]}), model)
        assert fit is not None
        return fit.verdict

    assert (verdict(10**9), verdict(10**11)) == ("Unknown", "TooLarge")


def test_without_products_the_clusters_own_gpu_is_checked(service: Build) -> None:
    built = service(resources={"gpus": 1})
    assert asks_gpu(built)
    assert assess(built, SEVEN_B) is None  # nobody looked
    small, large = (assess(built, SEVEN_B, Gpu(name, gib)) for name, gib in (("a", 15.0), ("b", 80.0)))
    assert small is not None
    assert large is not None
    assert (small.verdict, small.gpu_product, large.verdict) == ("TooLarge", "a", "Fits")
    unknown = assess(built, SEVEN_B, Gpu("", 0.0))
    assert unknown is not None
    assert unknown.verdict == "Unknown"


def test_the_gpu_is_remembered_for_a_generation(service: Build) -> None:
    status = {"observedGeneration": 1, "fit": {"gpuProduct": "b", "gpuGiB": 80}}
    assert remembered_gpu(service(status=status)) == Gpu("b", 80.0)
    assert remembered_gpu(service(status=status | {"observedGeneration": 0})) is None
    assert remembered_gpu(service()) is None


@pytest.mark.parametrize(
    "resources",
    [{"gpus": 0}, {"gpus": 1, "gpuProducts": ["Tesla-T4"]}, {"gpus": 1, "fitCheck": "Off"}],
)
def test_nodes_are_not_asked_for_needlessly(service: Build, resources: dict[str, object]) -> None:
    assert not asks_gpu(service(resources=resources))


@pytest.mark.parametrize(
    ("resources", "verdict", "blocks", "said"),
    [
        # 1.1 (engine) + 1 (/dev/shm) + 16 (KV pages) GiB of host memory.
        ({"gpus": 1, "memory": "18535Mi"}, "Fits", False, "18.1 GiB of 18.1 GiB"),
        ({"gpus": 1, "memory": "18534Mi"}, "TooLarge", True, "18.1 GiB of 18.1 GiB"),
        ({"gpus": 1, "memory": "17Gi"}, "TooLarge", True, "18.1 GiB of 17.0 GiB. Set resources.memory to 19Gi"),
        ({"gpus": 1}, "Fits", False, "18.1 GiB requested"),
        # Without a GPU weights in 32 bits as well; a processor that takes them in 16 has room in 40 GiB.
        ({"gpus": 0, "memory": "17Gi"}, "TooLarge", True, "weights 28.4"),
        ({"gpus": 0, "memory": "40Gi"}, "TooLarge", False, "46.5 GiB of 40.0 GiB. Set resources.memory to 47Gi"),
        ({"gpus": 0, "memory": "47Gi"}, "Fits", False, "46.5 GiB of 47.0 GiB"),
        ({"gpus": 1, "memory": "17Gi", "gpuProducts": ["NVIDIA-H200"]}, "TooLarge", True, "The pod's memory is too"),
        ({"gpus": 1, "memory": "32Gi", "gpuProducts": ["NVIDIA-H200"]}, "Fits", True, "on NVIDIA-H200. In host memory"),
        ({"gpus": 1, "memory": "17Gi", "gpuProducts": ["Tesla-T4"]}, "TooLarge", True, "The model does not fit"),
        ({"gpus": 1, "memory": "17Gi", "fitCheck": "Off"}, None, False, ""),
    ],
)
def test_memory_with_kv_pages_in_it(
    service: Build, resources: dict[str, object], verdict: str | None, blocks: bool, said: str
) -> None:
    fit = assess(service(resources=resources, runtime={"args": ["--swap-space", "16"]}), SEVEN_B)
    assert (fit.verdict if fit else None) == verdict
    if fit is not None:
        assert (fit.blocks, said in fit.message) == (blocks and verdict == "TooLarge", True), fit.message


def test_a_gpu_that_the_cluster_may_not_have_blocks_nothing_but_memory_does(service: Build) -> None:
    def fit(memory: str) -> tuple[str, bool]:
        built = service(resources={"gpus": 1, "memory": memory}, runtime={"args": ["--swap-space", "16"]})
        found = assess(built, SEVEN_B, Gpu("Tesla-T4", 15.0))
        assert found is not None
        return found.verdict, found.blocks

    assert (fit("32Gi"), fit("8Gi")) == (("TooLarge", False), ("TooLarge", True))


@pytest.mark.parametrize(("tensor", "data"), [(1, 3), (2, 4)])
def test_engines_beside_each_other_are_checked_as_one(service: Build, tensor: int, data: int) -> None:
    """Each has the whole model on GPUs of its own: no GPU holds less for their being several."""

    def fit(engines: int) -> Fit:
        resources = {"gpus": tensor * engines, "gpuProducts": ["NVIDIA-L4"]}
        parallelism = {"tensor": tensor, "data": engines}
        found = assess(service(resources=resources, parallelism=parallelism), SEVEN_B)
        assert found is not None
        return found

    one, several = fit(1), fit(data)
    assert replace(several, message=one.message) == one
    assert several.message.startswith(f"The model fits: on each of {tensor * data} GPUs of {data} engines weights")


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (4, 2), (1, 3)])
def test_several_gpus_are_checked_one_by_one(service: Build, tensor: int, pipeline: int) -> None:
    """By the engine's own parts: the fullest rank's keys and values, and no less than its weights."""
    spec = {
        "resources": {"gpus": tensor * pipeline, "gpuProducts": ["NVIDIA-L4"]},
        "parallelism": {"tensor": tensor, "pipeline": pipeline},
    }
    fit = assess(service(**spec), SEVEN_B)
    assert fit is not None
    whole = build_spec(read_source("shape:qwen2.5-7b"))
    parts = [split_spec(whole, place) for place in places(tensor, pipeline)]
    kv = max(part.kv_bytes_per_token("bfloat16") for part in parts) * 32768 / GIB
    assert fit.kv_gib == pytest.approx(kv, abs=0.06)
    held = max(part.parameter_bytes("bfloat16") for part in parts) / GIB
    assert fit.weights_gib == pytest.approx(held, abs=0.06, rel=0.01)
    assert fit.message.startswith(f"The model fits: on each of {tensor * pipeline} GPUs weights")
    assert fit.verdict == "Fits"


@pytest.mark.parametrize("shape", ["nemotron-h-8b", "qwen3-next-80b-a3b@7"])
@pytest.mark.parametrize("product", ["NVIDIA-L4", "NVIDIA-L40S", "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200"])
@pytest.mark.parametrize(
    ("told", "more"), [(0, []), (11, ["--num-state-snapshots", "23"]), (37, ["--no-enable-prefix-caching"])]
)
def test_states_are_in_the_sum_as_the_engine_holds_them(
    service: Build, shape: str, product: str, told: int, more: list[str]
) -> None:
    spec = build_spec(read_source(f"shape:{shape}"))
    found = shape_of(Path(f"shape:{shape}"))
    model = replace(
        SEVEN_B, layers=found["layers"], kv_heads=found["kvHeads"], head_dim=found["headDim"], max_context=512,
        state_bytes=found["stateBytes"],
    )  # fmt: skip
    runtime: dict[str, Any] = {"args": more, **({"maxConcurrency": told} if told else {})}
    asked = service(resources={"gpus": 1, "gpuProducts": [product]}, runtime=runtime)
    fit, without = assess(asked, model), assess(asked, replace(model, state_bytes=0))
    flags = ["--max-num-seqs", str(told)] if told else []
    gib = gpu_memory_gib(product)
    config = resolve(parse_serve(["m", *flags, *more], {}).engine, spec, "cuda", int(gib * GIB))
    kept = config.num_state_snapshots
    held = (config.max_num_seqs + kept) * sequence_state_bytes(config, spec) / GIB
    assert fit is not None
    assert without is not None
    assert fit.states_gib == pytest.approx(held, abs=0.01)
    assert fit.required_gib - without.required_gib == pytest.approx(held / 0.9, abs=0.11)
    assert f"states of {config.max_num_seqs} sequences and {kept} prefixes" in fit.message
    assert "states of" not in without.message


@pytest.mark.parametrize("shape", ["nemotron-h-8b", "qwen3-next-80b-a3b@8"])
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (8, 1), (1, 2), (2, 2)])
def test_ranks_share_the_states(service: Build, shape: str, tensor: int, pipeline: int) -> None:
    """Of layers that stages share evenly what the engine holds on a rank; else what they share on average."""
    spec = build_spec(read_source(f"shape:{shape}"))
    model = replace(SEVEN_B, max_context=512, state_bytes=shape_of(Path(f"shape:{shape}"))["stateBytes"])
    product = "NVIDIA-H100-80GB-HBM3"
    asked = service(
        resources={"gpus": tensor * pipeline, "gpuProducts": [product]},
        parallelism={"tensor": tensor, "pipeline": pipeline},
    )
    fit = assess(asked, model)
    parts = [split_spec(spec, place) for place in places(tensor, pipeline)]
    engine = parse_serve(["m"], {}).engine
    configs = [resolve(engine, part, "cuda", int(gpu_memory_gib(product) * GIB)) for part in parts]
    held = [
        (config.max_num_seqs + config.num_state_snapshots) * sequence_state_bytes(config, part) / GIB
        for config, part in zip(configs, parts, strict=True)
    ]
    assert fit is not None
    even = len({part.recurrent.layers for part in parts if part.recurrent}) == 1
    assert len({config.max_num_seqs for config in configs}) == 1
    if even:
        assert fit.states_gib == pytest.approx(max(held), abs=0.01)
    else:
        assert min(held) <= fit.states_gib <= 2 * max(held)


def test_what_does_not_fit_for_its_states_says_which_field_lowers_them(service: Build) -> None:
    model = replace(SEVEN_B, max_context=512, state_bytes=100 << 20)
    asked: dict[str, Any] = {"resources": {"gpus": 1, "gpuProducts": ["NVIDIA-H200"]}}
    fit = assess(service(**asked, runtime={"maxConcurrency": 1300}), model)
    assert fit is not None
    assert (fit.verdict, fit.states_gib) == ("TooLarge", 190.43)
    assert "Lower runtime.maxConcurrency" in fit.message


@pytest.mark.parametrize(
    ("product", "config", "verdict"),
    [
        ("NVIDIA-H200", {"method": "draft_model", "model": "/models/half", "num_speculative_tokens": 3}, "Unknown"),
        ("NVIDIA-H200", {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 5}, "Unknown"),
        ("NVIDIA-H200", {"method": "suffix"}, "Fits"),
        ("Tesla-T4", {"model": "/models/half", "num_speculative_tokens": 2}, "TooLarge"),
    ],
)
def test_a_draft_model_of_unknown_size_is_not_said_to_fit(
    service: Build, product: str, config: dict[str, Any], verdict: str
) -> None:
    runtime = {"args": ["--speculative-config", json.dumps(config)]}
    fit = assess(service(resources={"gpus": 1, "gpuProducts": [product]}, runtime=runtime), SEVEN_B)
    assert fit is not None
    assert fit.verdict == verdict
    assert not fit.blocks or verdict == "TooLarge"
    if verdict == "Unknown":
        assert f"The model alone fits, but the size of {config['model']}" in fit.message


def test_memory_without_room_for_experts_says_what_to_lower(service: Build) -> None:
    args = {"args": ["--cpu-offload-experts", "12"]}
    fit = assess(service(resources={"gpus": 1, "memory": "9Gi", "gpuProducts": ["NVIDIA-H200"]}, runtime=args), SEVEN_B)
    assert fit is not None
    assert fit.verdict == "TooLarge"
    assert "Set resources.memory to 15Gi or leave it out, lower --cpu-offload-experts, or set" in fit.message
