"""Nodes with GPUs and their pods, as `room_for` asks for them."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
WAITING = -1


class Nodes:
    """A cluster of nodes with so many GPUs each, and what holds them; `WAITING` pods hold none."""

    def __init__(self, gpus: list[int], pods: dict[int, list[Object]]) -> None:
        self._gpus, self._pods = gpus, pods

    async def list_all(self, *_: Any) -> list[Object]:
        ready = [{"type": "Ready", "status": "True"}]
        return [
            {
                "metadata": {"name": str(number)},
                "spec": {},
                "status": {"conditions": ready, "allocatable": {"nvidia.com/gpu": str(count), "pods": "9"}},
            }
            for number, count in enumerate(self._gpus)
        ]

    async def pods_on(self, node: str) -> list[Object]:
        return self._pods.get(int(node) if node else WAITING, [])


def asking(gpus: int) -> Object:
    """A pod's spec."""
    return {"containers": [{"resources": {"limits": {"nvidia.com/gpu": str(gpus)}}}]}
