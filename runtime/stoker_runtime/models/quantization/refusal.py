"""What is said of a setting of `quantization_config` that is not supported.

Knows nothing of what is.
"""

from __future__ import annotations

from stoker_runtime.errors import ModelError


def refused(name: str, key: str, value: object, known: str) -> ModelError:
    """The error for the model `name`, whose `key` has a `value` other than what is `known`."""
    return ModelError(
        f"{name}: quantization_config's {key} {value!r} is not supported; it must be {known}.",
        param="quantization_config",
    )
