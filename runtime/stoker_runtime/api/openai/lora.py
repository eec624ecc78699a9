"""The routes that load and unload LoRA adapters: not built yet, and they say so.

Knows nothing of adapters.
"""

from __future__ import annotations

from stoker_runtime.api.answering.state import ServerState
from stoker_runtime.api.http.http import Request, Response
from stoker_runtime.errors import UnsupportedError


async def load_adapter(_: ServerState, request: Request) -> Response:
    """POST /v1/load_lora_adapter. Raises UnsupportedError."""
    raise UnsupportedError("LoRA adapters cannot be loaded: this version of Stoker does not support LoRA yet.")


async def unload_adapter(_: ServerState, request: Request) -> Response:
    """POST /v1/unload_lora_adapter. Raises UnsupportedError."""
    raise UnsupportedError("LoRA adapters cannot be unloaded: this version of Stoker does not support LoRA yet.")
