"""host_memory.py: what a pod needs when it keeps KV pages in host memory, by the spec's flags and variables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker_operator import manifests
from stoker_operator.manifests.host_memory import ENGINE_GIB, HostMemory, host_memory
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings
from stoker_operator.spec.service import FetchedModel, InferenceService
from stoker_runtime.config import EngineConfig
from stoker_runtime.executor.host_memory import plan_host
from stoker_runtime.executor.resolve import resolve
from stoker_runtime.fetch.report.shape import shape_of
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import read_source
from stoker_runtime.settings.parse import parse as parse_serve

Build = Callable[..., InferenceService]
# Qwen2.5-7B in bf16: 28 layers, 4 KV heads of 128.
SEVEN_B = FetchedModel("r", "sha256:a", 15_231_233_024, "p", "p", 28, 4, 128, 32768)
TOKEN = 2 * 28 * 4 * 128 * 2
SPACE = {"name": "STOKER_SWAP_SPACE", "value": "16"}


@pytest.mark.parametrize(
    ("runtime", "pool"),
    [
        ({}, 0),
        ({"args": ["--seed", "7"]}, 0),
        ({"args": ["--swap-space", "16"]}, 16 * 2**30),
        ({"args": ["--swap-space=0.5"]}, 2**29),
        ({"args": ["--swap_space", "16"]}, 16 * 2**30),
        ({"args": ["--kv-offloading-size", "4"]}, 4 * 2**30),
        ({"args": ["--swap-space", "16", "--seed", "7", "--swap-space", "2"]}, 2 * 2**30),
        ({"env": [SPACE]}, 16 * 2**30),
        ({"env": [SPACE], "args": ["--swap-space", "1"]}, 2**30),
        ({"env": [SPACE], "args": ["--swap-space", "0"]}, 0),
        ({"env": [{"name": "STOKER_SWAP_SPACE", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]}, 0),
        ({"args": ["--num-cpu-blocks", "1k"]}, 1000 * 64 * TOKEN),
        ({"args": ["--num-cpu-blocks", "1K", "--block-size", "16"]}, 1024 * 16 * TOKEN),
        (
            {
                "env": [{"name": "STOKER_NUM_CPU_BLOCKS", "value": "10"}, {"name": "STOKER_BLOCK_SIZE", "value": "32"}],
            },
            10 * 32 * TOKEN,
        ),
    ],
    ids=str,
)
def test_the_pool_is_what_the_engine_reads(service: Build, runtime: dict[str, Any], pool: int) -> None:
    found = host_memory(service(resources={"gpus": 1}, runtime=runtime), SEVEN_B)
    assert (found.pool * 2**30 if found else 0) == pool
    variables = {item["name"]: item["value"] for item in runtime.get("env", ()) if "value" in item}
    engine = parse_serve(["m", *runtime.get("args", ())], variables).engine
    read = engine.swap_space * 2**30 or engine.num_cpu_blocks * (engine.page_size or 64) * TOKEN
    assert read == pool


@pytest.mark.parametrize(
    ("dtype", "gpus", "bytes_each"), [("FP8", 1, 1), ("BF16", 1, 2), ("Auto", 0, 4), ("BF16", 0, 2)]
)
def test_pages_are_of_the_caches_type(service: Build, dtype: str, gpus: int, bytes_each: int) -> None:
    model = {"uri": "hf://org/model", "kvCacheDtype": dtype}
    runtime = {"args": ["--num-cpu-blocks", "100", "--block-size", "16"]}
    found = host_memory(service(model=model, resources={"gpus": gpus}, runtime=runtime), SEVEN_B)
    assert found is not None
    assert found.pool * 2**30 == 100 * 16 * TOKEN // 2 * bytes_each


@pytest.mark.parametrize("pages", [3, 41, 9000])
@pytest.mark.parametrize("shape", ["nemotron-h-8b", "qwen3-next-80b-a3b@7"])
def test_states_lie_there_beside_pages_as_the_engine_has_them(service: Build, shape: str, pages: int) -> None:
    found, spec = shape_of(Path(f"shape:{shape}")), build_spec(read_source(f"shape:{shape}"))
    model = replace(
        SEVEN_B, layers=found["layers"], kv_heads=found["kvHeads"], head_dim=found["headDim"],
        state_bytes=found["stateBytes"],
    )  # fmt: skip
    runtime = {"args": ["--num-cpu-blocks", str(pages)]}
    counted = host_memory(service(resources={"gpus": 1}, runtime=runtime), model)
    config = resolve(EngineConfig(model="m", num_cpu_blocks=pages, dtype="bfloat16"), spec, "cuda")
    plan = plan_host(config, spec, lambda: 1 << 60)
    assert counted is not None
    assert plan.states.count > 0
    assert counted.pool * 2**30 == pytest.approx(plan.nbytes)


@pytest.mark.parametrize("size", ["", "many", "-1", "nan", "inf"])
def test_what_the_engine_refuses_is_not_counted(service: Build, size: str) -> None:
    for flag in ("--swap-space", "--num-cpu-blocks"):
        assert host_memory(service(resources={"gpus": 1}, runtime={"args": [f"{flag}={size}"]}), SEVEN_B) is None


def test_pages_of_an_unknown_shape_are_not_guessed(service: Build, model: FetchedModel) -> None:
    built = service(resources={"gpus": 1}, runtime={"args": ["--num-cpu-blocks", "100"]})
    assert host_memory(built, model) is None


@pytest.mark.parametrize(
    ("fields", "memory"),
    [
        # 16 + /dev/shm 1 + the engine.
        ({"resources": {"gpus": 1}}, ("18535Mi", None)),
        ({"resources": {"gpus": 1}, "runtime": {"shmSize": "512Mi", "args": ["--swap-space", "2"]}}, ("3687Mi", None)),
        # Without a GPU the weights, 93.8 MiB, are in the pod's memory too.
        ({"resources": {"gpus": 0}}, ("18629Mi", None)),
        # What the spec says stays as it is: fit.py says whether it is enough.
        ({"resources": {"gpus": 1, "memory": "8Gi"}}, ("8Gi", "8Gi")),
        ({"resources": {"gpus": 1}, "runtime": {}}, (None, None)),
    ],
    ids=["unset", "fractions", "cpu", "set", "no-pool"],
)
def test_a_pod_requests_the_sum(
    service: Build, settings: Settings, model: FetchedModel, fields: dict[str, Any], memory: tuple[str | None, ...]
) -> None:
    built = service(**({"runtime": {"args": ["--swap-space", "16"]}} | fields))
    workload = manifests.deployment(built, settings, model, first_variant(built))
    [engine] = workload["spec"]["template"]["spec"]["containers"]
    resources = engine["resources"]
    assert (resources["requests"].get("memory"), resources["limits"].get("memory")) == memory


def test_the_sum_is_said(service: Build) -> None:
    found = host_memory(service(resources={"gpus": 1}, runtime={"args": ["--swap-space", "16"]}), SEVEN_B)
    assert found is not None
    assert found.required == ENGINE_GIB + 1 + 16
    assert found.sums == "engine 1.1 + /dev/shm 1.0 + KV pages in host memory 16.0: 18.1 GiB"


def test_each_engine_of_a_pod_has_weights_and_pages_of_its_own(service: Build) -> None:
    def found(engines: int) -> HostMemory:
        spec = {"resources": {"gpus": 0}, "parallelism": {"tensor": 2, "data": engines}}
        host = host_memory(service(**spec, runtime={"args": ["--num-cpu-blocks", "700"]}), SEVEN_B)
        assert host is not None
        return host

    one, three = found(1), found(3)
    assert (three.engine, three.pool, three.weights) == pytest.approx((3 * one.engine, 3 * one.pool, 3 * one.weights))
    assert three.shm == one.shm


def test_each_rank_has_a_pool_of_its_own_and_processes(service: Build) -> None:
    spec = {"resources": {"gpus": 6}, "parallelism": {"tensor": 3, "pipeline": 2}}
    found = host_memory(service(**spec, runtime={"args": ["--swap-space", "4"], "shmSize": "2Gi"}), SEVEN_B)
    assert found is not None
    assert found.required == pytest.approx(6 * (4 + ENGINE_GIB) + 2)
    assert f"engine {6 * ENGINE_GIB:.1f} + /dev/shm 2.0" in found.sums


@pytest.mark.parametrize("engines", [1, 3])
def test_experts_in_host_memory_are_pinned_there(service: Build, engines: int) -> None:
    """They count without any pages, for each GPU, and no more of them than there are."""
    spec = {"resources": {"gpus": 2 * engines}, "parallelism": {"tensor": 2, "data": engines}}
    model = replace(SEVEN_B, weights=None)
    found = host_memory(service(**spec, runtime={"args": ["--cpu-offload-experts", "7.5"]}), model)
    assert found is not None
    assert found.pool == 0
    assert found.required == pytest.approx(2 * engines * (7.5 + ENGINE_GIB) + 1)
    assert found.sums.startswith(f"engine {2 * engines * ENGINE_GIB:.1f} + /dev/shm 1.0 + experts in host memory ")
    on_cpu = spec | {"resources": {"gpus": 0}}
    assert host_memory(service(**on_cpu, runtime={"args": ["--cpu-offload-experts", "7.5"]}), model) is None
