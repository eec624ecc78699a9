"""What the manifests run is what the runtime's own parsers accept, value for value: the seam between the two halves."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from stoker_operator import manifests, metrics
from stoker_operator.plan.rollout import first_variant
from stoker_operator.settings import Settings
from stoker_operator.spec.engine_arguments import variable
from stoker_operator.spec.engine_guard import PROTECTED
from stoker_operator.spec.service import FetchedModel, InferenceService
from stoker_runtime.executor.resolve import asked_quantization
from stoker_runtime.fetch import cli as fetch_cli
from stoker_runtime.metrics import ServerMetrics
from stoker_runtime.serve.adapter_file import read_list
from stoker_runtime.settings.parse import parse as parse_serve

Build = Callable[..., InferenceService]


def deployment(service: InferenceService, settings: Settings, model: FetchedModel) -> dict[str, Any]:
    return manifests.deployment(service, settings, model, first_variant(service))


def arguments(manifest: dict[str, Any], container: str) -> list[str]:
    pod = manifest["spec"]["template"]["spec"]
    [found] = [c for c in [*pod.get("initContainers", []), *pod["containers"]] if c["name"] == container]
    assert found["command"] == ["stoker"]
    return [str(argument) for argument in found["args"]]


def test_the_engine_takes_its_arguments(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(
        model={"uri": "hf://org/model", "servedNames": ["a", "b"]},
        runtime={"contextLength": 4096, "maxConcurrency": 8, "args": ["--seed", "7"]},
        drain={"timeout": "90s"},
    )
    command, *rest = arguments(deployment(built, settings, model), "engine")
    assert command == "serve"
    config = parse_serve(rest, {})
    assert config.engine.model == f"/models/{model.serve}"
    assert (config.host, config.port, config.served_model_names) == ("0.0.0.0", 8000, ("a", "b"))
    assert (config.engine.max_model_len, config.engine.max_num_seqs, config.engine.seed) == (4096, 8, 7)
    assert config.drain_seconds == 90


@pytest.mark.parametrize(("tensor", "data"), [(1, 5), (2, 3)])
def test_several_engines_of_a_pod_take_their_arguments(
    service: Build, settings: Settings, model: FetchedModel, tensor: int, data: int
) -> None:
    spec = {"resources": {"gpus": tensor * data}, "parallelism": {"tensor": tensor, "data": data}}
    pod = deployment(service(**spec), settings, model)
    config = parse_serve(arguments(pod, "engine")[1:], {}).engine.validate()
    assert (config.tensor_parallel_size, config.data_parallel_size) == (tensor, data)
    [engine] = pod["spec"]["template"]["spec"]["containers"]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == str(config.all_ranks)


@pytest.mark.parametrize("number", [0, 2])
def test_a_group_takes_its_arguments(service: Build, settings: Settings, model: FetchedModel, number: int) -> None:
    """As the kubelet gives them to it: with the variables that the group's controller sets put in."""
    spec = {"resources": {"gpus": 2, "nodes": 3}, "parallelism": {"tensor": 3, "pipeline": 2}}
    template = manifests.revision_template(service(**spec), settings, model)
    template = template["workers"]["template"] if number else template
    [engine] = template["spec"]["containers"]
    said = {"LWS_GROUP_SIZE": "3", "LWS_WORKER_INDEX": str(number), "LWS_LEADER_ADDRESS": "demo-nodes-0.demo-nodes.a"}
    command, *rest = [re.sub(r"\$\((\w+)\)", lambda found: said[found[1]], each) for each in engine["args"]]
    assert command == "serve"
    [secret] = [item["name"] for item in engine["env"] if "valueFrom" in item]
    config = parse_serve(rest, {secret: "a secret of enough letters"}).engine
    assert (config.nnodes, config.node_rank, config.master_addr) == (3, number, "demo-nodes-0.demo-nodes.a")
    assert (config.tensor_parallel_size, config.pipeline_parallel_size, config.local_ranks) == (3, 2, 2)


