"""Flags of vLLM: each is a setting, asks for what is so, is ignored in one line of the log, or is refused by name."""

from __future__ import annotations

import json
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.settings.vllm_arguments import ARGUMENTS

from stoker_runtime.errors import ConfigError
from stoker_runtime.settings import vllm_flags, vllm_ignored, vllm_refused
from stoker_runtime.settings.flags import ALIASES, BY_NAME, FLAGS, OPPOSITES
from stoker_runtime.settings.parse import parse, read


def lines(*arguments: str) -> list[str]:
    return read(["m", *arguments], {})[1]


TAKEN = [
    "--attention-backend FLASHINFER",
    "--attention-backend flash_attn",
    "--attention_backend=auto",
    '--attention-config {"backend":"Triton_Attn","flash_attn_version":3,"use_trtllm_attention":null}',
    "--compilation-config 2",
    '--compilation-config={"mode":3,"cudagraph_mode":"FULL","cudagraph_capture_sizes":[1,7],"pass_config":{"x":true}}',
    "--cuda-graph-sizes 1 2 9",
    "--cudagraph-capture-sizes [3,17]",
    "--cudagraph-capture-sizes 3,17",
    "--disable-log-stats",
    "--disable-log-stats=true",
    "--no-trust-remote-code",
    "--trust-remote-code",
    "--trust_remote_code=0",
    "--distributed-executor-backend ray",
    "--guided-decoding-backend lm-format-enforcer",
    "--max-num-partial-prefills 3",
    "--mm-processor-cache-gb 1.5",
    '--media-io-kwargs {"video":{"num_frames":40}}',
    "--model-impl transformers",
    "--optimization-level=0",
    "--structured-outputs-config {}",
    '--structured-outputs-config {"backend":"guidance","disable_any_whitespace":false,"disable_fallback":true}',
    "--prefix-caching-hash-algo sha256_cbor",
    "--allowed-local-media-path /srv/pictures",
]


@pytest.mark.parametrize("spelled", TAKEN)
def test_what_is_ignored_is_checked_and_said_in_one_line(spelled: str) -> None:
    words = spelled.split(" ")
    [line] = lines(*words)
    given, _, instead = line.partition(" is ignored: ")
    assert given.split()[0] == words[0].partition("=")[0]
    assert len(instead) > 10
    assert instead == vllm_ignored.IGNORED[vllm_flags.find(words[0].partition("=")[0])[0]].instead


