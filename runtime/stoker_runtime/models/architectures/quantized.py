"""The spec of a quantized checkpoint: which matrix rests in which scheme, and which mix of schemes none can.

Invariants: torch-free. What cannot be held or multiplied is a ModelError that names the matrix, its modules and their
schemes.
Knows nothing of how configurations name schemes, nor of files.
"""

from __future__ import annotations

from dataclasses import replace

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures.row import Architecture, Stored
from stoker_runtime.models.layer_specs.state_spec import Mixer
from stoker_runtime.models.parameter import QUANTIZED, Parameter, Role
from stoker_runtime.models.quantization.fp8_checkpoint import Fp8Checkpoint
from stoker_runtime.models.quantization.int8_checkpoint import Int8Checkpoint
from stoker_runtime.models.quantization.integer_checkpoint import IntegerCheckpoint
from stoker_runtime.models.quantization.mixed_checkpoint import (
    MixedCheckpoint,
    OneCheckpoint,
    Pieces,
    resting,
    scheme_words,
)
from stoker_runtime.models.quantization.quantized_checkpoint import QuantizedCheckpoint, pieces_of, scheme_of
from stoker_runtime.models.spec import ModelSpec


def quantized(spec: ModelSpec, checkpoint: QuantizedCheckpoint, row: Architecture) -> ModelSpec:
    """`spec` of a quantized checkpoint. Raises ModelError where no matrix holds what its parts are quantized in."""
    dense, found = [], {}
    spec = _gates_apart(spec, checkpoint, row)
    named = replace(spec, checkpoint=checkpoint)
    for parameter in spec.parameters():
        if parameter.role not in (*QUANTIZED, Role.LATENT):
            continue
        pieces = _pieces(named, parameter, row)
        if pieces:
            found[parameter.name] = pieces
        if parameter.role is Role.LATENT:
            _check_latents(checkpoint if not isinstance(checkpoint, MixedCheckpoint) else None, pieces)
        elif not pieces or _is_widened(pieces[0], parameter):
            dense.append(parameter.name)
        elif parameter.role is Role.EXPERTS:
            _check_experts(resting(pieces), parameter)
    _check_beside(spec, {name: pieces for name, pieces in found.items() if name not in dense})
    mixed = found if isinstance(checkpoint, MixedCheckpoint) else {}
    return replace(spec, checkpoint=checkpoint, dense_parameters=frozenset(dense), mixed=mixed)


def _pieces(spec: ModelSpec, parameter: Parameter, row: Architecture) -> Pieces:
    """How a parameter's pieces are quantized. Raises ModelError."""
    _, layer, field = parameter.name.split(".")
    names = row.names_of(spec, field)
    if names.stored not in (Stored.ROWS, Stored.BY_EXPERT, Stored.GROUPED):
        raise ModelError(
            f"quantization_config: checkpoints of {spec.architecture} that are quantized so are not supported, for "
            f"{names.hf[0]} is not stored row by row; serve the checkpoint in 16 bits, which --quantization fp8 makes "
            "smaller as it is loaded.", param="quantization_config",
        )  # fmt: skip
    experts = range(spec.moe.experts) if spec.moe and names.stored is Stored.BY_EXPERT else (0,)
    spoken = (name.removesuffix(".weight").format(expert=each) for each in experts for name in names.hf)
    modules = [f"{row.layers}{layer}.{name}" for name in spoken]
    assert spec.checkpoint is not None, "a quantized checkpoint says how"
    return pieces_of(spec.checkpoint, parameter.name, modules, experts=parameter.role is Role.EXPERTS)


def _check_latents(one: OneCheckpoint | None, pieces: Pieces) -> None:
    """Raises ModelError for what widens latents in a scheme that is not widened; of `one` scheme, whether or not."""
    for each in (one, *pieces):
        if isinstance(each, Int8Checkpoint):
            raise ModelError(
                f"latent attention in {each.described} is not supported; serve the checkpoint in 16 bits, in FP8 "
                "or in four.",
                param="quantization_config",
            )


def _is_widened(checkpoint: OneCheckpoint, parameter: Parameter) -> bool:
    """Whether a parameter becomes 16 bits when it is loaded, because no kernel multiplies what the checkpoint has."""
    if not isinstance(checkpoint, IntegerCheckpoint):
        return False
    return parameter.role is Role.EXPERTS and checkpoint.scheme.widens_experts


def _gates_apart(spec: ModelSpec, checkpoint: QuantizedCheckpoint, row: Architecture) -> ModelSpec:
    """`spec`, its gates of the delta rule apart where any layer has these in other numbers than what it reads."""
    if spec.recurrent is None or spec.recurrent.kind is not Mixer.GATED_DELTA:
        return spec
    modules = [name.removesuffix(".weight") for name in row.layer_names["state_in"].hf]
    schemes = (
        {scheme_of(checkpoint, f"{row.layers}{layer}.{module}") for module in modules}
        for layer in range(spec.num_layers)
        if spec.mixer(layer) is Mixer.GATED_DELTA
    )
    mixed = any(len(each) > 1 for each in schemes)
    return replace(spec, recurrent=replace(spec.recurrent, gates_apart=True)) if mixed else spec


def _check_experts(checkpoint: OneCheckpoint, parameter: Parameter) -> None:
    """Raises ModelError for experts that no kernel multiplies as the checkpoint has them."""
    scheme = None if isinstance(checkpoint, Fp8Checkpoint) else checkpoint.scheme
    problem = None if scheme is None else scheme.experts_problem(parameter.shape[1])
    if problem is not None:
        raise ModelError(
            f"experts in {checkpoint.described} are not multiplied so: {problem} ({parameter.name}); serve the "
            "checkpoint in 16 bits, in FP8 or in other integers.",
            param="quantization_config",
        )


def _check_beside(spec: ModelSpec, packed: dict[str, Pieces]) -> None:
    """Raises ModelError where the two matrices of a layer's experts, which one op multiplies, are not in one scheme."""
    for layer in range(spec.num_layers):
        if not spec.is_sparse(layer):
            continue
        names = [f"layers.{layer}.experts_{field}" for field in ("gate_up", "down")]
        both = [packed.get(name, ()) for name in names]
        words = [scheme_words(resting(pieces)) if pieces else "16 bits" for pieces in both]
        if words[0] != words[1]:
            raise ModelError(
                f"{names[0]} is in {words[0]} and {names[1]} in {words[1]}, but the experts of a layer are multiplied "
                "in one scheme; quantize both alike.",
                param="quantization_config",
            )
