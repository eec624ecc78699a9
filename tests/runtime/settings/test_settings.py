"""Settings from flags, variables and files: precedence, conversion, and errors that name the nearest key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker_runtime.errors import ConfigError
from stoker_runtime.settings.flags import FLAGS, help_text
from stoker_runtime.settings.parse import describe, parse


def test_flags_reach_their_fields() -> None:
    flags = """m --dtype float16 --max-model-len=4K --gpu-memory-utilization .5 --num-gpu-blocks 100 --block-size 32
        --served-model-name a b --kernel gemm=cublas --kernel attention=triton --no-enable-prefix-caching
        --enforce-eager --api-key k1 --api-key k2 --host 0.0.0.0 --port 0 --scheduling-policy sjf
        --max_num_seqs 7 --kv-cache-dtype fp8 --seed 3 --log-json --drain-seconds 1.5 -tp 1"""
    config = parse(flags.split(), {})
    engine = config.engine
    assert (engine.model, engine.dtype, engine.max_model_len, engine.gpu_memory_utilization) == (
        "m",
        "float16",
        4096,
        0.5,
    )
    assert (engine.num_gpu_blocks, engine.page_size, engine.max_num_seqs, engine.seed) == (100, 32, 7, 3)
    assert engine.kernels == (("gemm", "cublas"), ("attention", "triton"))
    assert (engine.enable_prefix_caching, engine.enforce_eager, engine.kv_cache_dtype) == (False, True, "fp8")
    assert config.served_model_names == ("a", "b")
    assert config.api_keys == ("k1", "k2")
    assert (config.host, config.port, config.log_json, config.drain_seconds) == ("0.0.0.0", 0, True, 1.5)


def test_flag_wins_over_variable_and_variable_over_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('model = "from-file"\nseed = 1\nport = 1\nmax-num-seqs = 1\nenforce_eager = true\n')
    config = parse(
        ["--config", str(file), "--seed", "3"], {"STOKER_SEED": "2", "STOKER_PORT": "2", "STOKER_ENFORCE_EAGER": "no"}
    )
    assert config.engine.model == "from-file"
    assert (config.engine.seed, config.port, config.engine.max_num_seqs) == (3, 2, 1)
    assert config.engine.enforce_eager is False


def test_yaml_file_by_variable_with_lists_and_maps(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nserved_model_name: [a, b]\nkernel: {gemm: cublas}\nquantization: none\n")
    config = parse([], {"STOKER_CONFIG": str(file)})
    assert config.served_model_names == ("a", "b")
    assert config.engine.kernels == (("gemm", "cublas"),)
    assert config.engine.quantization == "none"


def test_lists_in_variables() -> None:
    config = parse(["m"], {"STOKER_API_KEY": "a, b", "STOKER_KERNEL": "gemm=cublas,norm=triton"})
    assert config.api_keys == ("a", "b")
    assert config.engine.kernels == (("gemm", "cublas"), ("norm", "triton"))


@pytest.mark.parametrize("key", ["", " ", "\t", " sk-1", "sk-1 "])
def test_a_key_that_no_client_can_send_is_refused(tmp_path: Path, key: str) -> None:
    """A server that looks protected must be."""
    file = tmp_path / "stoker.toml"
    file.write_text(f"api-key = [{json.dumps(key)}]\n")
    for arguments in (["--api-key", key], ["--api-key", "sk-good", f"--api-key={key}"], ["--config", str(file)]):
        with pytest.raises(ConfigError, match="empty key, or one with blanks"):
            parse(["m", *arguments], {})


@pytest.mark.parametrize("value", ["", ",", "sk-1,", " "])
def test_an_empty_key_in_a_variable_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="empty key"):
        parse(["m"], {"STOKER_API_KEY": value})


def test_api_keys_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\nsk-one\n\n sk-two \n")
    config = parse(["m", "--api-key", "sk-zero", "--api-key-file", str(file)], {})
    assert (config.api_keys, config.api_key_file) == (("sk-zero",), str(file))
    assert "sk-" not in repr(config)


@pytest.mark.parametrize(
    ("arguments", "origins"),
    [
        ([], ("*",)),
        (["--allowed-origins", '["https://a", "https://b"]'], ("https://a", "https://b")),
        (["--allowed-origins", "https://a", "https://b"], ("https://a", "https://b")),
        (["--allowed-origins", "[not json"], ("[not json",)),
    ],
)
def test_lists_as_json_or_words(arguments: list[str], origins: tuple[str, ...]) -> None:
    assert parse(["m", *arguments], {}).allowed_origins == origins
    if arguments[1:] and len(arguments) == 2:
        assert parse(["m"], {"STOKER_ALLOWED_ORIGINS": arguments[1]}).allowed_origins == origins


def test_flags_that_switch_off() -> None:
    config = parse(["m", "--enable-log-requests"], {})
    assert (config.log_requests, config.access_log) == (True, True)
    config = parse(["m", "--enable-log-requests", "--disable-log-requests", "--disable-uvicorn-access-log"], {})
    assert (config.log_requests, config.access_log) == (False, False)


def test_vllms_variable_asks_for_batch_invariance_where_ours_says_nothing() -> None:
    theirs = {"VLLM_BATCH_INVARIANT": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
    assert parse(["m"], theirs).engine.batch_invariant
    assert not parse(["m", "--no-batch-invariant"], theirs).engine.batch_invariant
    assert not parse(["m"], theirs | {"STOKER_BATCH_INVARIANT": "false"}).engine.batch_invariant
    assert not parse(["m"], {"VLLM_BATCH_INVARIANT": "0"}).engine.batch_invariant
    with pytest.raises(ConfigError, match="VLLM_BATCH_INVARIANT"):
        parse(["m"], {"VLLM_BATCH_INVARIANT": "perhaps"})


SERVICE_LINKS = {
    "STOKER_SERVICE_HOST": "10.0.0.1",
    "STOKER_SERVICE_PORT": "8000",
    "STOKER_SERVICE_PORT_HTTP": "8000",
    "STOKER_PORT": "tcp://10.0.0.1:8000",
    "STOKER_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "STOKER_PORT_8000_TCP_ADDR": "10.0.0.1",
    "STOKER_METRICS_PORT": "tcp://10.0.0.1:9000",
    "STOKER_METRICS_SERVICE_HOST": "10.0.0.1",
}


def test_what_kubernetes_sets_for_a_service_named_stoker_is_no_setting() -> None:
    assert parse(["m"], SERVICE_LINKS).port == 8000


@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        ([], {}, "No model is given"),
        (["m", "n"], {}, "'n' is too much; the model is 'm'"),
        (["m", "--max-modl-len", "5"], {}, "Unknown flag --max-modl-len; did you mean --max-model-len?"),
        (["m", "--no-port"], {}, "Unknown flag --no-port"),
        (["m", "--port"], {}, "--port needs a value: PORT"),
        (["m", "--port", "--seed", "1"], {}, "--port needs a value"),
        (["m", "--port", "70000"], {}, "port is 70000; it must be between 0 and 65535"),
        (["m", "--port", "x"], {}, "--port: 'x' is not allowed; it must be a whole number"),
        (["m", "--dtype", "bf16"], {}, "one of auto, bfloat16, float16, float32 (did you mean bfloat16?)"),
        (["m", "--gpu-memory-utilization", "1.5"], {}, "a number between 0.01 and 1"),
        (["m", "--gpu-memory-utilization", "nan"], {}, "a number between 0.01 and 1"),
        (["m", "--kernel", "gemm"], {}, "OP=IMPLEMENTATION, such as linear=cublas"),
        (["m", "--block-size", "48"], {}, "block-size is 48; it must be 16, 32, 64 or 128"),
        (["m", "--tensor-parallel-size", "0"], {}, "at least 1"),
        (["m", "--max-queued", "0"], {}, "at least 1"),
        (["m"], {"STOKER_MAX_MODEL_LENGTH": "5"}, "STOKER_MAX_MODEL_LENGTH; did you mean STOKER_MAX_MODEL_LEN?"),
        (["m"], {"STOKER_SEED": "-1"}, "STOKER_SEED: '-1' is not allowed"),
        (["m"], {"STOKER_ENFORCE_EAGER": "maybe"}, "true or false"),
        (["m", "--config", "/nonexistent.toml"], {}, "cannot be read"),
        (["m", "--config", "x.ini"], {}, "x.ini"),
        (["m", "--api-key-file", "/nonexistent"], {}, "/nonexistent cannot be read"),
    ],
)
def test_errors_name_what_is_wrong(arguments: list[str], variables: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(arguments, variables)
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("c.toml", "port =", "not valid TOML"),
        ("c.yaml", "a: [", "not valid YAML"),
        ("c.yaml", "- a", "must hold keys and values"),
        ("c.toml", "prt = 5", "Unknown key in"),
        ("c.toml", "prt = 5", "did you mean port?"),
        ("c.toml", 'port = "x"', "it must be a whole number"),
        ("c.toml", "port = [1, 2]", "must be one value"),
        ("c.toml", 'config = "c"', "Unknown key"),
    ],
)
def test_errors_of_files(tmp_path: Path, name: str, content: str, says: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        parse(["m", "--config", str(file)], {})
    assert says in caught.value.message


def test_help_names_every_flag_with_its_default() -> None:
    text = help_text()
    for flag in FLAGS:
        assert flag.name == "model" or f"--{flag.name} " in text or f"--[no-]{flag.name}" in text
    assert "[8000]" in text
    assert max(map(len, text.splitlines())) <= 120


def test_every_field_has_a_flag() -> None:
    import dataclasses

    from stoker_runtime.config import EngineConfig, ServerConfig

    fields: list[dataclasses.Field[Any]] = [*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)]
    # Which of several engines it is, the server tells each.
    untold = {"engine", "data_parallel_rank"}
    assert {field.name for field in fields} - untold == {flag.field for flag in FLAGS if flag.field}


def test_description_shows_what_was_set_and_counts_secrets() -> None:
    config = parse(["m", "--seed", "3", "--api-key", "sk-1", "--enforce-eager", "--kernel", "gemm=cublas"], {})
    assert describe(config) == "m seed=3 enforce-eager=true kernel=gemm=cublas api-key=1"


# A command line as it is written for vLLM.
VLLM = """m --host 0.0.0.0 --port 8000 --dtype bfloat16 --max-model-len 4096 --gpu-memory-utilization 0.85
    --tensor-parallel-size 4 --pipeline-parallel-size 3 --max-num-seqs 128 --max-num-batched-tokens 4096 --tokenizer t
    --quantization fp8 --kv-cache-dtype fp8 --served-model-name a b --api-key k --chat-template c.jinja
    --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 --seed 1 --trust-remote-code
    --enable-prefix-caching --enable-chunked-prefill --disable-log-stats --disable-log-requests --load-format auto
    --enforce-eager --block-size 16 --swap-space 4 --allowed-origins ["*"] --api-server-count 2 --generation-config auto
    --enable-prompt-tokens-details --scheduling-policy priority --ssl-certfile c --ssl-keyfile k"""


def test_a_command_line_of_vllm_is_understood() -> None:
    config = parse(VLLM.split(), {})
    assert (config.engine.max_num_batched_tokens, config.engine.kv_cache_dtype) == (4096, "fp8")
    assert (config.api_server_count, config.ssl_certfile, config.log_requests) == (2, "c", False)
    assert config.engine.swap_space == 4.0
    assert config.engine.ranks == 12
    assert parse(["m", "--kv-offloading-size", "1.5"], {}).engine.swap_space == 1.5


def test_the_host_pool_is_sized_one_way() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        parse(["m", "--swap-space", "4", "--num-cpu-blocks", "100"], {})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--num-speculative-tokens 3", "it is a key of --speculative-config"),
        ("--no-enable-chunked-prefill", "prompts are always computed in chunks"),
        ("--load-format=gguf", "can only be auto"),
        ("--uvicorn_log_level info", "use --log-level"),
    ],
)
def test_what_vllm_has_and_we_have_not(arguments: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(["m", *arguments.split()], {})


def test_what_only_vllms_inside_knows_is_taken() -> None:
    given = ["--cuda-graph-sizes", "1", "2", "--compilation-config=3", "--async-scheduling", "--model-impl", "auto"]
    assert parse(["m", *given, "--max-num-seqs", "7"], {}).engine.max_num_seqs == 7
    config = parse(
        ["m", "--dtype", "half", "--kv-cache-dtype", "fp8_e4m3", "--generation-config", "vllm", "--swap-space", "4"], {}
    )
    assert (config.engine.dtype, config.engine.kv_cache_dtype, config.generation_config) == ("float16", "fp8", "none")
    assert parse(["m", "--num-gpu-blocks-override", "5"], {}).engine.num_gpu_blocks == 5


@pytest.mark.parametrize(
    ("arguments", "runner"),
    [
        ([], "auto"),
        (["--runner", "pooling"], "pooling"),
        (["--task", "embed"], "pooling"),
        (["--task", "score"], "pooling"),
        (["--task", "generate"], "generate"),
    ],
)
def test_runners_by_either_name(arguments: list[str], runner: str) -> None:
    assert parse(["m", *arguments], {}).engine.runner == runner


def test_the_pooler_is_given_as_json() -> None:
    for flag in ("--pooler-config", "--override-pooler-config"):
        assert parse(["m", flag, '{"pooling_type": "MEAN"}'], {}).engine.pooler_config == '{"pooling_type": "MEAN"}'


def test_values_are_spelled_as_flags_take_them() -> None:
    config = parse(["m", "--served-model-name", "a", "b", "--api-key", "k1", "--api-key", "k2"], {})
    assert describe(config) == "m served-model-name=a,b api-key=2"
    assert "[*]" in help_text()
    assert "('" not in help_text()


def test_a_map_in_a_file_is_the_flags_json(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: m\npooler-config: {pooling_type: MEAN, normalize: true}\n")
    assert json.loads(parse(["--config", str(file)], {}).engine.pooler_config) == {
        "pooling_type": "MEAN",
        "normalize": True,
    }


def test_a_missing_file_is_named_once(tmp_path: Path) -> None:
    file = tmp_path / "absent.toml"
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(file)], {})
    assert caught.value.message == f"The config file {file} cannot be read: No such file or directory."


def test_kv_events_are_spelled_as_vllm_spells_them() -> None:
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://r:1", "hwm": 7, "topic": "kv@p@m"}
    config = parse(["m", "--kv-events-config", json.dumps(given)], {}).engine.kv_events_config
    assert config is not None
    assert config.publishes
    assert (config.endpoint, config.hwm, config.topic, config.replay_endpoint) == ("tcp://r:1", 7, "kv@p@m", None)
    assert parse(["m"], {"STOKER_KV_EVENTS_CONFIG": str(config)}).engine.kv_events_config == config
    assert parse(["m", '--kv-events-config={"replay_endpoint": null}'], {}).engine.publishes_kv_events is False


@pytest.mark.parametrize(
    "value",
    [
        *("on", "[]", '{"topics": "x"}', '{"hwm": "7"}', '{"hwm": -1}', '{"hwm": true}', '{"max_queue_size": 0}'),
        *('{"publisher": "kafka"}', '{"enable_kv_cache_events": 1}', '{"endpoint": null}', '{"topic": 3}'),
    ],
)
def test_other_kv_events_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-events-config.* a JSON object with keys of enable_kv_cache_events"):
        parse(["m", "--kv-events-config", value], {})


def test_sleep_mode_is_off_unless_it_is_asked_for() -> None:
    assert not parse(["m"], {}).engine.enable_sleep_mode
    assert parse(["m", "--enable-sleep-mode"], {}).engine.enable_sleep_mode


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--enable-lora"], "one engine's adapters"),
        (["--kv-events-config", '{"enable_kv_cache_events": true}'], "one engine's cache"),
    ],
)
def test_what_one_engine_alone_serves_is_refused_of_several(flags: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse(["m", "--data-parallel-size", "3", *flags], {})
