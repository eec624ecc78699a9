"""gpu.py: what nodes' labels say of their GPUs."""

from __future__ import annotations

import pytest

from stoker_operator.observe.gpu import Gpu, LargestGpus, gpu_memory_gib, largest_gpu


@pytest.mark.parametrize(
    ("product", "gib"),
    [
        ("NVIDIA-H100-80GB-HBM3", 74.5),
        ("NVIDIA-A100-SXM4-40GB", 37.25),
        ("Tesla-T4", 15),
        ("NVIDIA-L40S", 45),
        ("NVIDIA-L4", 23),
        ("NVIDIA-A10G", 22),
        ("AMD-Something", 0),
        ("NVIDIA-H100-80GB-HBM3-MIG-3g.40gb", 38.0),
        ("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", 4.75),
        ("NVIDIA-L4-SHARED", 0),
        ("NVIDIA-H100-NVL-MIG-2g.24gb-SHARED", 0),
    ],
)
def test_memory_by_product(product: str, gib: float) -> None:
    assert gpu_memory_gib(product) == pytest.approx(gib, abs=0.1)


def node(**labels: str) -> dict[str, object]:
    return {"metadata": {"labels": {f"nvidia.com/gpu.{key}": value for key, value in labels.items()}}}


@pytest.mark.parametrize(
    ("resource", "labels", "expected"),
    [
        (
            "nvidia.com/mig-2g.20gb",
            {"product": "NVIDIA-A100-SXM4-80GB", "memory": "81920"},
            Gpu("NVIDIA-A100-SXM4-80GB", 19.0),
        ),
        (
            "nvidia.com/gpu",
            {"product": "NVIDIA-L4-SHARED", "memory": "23034", "replicas": "3"},
            Gpu("NVIDIA-L4-SHARED", 7.5, 3),
        ),
        ("nvidia.com/gpu", {"product": "NVIDIA-L4-SHARED", "replicas": "2"}, Gpu("NVIDIA-L4-SHARED", 11.5, 2)),
        ("nvidia.com/gpu", {"product": "NVIDIA-L4", "memory": "23034", "replicas": "1"}, Gpu("NVIDIA-L4", 22.5)),
    ],
)
def test_a_slice_is_what_a_pod_gets(resource: str, labels: dict[str, str], expected: Gpu) -> None:
    assert largest_gpu([node(**labels)], resource) == expected


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([], Gpu("", 0.0)),
        ([node()], Gpu("", 0.0)),
        ([node(product="Tesla-T4"), node(product="NVIDIA-L4")], Gpu("NVIDIA-L4", 23.0)),
        ([node(product="Mystery", memory="81559")], Gpu("Mystery", 79.6)),
        ([node(product="NVIDIA-L4", memory="23034"), node(product="Mystery")], Gpu("NVIDIA-L4", 22.5)),
    ],
)
def test_the_largest_gpu_by_its_nodes_labels(nodes: list[dict[str, object]], expected: Gpu) -> None:
    assert largest_gpu(nodes) == expected


def whole_node(name: str, product: str, **spec: object) -> dict[str, object]:
    """A node as the API server has it, with one GPU."""
    status = {"conditions": [{"type": "Ready", "status": "True"}], "allocatable": {"nvidia.com/gpu": "1"}}
    labels = {"nvidia.com/gpu.product": product, "pool": name}
    return {"metadata": {"name": name, "labels": labels}, "spec": spec, "status": status}


def test_what_is_known_of_nodes_is_known_by_placement_and_for_these_nodes_alone() -> None:
    known, resource = LargestGpus(), "nvidia.com/gpu"
    nodes = [whole_node("old", "Tesla-T4"), whole_node("new", "NVIDIA-H200"), whole_node("off", "NVIDIA-B200")]
    nodes[2]["spec"] = {"unschedulable": True}
    for _ in range(2):
        assert known.of(nodes, {}, resource) == Gpu("NVIDIA-H200", 140.0)
        assert known.of(nodes, {"nodeSelector": {"pool": "old"}}, resource) == Gpu("Tesla-T4", 15.0)
        assert known.of(nodes, {}, "amd.com/gpu") == Gpu("", 0.0)
    back = [*nodes[:2], nodes[2] | {"spec": {}}]
    assert known.of(back, {}, resource) == Gpu("NVIDIA-B200", 178.0)
    assert known.of(nodes[:1], {}, resource) == Gpu("Tesla-T4", 15.0)
