"""fit.py and gpu.py together: what a pod is said to have room for on a part of a GPU, by the labels of nodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.operator.plan.test_fit import SEVEN_B

from stoker_operator.observe.gpu import Gpu, largest_gpu
from stoker_operator.plan.fit import LARGE_WORKSPACE_GIB, Fit, assess, remembered_gpu
from stoker_operator.spec.service import FetchedModel, InferenceService
from stoker_operator.spec.weights import read_weights
from stoker_runtime.fetch.report.shape import shape_of

Build = Callable[..., InferenceService]
# Qwen2.5-1.5B in bf16: 28 layers, 2 KV heads of 128. With 32,768 tokens it takes 5.8 GiB, 7B 17.9, or 19.1 where there
# is room for long steps; the engine has nine tenths.
WEIGHTS = read_weights(shape_of(Path("shape:qwen2.5-1.5b"))["weights"])
SMALL = replace(SEVEN_B, kv_heads=2, weights=WEIGHTS)
MODELS = {"1.5B": SMALL, "7B": SEVEN_B}


def node(product: str, *, memory: int = 0, **labels: str) -> dict[str, Any]:
    """As GPU feature discovery labels one; `labels` with _ for what a name cannot have."""
    known = {"gpu.product": product, **({"gpu.memory": str(memory)} if memory else {})}
    known |= {key.replace("__", ".").replace("_", "-"): value for key, value in labels.items()}
    return {"metadata": {"labels": {f"nvidia.com/{key}": value for key, value in known.items()}}}


def on(gpu: Mapping[str, Any], resource: str, model: FetchedModel, service: Build, **spec: Any) -> Fit:
    """The verdict for a service that names no product, where the cluster has such a node."""
    asked = service(resources={"gpus": 1, "gpuResource": resource}, **spec)
    found = assess(asked, model, largest_gpu([gpu], resource))
    assert found is not None
    assert not found.certain
    return found


@pytest.mark.parametrize(
    ("name", "of", "slice_", "verdict", "gib"),
    [
        ("1.5B", "NVIDIA-A100-SXM4-80GB", "1g.10gb", "Fits", 9.5),
        ("7B", "NVIDIA-A100-SXM4-80GB", "1g.10gb", "TooLarge", 9.5),
        ("7B", "NVIDIA-H100-80GB-HBM3", "3g.40gb", "Fits", 38.0),
        ("7B", "NVIDIA-GH200-480GB", "1g.24gb", "Fits", 22.8),
        ("7B", "NVIDIA-H200", "1g.18gb", "TooLarge", 17.1),
        ("7B", "NVIDIA-H200", "3g.71gb", "Fits", 67.5),
        ("1.5B", "NVIDIA-A30", "1g.6gb", "TooLarge", 5.7),
        ("1.5B", "NVIDIA-A30", "2g.12gb", "Fits", 11.4),
        ("1.5B", "NVIDIA-H100-96GB-HBM3", "1g.12gb.me", "Fits", 11.4),
    ],
)
def test_a_slice_has_room_for_what_it_says_itself(
    service: Build, name: str, of: str, slice_: str, verdict: str, gib: float
) -> None:
    """As the resource names it, and as the product does; the GPU that it is cut from has more."""
    resource, model = f"nvidia.com/mig-{slice_}", MODELS[name]
    mixed = on(node(of, memory=143771), resource, model, service)
    single = on(node(f"{of}-MIG-{slice_}"), "nvidia.com/gpu", model, service)
    assert (mixed.verdict, single.verdict) == (verdict, verdict)
    assert (mixed.gpu_gib, single.gpu_gib) == (pytest.approx(gib, abs=0.1), pytest.approx(gib, abs=0.1))
    assert f"of the slice {resource}: " in mixed.message
    assert mixed.message.startswith(f"The model {'fits' if verdict == 'Fits' else 'does not fit'}: weights ")
    assert f"GiB of {mixed.gpu_gib:.1f} GiB on {of}" in mixed.message
    assert ("Name a larger slice in resources.gpuResource" in mixed.message) == (verdict == "TooLarge")
    assert ("Name a larger GPU in resources.gpuProducts" in single.message) == (verdict == "TooLarge")


@pytest.mark.parametrize(("slice_", "blocks"), [("1g.12gb", True), ("2g.24gb", False)])
def test_a_named_slice_that_is_too_small_blocks(service: Build, slice_: str, blocks: bool) -> None:
    """A spec that names it leaves nothing to find out, whether by the product or beside it by the resource."""
    for resources in (
        {"gpuProducts": [f"NVIDIA-H100-NVL-MIG-{slice_}"]},
        {"gpuProducts": ["NVIDIA-H100-NVL"], "gpuResource": f"nvidia.com/mig-{slice_}"},
    ):
        fit = assess(service(resources={"gpus": 1, **resources}), SEVEN_B)
        assert fit is not None
        assert fit.blocks == blocks, fit.message


@pytest.mark.parametrize(
    ("product", "memory", "pods", "verdict", "part"),
    [
        ("NVIDIA-L40S", 46068, 2, "Fits", 22.5),
        ("NVIDIA-L40S", 46068, 3, "TooLarge", 15.0),
        ("NVIDIA-RTX-PRO-6000", 97887, 4, "Fits", 23.9),
        ("NVIDIA-RTX-PRO-6000", 97887, 7, "TooLarge", 13.7),
        ("NVIDIA-A100-SXM4-80GB-MIG-7g.80gb", 81920, 3, "Fits", 25.3),
        ("NVIDIA-A100-SXM4-80GB-MIG-3g.40gb", 40192, 5, "TooLarge", 7.6),
    ],
)
def test_pods_that_share_a_gpu_by_time_share_its_memory(
    service: Build, product: str, memory: int, pods: int, verdict: str, part: float
) -> None:
    shared = node(f"{product}-SHARED", memory=memory, gpu__replicas=str(pods))
    renamed = node(product, memory=memory, gpu__replicas=str(pods))
    for gpu, resource in ((shared, "nvidia.com/gpu"), (renamed, "nvidia.com/gpu.shared")):
        fit = on(gpu, resource, SEVEN_B, service)
        assert (fit.verdict, fit.gpu_gib, fit.gpu_pods) == (verdict, part, pods)
        assert f"90% of the pod's part of the GPU, which {pods} pods share: " in fit.message
        assert f"of {part} GiB on {product}" in fit.message
        told = f"takes more than that part: set --gpu-memory-utilization {0.9 / pods:.3f}"[:-1]
        assert (told in fit.message) == (verdict == "Fits")


def test_pods_that_share_a_slice_share_its_memory(service: Build) -> None:
    """Beside slices of other sizes on the same node, which nobody shares."""
    name = "mig-2g.35gb"
    labels = {f"nvidia.com/{name}.product": "NVIDIA-H200-MIG-2g.35gb-SHARED", f"nvidia.com/{name}.replicas": "3"}
    gpu = node("NVIDIA-H200", memory=143771)
    gpu["metadata"]["labels"] |= labels
    fit = on(gpu, f"nvidia.com/{name}", SMALL, service)
    assert (fit.verdict, fit.gpu_gib) == ("Fits", 11.1)
    assert f"of the pod's part of the slice nvidia.com/{name}, which 3 pods share" in fit.message
    assert on(gpu, f"nvidia.com/{name}", SEVEN_B, service).verdict == "TooLarge"
    assert on(gpu, "nvidia.com/mig-1g.35gb", SEVEN_B, service).verdict == "Fits"


@pytest.mark.parametrize(
    ("told", "verdict", "usable"),
    [("0.45", "Fits", 0.9), ("0.43", "Fits", 0.86), ("0.3", "TooLarge", 0.6), ("0.9", "Fits", 0.9)],
)
def test_engines_that_share_a_gpu_are_told_a_share_of_the_whole(
    service: Build, told: str, verdict: str, usable: float
) -> None:
    gpu = node("NVIDIA-L40S-SHARED", memory=46068, gpu__replicas="2")
    fit = on(gpu, "nvidia.com/gpu", SEVEN_B, service, runtime={"args": [f"--gpu-memory-utilization={told}"]})
    assert (fit.verdict, fit.usable) == (verdict, usable)
    assert ("takes more than that part" in fit.message) == (told == "0.9")
    assert fit.workspace_gib == LARGE_WORKSPACE_GIB, "it sees the whole GPU, and makes its steps as long"


@pytest.mark.parametrize(
    "resources",
    [
        {"gpuProducts": ["NVIDIA-L40S-SHARED"]},
        {"gpuProducts": ["NVIDIA-A100-SXM4-40GB-MIG-3g.20gb-SHARED"]},
        {"gpuProducts": ["NVIDIA-L40S"], "gpuResource": "nvidia.com/gpu.shared"},
    ],
)
def test_a_name_does_not_say_how_many_pods_share(service: Build, resources: dict[str, Any]) -> None:
    fit = assess(service(resources={"gpus": 1, **resources}), SMALL)
    assert fit is not None
    assert (fit.verdict, fit.blocks) == ("Unknown", False)
    assert fit.message.startswith(f"Pods share GPU {resources['gpuProducts'][0]}, and its name does not say how many")


def test_the_verdict_stays_while_the_spec_does(world: Callable[..., Any], service: Build) -> None:
    """What the status keeps of a shared GPU is what the next look begins with."""
    there = world(resources={"gpus": 1}).weights(15_231_233_024).pod().answered()
    there.gpu = Gpu("NVIDIA-L40S-SHARED", 15.0, 3)
    told = there.status()["fit"]
    assert (told["gpuGiB"], told["gpuPods"]) == (15.0, 3)
    assert remembered_gpu(service(status={"observedGeneration": 1, "fit": told})) == there.gpu
    there.gpu = Gpu("NVIDIA-L4", 22.5)
    assert "gpuPods" not in there.status()["fit"]