REFUSED = [
    ("--disable-log-stats=banana", "'banana'; it takes no value, or true or false"),
    ("--disable-log-stats=", "takes no value"),
    ("--no-disable-log-stats=true", "--no-disable-log-stats takes no value"),
    ("--no-enable-chunked-prefill", "prompts are always computed in chunks"),
    ("--enable-chunked-prefill=no", "is not possible: prompts are always computed in chunks"),
    ("--enable-chunked-prefill=maybe", "'maybe'; it takes no value, or true or false"),
    ("--async-scheduling=False", "steps are always launched one ahead"),
    ("--no-enable-prefix-caching=true", "takes no value"),
    ("--trust-remote-code=si", "true or false"),
    ("--attention-backend banana", "'banana'; it must be AUTO, CPU_ATTN"),
    ("--attention-backend FLASHINFR", "did you mean FLASHINFER?"),
    ("--attention-backend", "needs a value: AUTO"),
    ("--no-attention-backend FLASHINFER", "Unknown flag --no-attention-backend"),
    ("--no-load-format auto", "Unknown flag --no-load-format"),
    ('--attention-config {"backnd":"FLASH_ATTN"}', "unknown key 'backnd'; did you mean backend?"),
    ('--attention-config {"flash_attn_version":7}', "flash_attn_version is 2, 3 or 4, or null"),
    ('--attention-config {"use_cudnn_prefill":1}', "use_cudnn_prefill is true or false"),
    ('--attention-config {"backend":3}', "a name that --attention-backend takes"),
    ("--compilation-config 4", "a whole number from 0 to 3, or a JSON object"),
    ("--compilation-config banana", "a whole number from 0 to 3, or a JSON object"),
    ('--compilation-config {"cudagraph_moed":"FULL"}', "unknown key 'cudagraph_moed'; did you mean cudagraph_mode?"),
    ('--compilation-config {"mode":true}', "mode is 0, 1, 2, 3, NONE"),
    ('--compilation-config {"cudagraph_capture_sizes":[0]}', "a list of whole numbers"),
    ("--compilation-config.mode 3", "write --compilation-config with all of them in one JSON object"),
    ("-cc.mode=3", "write --compilation-config with all of them in one JSON object"),
    ("--speculative-config.method ngram", "write --speculative-config with all of them in one JSON object"),
    ("-O3", "write --optimization-level 3"),
    ("-dpr 1", "write --data-parallel-start-rank"),
    ("--cuda-graph-sizes 1 x", "'x'; it must be whole numbers of at least 1"),
    ("--cudagraph-capture-sizes [1,,2]", "whole numbers"),
    ("--distributed-executor-backend mpi", "did you mean mp?"),
    ("--limit-mm-per-prompt banana=3", "MODALITY=N, separated by commas, of image, video"),
    ("--limit-mm-per-prompt image=-1", "MODALITY=N"),
    ('--limit-mm-per-prompt {"banana":3}', "unknown key 'banana'"),
    ('--limit-mm-per-prompt {"image":-1}', "image is a whole number of at least 0"),
    ('--limit-mm-per-prompt {"image":"2"}', "image is a whole number of at least 0"),
    ('--limit-mm-per-prompt {"image":true}', "image is a whole number of at least 0"),
    ('--limit-mm-per-prompt {"video":{"frames":1}}', "video is a whole number of at least 0, or an object"),
    ("--max-num-partial-prefills 0", "at least 1"),
    ("--max-num-partial-prefills 1.5", "a whole number"),
    ("--long-prefill-token-threshold -1", "at least 0"),
    ("--mm-processor-cache-gb nan", "a number of at least 0"),
    ("--mm-processor-cache-gb -0.5", "a number of at least 0"),
    ('--mm-processor-kwargs {"max_pixels":99}', "change it there"),
    ("--allowed-media-domains https://a.example", "a name of a host, without scheme"),
    ("--optimization-level 9", "from 0 to 3"),
    ("--model-impl vlm", "did you mean vllm?"),
    ('--structured-outputs-config {"disable_any_whitespace":true}', "requests ask for it by that field"),
    ('--structured-outputs-config {"disable_any_whitespace":"yes"}', "disable_any_whitespace is true or false"),
    ('--structured-outputs-config {"disable_any_whitspace":true}', "did you mean disable_any_whitespace?"),
    ('--structured-outputs-config {"backend":"banana"}', "backend is one of auto, xgrammar"),
    ('--structured-outputs-config {"reasoning_parser":"qwen3"}', "use --reasoning-parser"),
    ('--structured-outputs-config {"enable_in_reasoning":true}', "constraints begin where reasoning ends"),
    ("--structured-outputs-config null", "a JSON object"),
    ("--cpu-offload-gb 0.5", "can only be 0: weights stay on the device"),
    ("--cpu-offload-gb nan", "can only be 0"),
    ("--max-logprobs 21", "can only be 20"),
    ("--logprobs-mode processed_logits", "can only be raw_logprobs"),
    ("--load-format", "can only be auto"),
    ("--decode-context-parallel-size 2", "can only be 1"),
    ("--kv-transfer-config {}", "prefill and decode run in one engine"),
    ("--no-enable-force-include-usage", "streams report usage where a request asks for it"),
    ('--speculative-config {"method":"banana"}', "banana"),
    ("--speculative-config 3", "it must be a JSON object with a method"),
    ("--kv-events-config 3", "a JSON object with keys of"),
]


@pytest.mark.parametrize(("spelled", "says"), REFUSED)
def test_what_vllm_would_not_take_or_cannot_be_is_refused(spelled: str, says: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        lines(*spelled.split(" "))
    assert says in wrong.value.message
    assert spelled.split(" ")[0].partition("=")[0] in wrong.value.message or "speculative" in spelled


@pytest.mark.parametrize("spelled", ["--cpu-offload-gb 0.0", "--enable-chunked-prefill", "--async_scheduling=on"])
def test_what_is_so_is_taken_without_a_word(spelled: str) -> None:
    assert lines(*spelled.split(" ")) == []


def test_each_flag_has_one_line_and_the_model_may_follow_it() -> None:
    given = "--attention-backend FLASHINFER m --disable-log-stats --attention-backend FLEX_ATTENTION"
    config, said = read(given.split(), {})
    assert config.engine.model == "m"
    assert [line.split(" is ")[0] for line in said] == ["--attention-backend FLEX_ATTENTION", "--disable-log-stats"]


def test_the_log_has_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    parse(["m", "--use-tqdm-on-load", "--max-num-seqs", "5"], {})
    assert [each.getMessage() for each in caplog.records] == [
        "--use-tqdm-on-load is ignored: the log says how far loading is"
    ]


def test_files_and_variables_are_checked_alike(tmp_path: Path) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(
        "model: m\nattention-backend: FLASHMLA\ndisable_log_stats: true\nmedia-io-kwargs: {image: {}}\n"
        "cudagraph-capture-sizes: [1, 5]\nenable-chunked-prefill: true\nload-format: auto\n"
    )
    _, said = read(["--config", str(file)], {"STOKER_MODEL_IMPL": "vllm", "STOKER_ATTENTION_BACKEND": "TREE_ATTN"})
    assert [line.split(" is ignored")[0] for line in said] == [
        "STOKER_ATTENTION_BACKEND TREE_ATTN",
        f"disable_log_stats in {file} true",
        f'media-io-kwargs in {file} {{"image": {{}}}}',
        f"cudagraph-capture-sizes in {file} 1 5",
        "STOKER_MODEL_IMPL vllm",
    ]


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention-backend", "banana", "AUTO, CPU_ATTN"),
        ("attention-backend", ["FLASHMLA", "FLASHINFER"], "takes one value"),
        ("disable-log-stats", "banana", "true or false"),
        ("enable-chunked-prefill", False, "always computed in chunks"),
        ("limit-mm-per-prompt", {"banana": 1}, "unknown key 'banana'"),
        ("load-format", "dummy", "can only be auto"),
        ("hf-token", "hf_x", "set HF_TOKEN"),
        ("max-num-partial-prefills", 0, "at least 1"),
    ],
)
def test_errors_name_the_key_or_the_variable(tmp_path: Path, key: str, value: object, says: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({key: value}))
    variable = "STOKER_" + key.replace("-", "_").upper()
    spelled = json.dumps(value) if isinstance(value, dict) else str(value)
    with pytest.raises(ConfigError, match=says) as by_file:
        read(["m", "--config", str(file)], {})
    assert by_file.value.message.startswith(f"{key} in {file}")
    if not isinstance(value, list):
        with pytest.raises(ConfigError, match=says) as by_variable:
            read(["m"], {variable: spelled})
        assert by_variable.value.message.startswith(variable)
    assert "hf_x" not in by_file.value.message