@pytest.mark.parametrize("spec", [{}, {"resources": {"gpus": 3, "nodes": 2}, "parallelism": {"tensor": 6}}], ids=str)
def test_each_pod_publishes_under_its_own_address(
    service: Build, settings: Settings, model: FetchedModel, spec: dict[str, Any]
) -> None:
    """As the kubelet gives the argument to it: with the variables put in, that of the pod's address among them."""
    events = {"inferencePool": {"endpointPickerRef": {"name": "epp"}, "kvEvents": {"port": 7117}}}
    names = {"uri": "hf://org/model", "servedNames": ["org/model:1", "alias"]}
    template = manifests.revision_template(service(**spec, endpoint=events, model=names), settings, model)
    [engine] = template["spec"]["containers"]
    fields = {item["name"]: item["valueFrom"] for item in engine["env"] if "fieldRef" in item.get("valueFrom", {})}
    assert {name: field["fieldRef"]["fieldPath"] for name, field in fields.items()} == {"POD_IP": "status.podIP"}
    said = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0", "LWS_LEADER_ADDRESS": "leader"}
    secret = {"STOKER_NODE_SECRET": "a secret of enough letters"} if spec else {}
    topics = []
    for address in ("10.12.0.7", "fd00:10::a"):
        known = said | {"POD_IP": address}
        _, *rest = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], each) for each in engine["args"]]  # noqa: B023
        config = parse_serve(rest, secret).engine.validate()
        assert config.publishes_kv_events
        assert config.kv_events_config is not None
        assert (config.kv_events_config.endpoint, config.kv_events_config.replay_endpoint) == ("tcp://*:7117", None)
        topics.append(config.kv_events_config.topic)
    assert topics == ["kv@10.12.0.7:8000@org/model:1", "kv@fd00:10::a:8000@org/model:1"]
    [listens] = [port["containerPort"] for port in engine["ports"] if port["name"] == "kv-events"]
    assert listens == 7117


def test_the_engine_follows_the_list_that_the_operator_writes(
    service: Build, settings: Settings, model: FetchedModel, tmp_path: Path
) -> None:
    adapters = [{"name": "team/sql", "uri": "hf://o/sql"}, {"name": "law", "uri": "s3://bucket/law"}]
    built = service(model={"uri": "hf://org/model", "adapters": adapters}, runtime={"args": ["--max-lora-rank", "64"]})
    config = parse_serve(arguments(deployment(built, settings, model), "engine")[1:], {})
    assert (config.engine.enable_lora, config.engine.max_loras, config.engine.max_lora_rank) == (True, 4, 64)
    assert not config.allow_runtime_lora_updating, "nobody loads what is not on the list"
    listed = [
        manifests.Listed(each["name"], f"sha256-{each['name'][:2]}", f"sha256:{each['name']}") for each in adapters
    ]
    carrier = manifests.adapter_list(built, listed)
    folder, _, name = config.lora_modules_file.rpartition("/")
    (tmp_path / name).write_text(carrier["data"][name])
    assert [(each.name, each.path, each.digest) for each in read_list(tmp_path / name)] == [
        (each.name, f"/models/{each.path}", each.digest) for each in listed
    ]
    pod = deployment(built, settings, model)["spec"]["template"]["spec"]
    [volume] = [each["name"] for each in pod["volumes"] if each.get("configMap", {}).get("name") == "demo-adapters"]
    [mount] = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == volume]
    assert (mount["mountPath"], mount["readOnly"], "subPath" in mount) == (folder, True, False)


