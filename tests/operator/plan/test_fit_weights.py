"""The weights of the fit check are the engine's own: by kinds of quantization, of checkpoints and ranks of all sorts.

Of each service the engine is asked that the operator's own manifests start, for the shape that a prefetch reports.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.operator.plan.checkpoints import (
    BLOCKS,
    GPT_OSS_120B,
    LATENTS,
    METHODS,
    MIXTRAL_8X22B,
    SALAMANDRA_7B,
    SEEING,
    TIED,
    Config,
    blocks,
    config,
    drawn,
    folder,
)

from stoker_kernels.launch import cc
from stoker_operator import manifests
from stoker_operator.manifests.host_memory import host_memory
from stoker_operator.manifests.weight_memory import gpu_weights, host_weights, hosted_experts
from stoker_operator.observe.gpu import gpu_memory_gib
from stoker_operator.plan.fit import assess
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings
from stoker_operator.spec.model import IN_SITU, QUANTIZATIONS
from stoker_operator.spec.service import (
    FetchedModel,
    InferenceService,
    model_status,
    parse_fetch_result,
    remembered_model,
)
from stoker_runtime.config import EngineConfig
from stoker_runtime.engine.head_start import upload_room
from stoker_runtime.errors import ConfigError
from stoker_runtime.executor.images.plan import plan_images
from stoker_runtime.executor.resolve import GIB, asked_quantization, refuse_at_load, resolve
from stoker_runtime.fetch.report.shape import shape_of
from stoker_runtime.models.architectures import build_spec
from stoker_runtime.models.config_source import ModelSource, read_source
from stoker_runtime.models.encoders.spec import EncoderSpec
from stoker_runtime.models.hosted_experts import device_bytes, hosted_bytes, with_hosted
from stoker_runtime.models.pooling_spec import pooling_spec
from stoker_runtime.models.quantized_head import with_head
from stoker_runtime.models.spec import ModelSpec
from stoker_runtime.parallel.place import places
from stoker_runtime.parallel.split import split_spec
from stoker_runtime.settings.parse import parse as parse_serve
from stoker_runtime.weights.block_plan import decoding_reason, plan_blocks
from stoker_runtime.weights.packed.requantize import requantized

Build = Callable[..., InferenceService]
SEED = random.SystemRandom().randrange(1 << 30)
KINDS = (*QUANTIZATIONS, *IN_SITU)
HEAD = ("--quantize-head", "fp8")
ENDS = (*HEAD, "--quantize-embedding", "q8_0")


def fetched(path: Path, size: int = 0) -> FetchedModel:
    """What the operator knows of a model that a prefetch has reported, and its status remembered."""
    size = path.stat().st_size if path.is_file() else size or 1
    serve = "sha256-ab/m.gguf" if path.is_file() else "sha256-ab"
    told = {"resolvedRevision": "c", "digest": "sha256:ab", "bytes": size, "path": "sha256-ab", "serve": serve}
    report = json.dumps({**told, "shape": shape_of(path)})
    assert len(report) < 4096  # as long as a termination log may be
    found = parse_fetch_result(report)
    assert isinstance(found, FetchedModel)
    remembered = remembered_model(json.loads(json.dumps({"model": model_status(found, "s")})))
    assert remembered == found
    return found


class Engine:
    """A checkpoint as the engine counts it."""

    def __init__(self, path: Path) -> None:
        self.source: ModelSource = read_source(str(path))
        self.spec: ModelSpec = build_spec(self.source)

    def config(self, service: InferenceService, model: FetchedModel) -> EngineConfig:
        """As the operator's manifest starts it."""
        pod = manifests.deployment(service, Settings(), model, first_variant(service))["spec"]["template"]["spec"]
        return parse_serve([str(argument) for argument in pod["containers"][0]["args"]][1:], {}).engine.validate()

    def held(self, config: EngineConfig, device: str = "cuda", dtype: str = "") -> int:
        """Bytes of the weights on the fullest of the ranks. Raises ConfigError where it does not start."""
        return max(on_device for on_device, _ in self.taken(config, device, dtype))

    def taken(self, config: EngineConfig, device: str = "cuda", dtype: str = "") -> list[tuple[int, int]]:
        """The same of each rank that may be the fullest, and what its experts take of the host."""
        refuse_at_load(config)
        whole, sizes = with_head(self.spec, config.quantize_head), []
        for place in places(config.tensor_parallel_size, config.pipeline_parallel_size):
            if 0 < place.tensor < place.tensors - 1:
                continue  # none is fuller than the first or the last
            part = requantized(config, split_spec(whole, place))
            refused, asked = decoding_reason(config, part, device), asked_quantization(config)
            embedding = config.quantize_embedding
            spec = plan_blocks(
                part, self.source, asked, device, refused=refused, whole=whole, embedding=embedding
            ).spec
            resolved = resolve(config, spec, device)
            spec, kinds = with_hosted(resolved, spec, lambda: 1 << 60), (dtype or resolved.dtype, resolved.quantization)
            sizes.append((device_bytes(spec, *kinds), hosted_bytes(spec, *kinds)))
        return sizes


