"""The specs of models that pool: encoders, and decoders without their output head.

Invariants: torch-free.
Knows nothing of which states become a vector.
"""

from __future__ import annotations

from dataclasses import replace

from stoker_runtime.errors import ModelError
from stoker_runtime.models.architectures import ARCHITECTURES, build_spec
from stoker_runtime.models.architectures.build import TABLE, nearest
from stoker_runtime.models.config_source import ModelSource
from stoker_runtime.models.encoders.spec import EncoderSpec
from stoker_runtime.models.encoders.table import ENCODERS, build_encoder, encoder_name
from stoker_runtime.models.pooling import scoring_decoder
from stoker_runtime.models.spec import ModelSpec

ENCODER_TABLE = "stoker_runtime/models/encoders/table.py"


def pooling_spec(source: ModelSource) -> EncoderSpec | ModelSpec:
    """The spec of a model that pools: an encoder's, or a decoder's without its output head. Raises ModelError."""
    if encoder_name(source) is not None:
        return build_encoder(source)
    spec = decoder_spec(source)
    scores = scoring_decoder(source) is not None
    return replace(spec, tie_embeddings=True, head_bias=False, scores=scores)


def decoder_spec(source: ModelSource) -> ModelSpec:
    """The spec of a decoder, with the output head that it generates with. Raises ModelError."""
    scoring = scoring_decoder(source)
    given = [str(name) for name in source.config.get("architectures") or []] if scoring is None else [scoring]
    # A decoder saved without its head is called Qwen3Model where the whole one is Qwen3ForCausalLM.
    bare = [name.endswith("Model") and name not in ARCHITECTURES for name in given]
    names = [f"{name.removesuffix('Model')}ForCausalLM" if cut else name for name, cut in zip(given, bare, strict=True)]
    if not any(name in ARCHITECTURES for name in names):
        known = (*ENCODERS, *ARCHITECTURES)
        raise ModelError(
            f"{source.name}: architecture {', '.join(given) or 'none'} is not supported."
            f"{nearest(given[0], known) if given else ''} Supported for pooling are {', '.join(known)}: the rows of "
            f"{ENCODER_TABLE} and {TABLE}, where one that they can run is added.",
            param="model",
        )
    spec = build_spec(replace(source, config={**source.config, "architectures": names}))
    if spec.recurrent is not None:
        raise ModelError(f"{source.name}: {spec.architecture} keeps a state for each sequence, and does not pool.")
    return spec