@pytest.mark.parametrize(
    "model",
    [
        {"uri": "hf://org/model", "endpoint": "http://hub", "files": {"allow": ["*.gguf"], "ignore": ["x", "y"]}},
        {"uri": "https://host/m.gguf", "sha256": {"m.gguf": "ab" * 32}},
        {"uri": "modelscope://org/model", "endpoint": "http://scope", "secretRef": {"name": "token"}},
        {"uri": "s3://bucket/team/m", "endpoint": "http://minio:9000", "secretRef": {"name": "keys"}},
        {"uri": "oci://registry.internal:5000/team/m:v1", "secretRef": {"name": "login"}},
        {"uri": "file:///weights/m.gguf"},
        {"uri": "pvc://claim/dir"},
    ],
    ids=lambda model: model["uri"],
)
def test_the_prefetch_takes_its_arguments(service: Build, settings: Settings, model: dict[str, Any]) -> None:
    built = service(model=model, cache={"mode": "PVC"})
    command, *rest = arguments(manifests.prefetch_job(built, settings, "v", 1, repair=True), "fetch")
    assert command == "fetch"
    options = fetch_cli._options(rest)
    assert (str(options.dest), options.revision, options.progress_port, options.repair) == (
        "/models",
        "main",
        8081,
        True,
    )
    assert options.ignore == model.get("files", {}).get("ignore", [])
    assert options.endpoint == model.get("endpoint", "")
    command, *rest = arguments(manifests.lookup_job(built, settings, datetime.now(UTC)), "lookup")
    looked = fetch_cli._options(rest)
    assert (command, looked.resolve, looked.uri_flag) == ("fetch", True, model["uri"])
    assert (looked.revision, looked.endpoint, looked.ignore) == ("main", options.endpoint, options.ignore)


def test_a_look_into_an_image_takes_its_arguments(service: Build, settings: Settings) -> None:
    built = service(model={"uri": "oci://r.io/m:v3", "endpoint": "http://mirror:50"}, cache={"mode": "Image"})
    command, *rest = arguments(manifests.prefetch_job(built, settings, "Image", 1), "fetch")
    options = fetch_cli._options(rest)
    assert (command, options.resolve_image, options.uri_flag) == ("fetch", True, "oci://r.io/m:v3")
    assert (options.endpoint, str(options.termination_log)) == ("http://mirror:50", "/dev/termination-log")


@pytest.mark.parametrize("verify", ["OnDownload", "Always"])
def test_the_verification_takes_its_arguments(
    service: Build, settings: Settings, model: FetchedModel, verify: str
) -> None:
    command, *rest = arguments(deployment(service(cache={"verify": verify}), settings, model), "verify")
    assert command == "fetch"
    options = fetch_cli._options(rest)
    assert (str(options.path), options.digest, options.full) == (
        f"/models/{model.path}",
        model.digest,
        verify == "Always",
    )


def test_a_copy_is_held_to_the_digest_that_is_known(service: Build, model: FetchedModel) -> None:
    settings = Settings(node_cache_class="copies")
    at_node = manifests.fill_job(
        service(cache={"mode": "Node"}), settings, model, "n-7", 2, datetime.now(UTC), repair=True
    )
    in_pod = deployment(service(cache={"mode": "None"}, model={"uri": "s3://bucket/m"}), settings, model)
    for manifest, revision in ((at_node, model.resolved_revision), (in_pod, "main")):
        _, *rest = arguments(manifest, "fetch")
        options = fetch_cli._options(rest)
        assert (options.digest, options.revision, str(options.dest)) == (model.digest, revision, "/models")
        assert options.repair == (manifest is at_node)
        assert not options.max_bytes or options.max_bytes > model.bytes


@pytest.mark.parametrize("uri", ["hf://org/model", "pvc://claim/a/b"])
def test_the_scheduled_verification_takes_its_arguments(
    service: Build, settings: Settings, model: FetchedModel, uri: str
) -> None:
    built = service(model={"uri": uri}, cache={"verify": "Scheduled"})
    command, *rest = arguments(manifests.verify_job(built, settings, model, "v", datetime.now(UTC)), "verify")
    assert command == "fetch"
    options = fetch_cli._options(rest)
    assert options.digest == model.digest
    if uri.startswith("pvc"):
        assert (options.in_place, options.uri_flag, str(options.root)) == (True, "file:///models/a/b", "/models")
    else:
        assert (options.verify_only, options.full, str(options.path)) == (True, True, f"/models/{model.path}")


