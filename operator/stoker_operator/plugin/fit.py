"""`kubectl stoker fit`: whether a model fits, with the operator's own arithmetic, on the GPUs that the spec names and
on those that are usual.

Invariants: pure; the numbers are those of `plan/fit.py`, which decides in the cluster.
Knows nothing of where the model's facts come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from stoker_operator.plan.fit import Fit, assess
from stoker_operator.plugin.errors import PluginError
from stoker_operator.plugin.screen import table
from stoker_operator.spec.quantity import human_bytes
from stoker_operator.spec.service import FetchedModel, InferenceService

USUAL = (
    "Tesla-T4", "NVIDIA-L4", "NVIDIA-A10G", "NVIDIA-L40S", "NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB",
    "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200", "NVIDIA-B200",
)  # fmt: skip


def report(service: InferenceService, model: FetchedModel) -> Iterator[str]:
    """The verdict in words, then a line for each usual GPU. Raises PluginError where nothing is known to add up."""
    if not model.bytes:
        text = (
            "how large the model is, is not known here: no service of the cluster has fetched it, and it is no preset's"
        )
        raise PluginError(
            f"{text}. Give --weights and --shape, or ask again when it is fetched: kubectl stoker fit NAME."
        )
    yield f"{service.model.uri}: {human_bytes(model.bytes)} of weights, context {_context(service, model)}"
    named = service.resources.gpu_products
    if named:
        fit = on(service, model, named)
        yield fit.message
    yield ""
    rows = [("GPU", "GiB", "NEEDED", "LEFT FOR MORE KV", "VERDICT")]
    for product in dict.fromkeys((*named, *USUAL)):
        fit = on(service, model, (product,))
        left = fit.gpu_gib * fit.usable - (fit.weights_gib + fit.kv_gib + fit.workspace_gib)
        spare = f"{left:.1f} GiB" if fit.verdict == "Fits" else "-"
        rows.append((product, f"{fit.gpu_gib:.0f}", f"{fit.required_gib:.1f}", spare, _verdict(fit)))
    yield from table(rows)


def on(service: InferenceService, model: FetchedModel, products: tuple[str, ...]) -> Fit:
    """The verdict for the smallest of these GPUs, one a pod, whatever the spec's check does."""
    wanted = replace(service.resources, gpus=max(1, service.resources.gpus), gpu_products=products, fit_check="Warn")
    fit = assess(replace(service, resources=wanted), model)
    if fit is None:
        raise PluginError("the check has nothing to say of this service.")
    return fit


def _context(service: InferenceService, model: FetchedModel) -> str:
    context = service.runtime.context_length or model.max_context
    return f"{context:,} tokens" if context else "not known"


def _verdict(fit: Fit) -> str:
    return {"Fits": "fits", "TooLarge": "too large"}.get(fit.verdict, "not known")
