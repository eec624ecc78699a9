"""Adapters of `LLM`: a request names one by its folder, and it is read when it is first asked for.

Invariants: a folder is read once for each name; a name belongs to one folder.
Knows nothing of prompts and outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stoker_runtime.engine.step_loop import StepLoop
from stoker_runtime.errors import RequestError


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """The adapter that prompts go through, as vLLM spells it: a name, a number of yours from 1 on, a PEFT folder."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str = ""


Loras = LoRARequest | Sequence[LoRARequest | None] | None


class LoraRequests:
    """The adapters that one `LLM` was asked for."""

    def __init__(self) -> None:
        self._known: dict[int, LoRARequest] = {}

    def numbers(self, loop: StepLoop, asked: Loras, count: int) -> list[int]:
        """The engine's number of the adapter of each of `count` prompts, 0 for none; reads what is new.

        Raises RequestError for a folder that cannot be used, and where one name or number means two folders.
        """
        if asked is None:
            return [0] * count
        each = list(asked) if isinstance(asked, Sequence) else [asked] * count
        if len(each) != count:
            raise RequestError(f"There are {count} prompts and {len(each)} adapters.", param="lora_request")
        found = {one: self._number(loop, one) for one in dict.fromkeys(each) if one is not None}
        return [found[one] if one is not None else 0 for one in each]

    def _number(self, loop: StepLoop, asked: LoRARequest) -> int:
        if asked.lora_int_id < 1:
            raise RequestError(f"lora_int_id is {asked.lora_int_id}; it must be at least 1.", param="lora_request")
        before = self._known.get(asked.lora_int_id)
        if before is not None and before != asked:
            raise RequestError(
                f"lora_int_id {asked.lora_int_id} is {before.lora_name} of {before.lora_path} already.",
                param="lora_request",
            )
        adapter = loop.adapters.served.get(asked.lora_name)
        if adapter is None:
            adapter = loop.adapters.load_now(asked.lora_name, asked.lora_path, asked.base_model_name)
        elif adapter.path != asked.lora_path:
            raise RequestError(f"The adapter {adapter.name} is {adapter.path} already.", param="lora_request")
        self._known[asked.lora_int_id] = asked
        return adapter.number