def test_weights_that_stay_where_they_lie(service: Build, settings: Settings, model: FetchedModel) -> None:
    built = service(
        model={"uri": "pvc://claim/a/b", "files": {"allow": ["*.gguf"]}, "sha256": {"m.gguf": "ab" * 32}},
        cache={"verify": "Always"},
    )
    _, *rest = arguments(manifests.prefetch_job(built, settings, "v", 1, repair=True), "fetch")
    options = fetch_cli._options(rest)
    assert (options.in_place, options.uri_flag, str(options.root)) == (True, "file:///models/a/b", "/models")
    assert (options.allow, options.sha256, options.digest) == (["*.gguf"], [f"m.gguf={'ab' * 32}"], "")
    _, *rest = arguments(deployment(built, settings, model), "verify")
    options = fetch_cli._options(rest)
    assert (options.in_place, options.uri_flag, options.digest) == (True, "file:///models/a/b", model.digest)
    assert options.allow == ["*.gguf"]


@pytest.mark.parametrize(
    ("fields", "quantization", "kv_cache_dtype"),
    [
        ({}, "auto", "auto"),
        ({"quantization": "FP8", "kvCacheDtype": "BF16"}, "fp8", "bfloat16"),
        ({"quantization": "None", "kvCacheDtype": "FP16"}, "none", "float16"),
        ({"kvCacheDtype": "FP8"}, "auto", "fp8"),
        ({"quantization": "W4"}, "w4", "auto"),
        ({"quantization": "CompressedTensors"}, "compressed-tensors", "auto"),
        ({"quantization": "ModelOpt"}, "modelopt", "auto"),
        ({"quantization": "MXFP4"}, "mxfp4", "auto"),
        ({"quantization": "GGUF"}, "gguf", "auto"),
        ({"quantization": "Q8_0"}, "q8_0", "auto"),
        ({"quantization": "Q4K", "kvCacheDtype": "FP8"}, "q4k", "fp8"),
    ],
)
def test_types_are_the_engines(
    service: Build,
    settings: Settings,
    model: FetchedModel,
    fields: dict[str, str],
    quantization: str,
    kv_cache_dtype: str,
) -> None:
    _, *rest = arguments(deployment(service(model={"uri": "hf://a/b"} | fields), settings, model), "engine")
    engine = parse_serve(rest, {}).engine
    assert (asked_quantization(engine), engine.kv_cache_dtype) == (quantization, kv_cache_dtype)


def test_dashboards_and_alerts_read_series_that_somebody_has(service: Build) -> None:
    server = ServerMetrics("m")
    server.attach_adapters(3)
    published = {sample.name for family in server.collect() for sample in family.samples}
    for found in (metrics.ACTIVATOR_HELD, metrics.ACTIVATOR_REQUESTS, metrics.ACTIVATOR_WAKES, metrics.ACTIVATOR_WAIT):
        kind, [family] = type(found).__name__, found.describe()
        published.add(family.name + {"Counter": "_total", "Histogram": "_bucket"}.get(kind, ""))
    built = service(
        autoscaling={"min": 0, "max": 2, "scaleToZero": {"maxWait": "31m"}},
        canary={"weight": 9, "runtime": {"args": ["--seed", "1"]}},
        model={"uri": "hf://a/b", "adapters": [{"name": "a", "uri": "hf://a/lora"}]},
    )
    for text in (json.dumps(manifests.dashboard(built)), json.dumps(manifests.prometheus_rule(built))):
        asked = set(re.findall(r"(?:vllm:|stoker:|stoker_activator)[a-z0-9_]+", text))
        assert len(asked) >= 6
        assert asked <= published, asked - published
    assert "> 930" in text, "half of maxWait"


def test_a_secret_sets_nothing_that_is_the_operators(service: Build, settings: Settings, model: FetchedModel) -> None:
    """Kubernetes puts what `env` says before what `envFrom` brings; the engine puts flags before variables."""
    built = service(runtime={"envFrom": [{"secretRef": {"name": "s"}}]})
    [engine] = deployment(built, settings, model)["spec"]["template"]["spec"]["containers"]
    _, *rest = [str(argument) for argument in engine["args"]]
    hostile = {variable(name): "1" for name in PROTECTED} | {"STOKER_API_KEY": "k"}
    said = {item["name"]: item["value"] for item in engine["env"] if item["name"].startswith("STOKER_")}
    assert parse_serve(rest, hostile | said) == parse_serve(rest, {"STOKER_API_KEY": "k"})