def spec_of(kind: str, tensor: int = 1, pipeline: int = 1, args: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "model": {"uri": "hf://a/b", "quantization": kind},
        "resources": {"gpus": tensor * pipeline, "gpuProducts": ["NVIDIA-H200"]},
        "parallelism": {"tensor": tensor, "pipeline": pipeline},
        "runtime": {"args": list(args), "contextLength": 512},
    }


def check(service: InferenceService, engine: Engine, model: FetchedModel) -> bool:
    """The fit's bytes are within 3% of the engine's; or it knows no number, and the engine would not start."""
    found, fit = gpu_weights(service, model), assess(service, model)
    assert fit is not None
    try:
        held = engine.held(engine.config(service, model))
    except ConfigError:
        # How a model may be cut the engine says itself.
        assert found.unknown or service.parallelism.ranks > 1
        assert not found.unknown or (fit.verdict, fit.weights_gib, fit.required_gib) == ("Unknown", 0, 0)
        return False
    assert not found.unknown
    assert found.least == found.most == pytest.approx(held, rel=0.03)
    assert fit.weights_gib == pytest.approx(held / GIB, rel=0.03, abs=0.051)
    return True


def check_all(service: Build, path: Path) -> set[str]:
    """Each kind with and without a head and an embedding in 8 bits, on one GPU and on two. Returns the kinds that
    start on one.
    """
    engine, model = Engine(path), fetched(path)
    started = {
        (tensor, args): {kind for kind in KINDS if check(service(**spec_of(kind, tensor, 1, args)), engine, model)}
        for tensor in (1, 2)
        for args in ((), HEAD, ENDS, ENDS[2:])
    }
    assert all("Auto" in kinds for (tensor, args), kinds in started.items() if tensor == 1 or ENDS[2] not in args)
    return started[1, ()]


AT_LOAD = {"Q8_0", "Q4K"}
STARTS = {
    "bf16": {"Auto", "None", "FP8", "W4", *AT_LOAD},
    "fp8": {"Auto", "FP8", *AT_LOAD},
    "awq": {"Auto", "AWQ", *AT_LOAD},
    "gptq": {"Auto", "GPTQ", *AT_LOAD},
    "nvfp4": {"Auto", "ModelOpt", *AT_LOAD},
    "mxfp4": {"Auto", "CompressedTensors", *AT_LOAD},
}