@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_flag_of_vllms_is_known(name: str) -> None:
    """What it asks for by no value, or by one that nothing takes, is taken as a setting or answered by name."""
    kinds = [
        name in BY_NAME or name in ALIASES or name in OPPOSITES,
        name in vllm_flags.ALWAYS,
        name in vllm_flags.ONE_VALUE,
        name in vllm_ignored.IGNORED,
        name in vllm_refused.UNSUPPORTED,
    ]
    assert sum(kinds) == 1
    assert (name in vllm_flags.ACTS) == kinds[0]
    if kinds[4]:
        with pytest.raises(ConfigError, match=f"--{name} is not supported: .{{10}}") as refused:
            lines(f"--{name}", "1")
        assert "did you mean" not in refused.value.message


def test_nothing_is_known_that_vllm_has_not() -> None:
    tables = (vllm_flags.ALWAYS, vllm_flags.ONE_VALUE, vllm_ignored.IGNORED, vllm_refused.UNSUPPORTED, vllm_flags.ACTS)
    assert {name for table in tables for name in table} == set(ARGUMENTS)
    ours = {flag.name for flag in FLAGS} | {name for flag in FLAGS for name in (*flag.aliases, *flag.opposites)}
    assert not ours & {*tables[0], *tables[1], *tables[2], *tables[3], *vllm_refused.SHORT}
    assert {*vllm_refused.SHORT.values()} <= set(ARGUMENTS)


GARBAGE = st.text(string.ascii_letters + string.digits + " -_.:;{}[]\",é√\n", max_size=12).map(lambda text: f"¿{text}")
NAMES = sorted(vllm_ignored.IGNORED)


@settings(deadline=None, max_examples=150)
@given(name=st.sampled_from(sorted({*NAMES, *vllm_flags.ONE_VALUE, *vllm_flags.ALWAYS})), value=GARBAGE)
def test_no_garbage_passes(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        lines(f"--{name}={value}")
    assert f"--{name}" in wrong.value.message
    assert wrong.value.param == name
    with pytest.raises(ConfigError):
        read(["m"], {"STOKER_" + name.replace("-", "_").upper(): value})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)
OBJECTS = ["attention-config", "compilation-config", "limit-mm-per-prompt", "structured-outputs-config"]


@settings(deadline=None, max_examples=40)
@given(name=st.sampled_from(OBJECTS), key=st.text(max_size=8).map(lambda text: f"¿{text}"), value=JSON)
def test_no_unknown_key_passes(name: str, key: str, value: object) -> None:
    with pytest.raises(ConfigError) as wrong:
        lines(f"--{name}={json.dumps({key: value})}")
    assert f"unknown key {key!r}" in wrong.value.message


@settings(deadline=None, max_examples=100)
@given(name=st.sampled_from(NAMES), number=st.integers(-9, 9), data=st.data())
def test_a_value_is_refused_or_said(name: str, number: int, data: st.DataObject) -> None:
    """Whatever is given: an error that names the flag, or one line that does."""
    word = data.draw(st.sampled_from([str(number), "true", "{}", "auto", "", "mp", "lru", "/a", "image=1"]))
    try:
        said = lines(f"--{name}={word}")
    except ConfigError as error:
        said = [error.message]
    assert len(said) == 1
    assert said[0].startswith(f"--{name} ")
