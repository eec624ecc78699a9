"""e2e/cluster/foreign.py and backend.py: what a cluster of the user's lacks is named; what kind is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import backend, foreign
from e2e.cluster.processes import StartError


def pod(*statuses: dict[str, Any]) -> dict[str, Any]:
    return {"status": {"containerStatuses": list(statuses)}}


RUNNING = {"image": "a", "imageID": "sha256:1", "state": {"running": {}}}
STARTING = {"image": "b", "imageID": "", "state": {"waiting": {"reason": "ContainerCreating"}}}
FAILED = {"image": "c:1", "imageID": "", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such host"}}}


@pytest.mark.parametrize(
    ("statuses", "count", "words"),
    [
        ((), 0, ""),
        ((RUNNING, STARTING), 1, ""),
        ((RUNNING, RUNNING), 2, ""),
        ((RUNNING, FAILED), 1, "c:1 (no such host)"),
    ],
)
def test_which_image_a_node_cannot_have(statuses: tuple[dict[str, Any], ...], count: int, words: str) -> None:
    assert foreign.pulled(pod(*statuses)) == count
    assert foreign.refused(pod(*statuses)) == words


def test_kubeconfig_is_one_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.touch()
    monkeypatch.setenv("KUBECONFIG", str(config))
    assert foreign.kubeconfig() == config
    for wrong in (str(tmp_path / "none"), f"{config}:{config}"):
        monkeypatch.setenv("KUBECONFIG", wrong)
        with pytest.raises(StartError, match="is not one file"):
            foreign.kubeconfig()
    monkeypatch.delenv("KUBECONFIG")
    assert foreign.kubeconfig() is None


def test_three_images_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_E2E_IMAGES", "registry/op:1,registry/run:1,registry/hub:1")
    assert foreign.images().all == ["registry/op:1", "registry/run:1", "registry/hub:1"]
    monkeypatch.setenv("STOKER_E2E_IMAGES", "registry/op:1,,registry/hub:1")
    with pytest.raises(StartError, match="STOKER_E2E_IMAGES=OPERATOR"):
        foreign.images()


def test_kind_is_told_the_cluster_and_the_images(tmp_path: Path) -> None:
    create, load = backend.kind_commands(tmp_path / "config", ["a:1", "b:1"])
    name = f"--name={backend.KIND_NAME}"
    assert create[:3] == ["kind", "create", "cluster"]
    assert f"--kubeconfig={tmp_path / 'config'}" in create
    assert load == ["kind", "load", "docker-image", name, "a:1", "b:1"]
    assert name in create