@pytest.mark.parametrize("shape", ["published", "tied", "random"])
@pytest.mark.parametrize("method", METHODS)
def test_safetensors_take_what_the_engine_takes(method: str, shape: str, service: Build, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    model = {"published": SALAMANDRA_7B, "tied": TIED, "random": drawn(random.Random(SEED))}[shape]
    assert check_all(service, folder(tmp_path, model, METHODS[method])) == STARTS[method]


@pytest.mark.parametrize("shape", ["published", "random"])
@pytest.mark.parametrize("form", BLOCKS)
def test_gguf_files_take_what_the_engine_takes(form: str, shape: str, service: Build, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    path = blocks(tmp_path / "m.gguf", SALAMANDRA_7B if shape == "published" else drawn(random.Random(SEED)), form)
    assert check_all(service, path) == {"Auto", "None", "FP8", "W4", "GGUF", *AT_LOAD}
    check(service(**spec_of("Auto", args=("--batch-invariant",))), Engine(path), fetched(path))


@pytest.mark.parametrize(
    ("model", "method", "starts"),
    [
        (MIXTRAL_8X22B, None, {"Auto", "None", "FP8", "W4"}),
        (MIXTRAL_8X22B, METHODS["nvfp4"], {"Auto", "ModelOpt"}),
        (MIXTRAL_8X22B, METHODS["awq"], {"Auto", "AWQ"}),
        (GPT_OSS_120B, None, {"Auto", "MXFP4", "None", "FP8"}),
    ],
    ids=["bf16", "nvfp4", "awq", "gpt-oss"],
)
def test_mixtures_take_what_the_engine_takes(
    model: Config, method: Config | None, starts: set[str], service: Build, tmp_path: Path
) -> None:
    assert check_all(service, folder(tmp_path, model, method)) == starts


@pytest.mark.parametrize(("tensor", "pipeline"), [(4, 1), (8, 1), (1, 2), (1, 3), (2, 5)])
@pytest.mark.parametrize("model", [SALAMANDRA_7B, MIXTRAL_8X22B, LATENTS], ids=["dense", "mixture", "latents"])
def test_a_rank_takes_what_the_engine_gives_it(
    model: Config, tensor: int, pipeline: int, service: Build, tmp_path: Path
) -> None:
    path = folder(tmp_path, model)
    engine, known = Engine(path), fetched(path)
    for kind in ("Auto", "FP8", "W4"):
        assert check(service(**spec_of(kind, tensor, pipeline)), engine, known)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 3)])
@pytest.mark.parametrize("model", [MIXTRAL_8X22B, GPT_OSS_120B], ids=["mixtral", "gpt-oss"])
def test_experts_in_host_memory_are_counted_there_and_not_on_the_gpu(
    model: Config, tensor: int, pipeline: int, service: Build, tmp_path: Path
) -> None:
    """To 3% of all weights; of stages of other sizes a layer of experts more."""
    print(f"seed {SEED}")
    path, rng = folder(tmp_path, model), random.Random(SEED)
    engine, known = Engine(path), fetched(path)
    for kind in ("Auto", "FP8"):
        whole = engine.held(engine.config(service(**spec_of(kind, tensor, pipeline)), known))
        everything = service(**spec_of(kind, tensor, pipeline, ("--cpu-offload-experts", "900")))
        most = engine.taken(engine.config(everything, known))[0][1]
        count = len(places(tensor, pipeline)[0].layers(engine.spec.num_layers))
        # So many layers and a part of one: beside a whole number, sums that are right to 3% are a layer apart.
        some = (rng.randrange(1, count) + rng.uniform(0.3, 0.7)) * most / count
        for gib in (some / GIB, 900.0):
            asked = service(**spec_of(kind, tensor, pipeline, ("--cpu-offload-experts", f"{gib:.3f}")))
            taken = engine.taken(engine.config(asked, known))
            found, layer = gpu_weights(asked, known), whole / engine.spec.num_layers * pipeline
            assert max(here for here, _ in taken) <= found.most + 0.03 * whole
            assert found.most <= max(here for here, _ in taken) + 0.03 * whole + (layer if pipeline > 1 else 0)
            there = hosted_experts(asked, known)
            assert max(host for _, host in taken) == pytest.approx(there, abs=0.03 * whole)
            host = host_memory(asked, known)
            assert host is not None
            assert host.experts == pytest.approx(there * tensor * pipeline / GIB)


