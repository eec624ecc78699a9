"""The routes that load and unload LoRA adapters: not built yet, and they say so.

Knows nothing of adapters.
"""

from __future__ import annotations

from fastapi import APIRouter

from stoker_runtime.api.http.routing import Route
from stoker_runtime.errors import UnsupportedError

router = APIRouter(route_class=Route)


@router.post("/v1/load_lora_adapter")
async def load_adapter() -> None:
    """POST /v1/load_lora_adapter. Raises UnsupportedError."""
    raise UnsupportedError("LoRA adapters cannot be loaded: this version of Stoker does not support LoRA yet.")


@router.post("/v1/unload_lora_adapter")
async def unload_adapter() -> None:
    """POST /v1/unload_lora_adapter. Raises UnsupportedError."""
    raise UnsupportedError("LoRA adapters cannot be unloaded: this version of Stoker does not support LoRA yet.")