@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("tensor", [1, 2])
def test_what_sees_is_counted_on_each_gpu_unless_it_is_left_out(
    name: str, tensor: int, service: Build, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SEEING[name]))
    known, source = fetched(tmp_path), read_source(str(tmp_path))
    asked = service(**spec_of("Auto", tensor, 1))
    blind = service(**spec_of("Auto", tensor, 1, ("--language-model-only",)))
    engine = Engine(tmp_path)
    assert not engine.config(asked, known).language_model_only
    assert engine.config(blind, known).language_model_only
    resolved = EngineConfig(
        model=str(tmp_path), dtype="bfloat16", max_model_len=128_000, max_num_batched_tokens=8192,
        tensor_parallel_size=tensor,
    )  # fmt: skip
    plan = plan_images(resolved, source, engine.spec)
    assert plan is not None
    # Without what is kept of images, which is workspace.
    counted = gpu_weights(asked, known).most - gpu_weights(blind, known).most
    assert counted == pytest.approx(plan.weights + plan.working)


@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (6, 1), (3, 2)])
def test_other_numbers_of_ranks_are_counted_between_those_reported(
    tensor: int, pipeline: int, service: Build, tmp_path: Path
) -> None:
    path = folder(tmp_path, config("Llama", (3072, 24, 12, 8448, 200_064, 32), head_dim=128))
    engine, known = Engine(path), fetched(path)
    for kind in ("None", "W4"):
        assert check(service(**spec_of(kind, tensor, pipeline)), engine, known)


@pytest.mark.skipif(cc.refusal("cpu_blocks") is not None, reason=f"{cc.refusal('cpu_blocks')}")
@pytest.mark.parametrize("form", BLOCKS)
def test_on_a_cpu_numbers_are_counted_as_the_widest_that_it_may_take(
    form: str, service: Build, tmp_path: Path
) -> None:
    path = blocks(tmp_path / "m.gguf", TIED | {"tie_word_embeddings": False}, form)
    model, engine = fetched(path), Engine(path)
    for kind in ("Auto", "None", "GGUF", "W4"):
        built = service(model={"uri": "hf://a/b", "quantization": kind})
        found, asked = host_weights(built, model), engine.config(built, model)
        # Blocks rest as a file has them, and not in planes.
        assert found.most == pytest.approx(engine.held(asked, "cpu", "float32"), rel=0.07)
        assert found.least <= 1.07 * engine.held(asked, "cpu", "bfloat16")


@pytest.mark.parametrize("kind", ["FP8", "W4", "Q8_0", "Q4K"])
def test_a_model_that_fits_in_situ_alone_is_loaded_layer_by_layer(kind: str, service: Build, tmp_path: Path) -> None:
    path, product = folder(tmp_path, SALAMANDRA_7B | {"num_hidden_layers": 112}), "NVIDIA-L40S"
    size, total = Engine(path).spec.parameter_bytes("bfloat16"), int(gpu_memory_gib(product) * GIB)
    model = fetched(path, size)
    assert size < total < 1.1 * size / 0.9
    asked: dict[str, Any] = spec_of(kind) | {"resources": {"gpus": 1, "gpuProducts": [product]}}
    built = service(**asked)
    fit, whole = assess(built, model), assess(service(**asked | {"model": {"uri": "hf://a/b"}}), model)
    assert fit is not None
    assert whole is not None
    assert (fit.verdict, whole.verdict) == ("Fits", "TooLarge")
    config = Engine(path).config(built, model)
    assert asked_quantization(config) == {"FP8": "fp8", "W4": "w4", "Q8_0": "q8_0", "Q4K": "q4k"}[kind]
    # The head start brings files to the GPU only as far as they have room beside what is made of them.
    assert config.isq != "none" or max(0, upload_room(config, total, total, size)) + size < total


@pytest.mark.parametrize("gib", [0.1, 9.0, 900.0])
@pytest.mark.parametrize("gguf_file", [False, True])
def test_what_was_not_reported_is_not_known(gib: float, gguf_file: bool, service: Build) -> None:
    """Of a prefetch of before the operator has bytes and shape, and says no number of weights, nor that they fit."""
    serve = "p/m.gguf" if gguf_file else "p"
    told = {"resolvedRevision": "c", "digest": "d", "bytes": int(gib * GIB), "path": "p", "serve": serve}
    shape = {"layers": 5, "kvHeads": 2, "headDim": 64, "maxContext": 512}
    model = parse_fetch_result(json.dumps({**told, "shape": shape}))
    assert isinstance(model, FetchedModel)
    for kind in KINDS:
        fit = assess(service(**spec_of(kind)), model)
        assert fit is not None
        assert (fit.verdict, fit.weights_gib, fit.required_gib, fit.blocks) == ("Unknown", 0, 0, False)
        assert "did not report what the weights take" in fit.message
    # Nor is a pod without a GPU said to have room, or none but for its pages alone.
    for memory, verdict in (("15Gi", "Unknown"), ("3000Gi", "Unknown"), ("5Gi", "TooLarge")):
        built = service(resources={"gpus": 0, "memory": memory}, runtime={"args": ["--swap-space", "9"]})
        fit = assess(built, model)
        assert fit is not None
        assert (fit.verdict, fit.blocks) == (verdict, verdict == "TooLarge")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dtype", "float32"], "--dtype float32 was not reported"),
        (["--runner", "pooling"], "--runner pooling was not reported"),
        (["--dtype", "float16", "--runner", "generate"], ""),
    ],
)
def test_flags_that_change_what_weights_take_are_seen(
    flags: list[str], said: str, service: Build, tmp_path: Path
) -> None:
    fit = assess(service(**spec_of("Auto", args=tuple(flags))), fetched(folder(tmp_path, TIED)))
    assert fit is not None
    assert (fit.verdict, said in fit.message) == ("Unknown" if said else "Fits", True)


@pytest.mark.parametrize("bare", [True, False])
def test_a_decoder_that_pools_has_no_head(bare: bool, service: Build, tmp_path: Path) -> None:
    model = config("Qwen3", (1024, 16, 8, 3072, 151_669, 3), head_dim=128)
    if bare:
        model["architectures"] = ["Qwen3Model"]
    else:
        (tmp_path / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Transformer"}]))
    path = folder(tmp_path, model)
    known, spec = fetched(path), pooling_spec(read_source(str(path)))
    assert isinstance(spec, ModelSpec)
    for kind, made in (("Auto", "none"), ("FP8", "fp8"), ("W4", "w4")):
        found = gpu_weights(service(**spec_of(kind)), known)
        assert found.most == pytest.approx(spec.parameter_bytes("bfloat16", made), rel=0.001)
    for asked in (spec_of("Q4K"), spec_of("Auto", 2), spec_of("Auto", args=HEAD)):
        assert "engine refuses" in gpu_weights(service(**asked), known).unknown


def test_an_encoder_is_reported(service: Build, tmp_path: Path) -> None:
    sizes = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 6}
    more = {"vocab_size": 30_522, "max_position_embeddings": 512, "type_vocab_size": 2, "hidden_act": "gelu"}
    path = folder(tmp_path, {"architectures": ["BertModel"], "layer_norm_eps": 1e-12, **sizes, **more})
    spec, known = pooling_spec(read_source(str(path))), fetched(path)
    assert isinstance(spec, EncoderSpec)
    found = gpu_weights(service(**spec_of("Auto")), known)
    assert found.most == spec.parameter_bytes("float16")
    assert host_weights(service(resources={"gpus": 0}), known).most == spec.parameter_bytes("float32")
    assert "engine refuses" in gpu_weights(service(**spec_of("FP8")), known).unknown


@pytest.mark.parametrize(
    "damaged",
    [
        {}, "no", 7, {"method": "", "pools": False, "fp8Head": 1, "stages": [], "kinds": {}},
        {"method": "", "pools": False, "fp8Head": 1, "stages": [3], "kinds": {"auto": 1}},
        {"method": "", "pools": False, "fp8Head": -1, "stages": [3], "kinds": {}},
    ],
)  # fmt: skip
def test_what_is_no_report_of_weights_is_none(damaged: Any) -> None:
    told = {"resolvedRevision": "c", "digest": "d", "bytes": 9, "path": "p", "serve": "p"}
    model = parse_fetch_result(json.dumps({**told, "shape": {"layers": 5, "weights": damaged}}))
    assert isinstance(model, FetchedModel)
    assert (model.weights, model.layers) == (None, 5)
