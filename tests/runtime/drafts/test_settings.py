"""What --speculative-config takes, in vLLM's words, and how it refuses the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stoker_runtime.config import EngineConfig
from stoker_runtime.drafts.settings import Drafting, read_drafting
from stoker_runtime.errors import ConfigError
from stoker_runtime.settings.parse import parse


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1},
            Drafting("ngram", 3, 1, 4),
        ),
        ({"method": "ngram", "num_speculative_tokens": 7}, Drafting("ngram", 7, 5, 5)),
        ({"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_min": 3}, Drafting("ngram", 1, 3, 3)),
        ({"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 6}, Drafting("ngram", 2, 6, 6)),
        ({"method": "suffix"}, Drafting("suffix", 16, 1, 24, 1.0, 0.1)),
        (
            {
                "method": "suffix", "num_speculative_tokens": 5, "suffix_decoding_max_tree_depth": 11,
                "suffix_decoding_max_spec_factor": 2.5, "suffix_decoding_min_token_prob": 0.3,
                "suffix_decoding_max_cached_requests": 0, "disable_by_batch_size": 9,
            },
            Drafting("suffix", 5, 1, 11, 2.5, 0.3, 9),
        ),
        (
            {"model": "some/draft", "num_speculative_tokens": 4, "revision": "v1", "disable_by_batch_size": 17},
            Drafting("draft_model", 4, 0, 0, batch_limit=17, model="some/draft", revision="v1"),
        ),
        (
            {"method": "draft_model", "model": "/d", "num_speculative_tokens": 9, "draft_tensor_parallel_size": 1},
            Drafting("draft_model", 9, 0, 0, model="/d"),
        ),
        (
            {"method": "eagle3", "model": "some/head", "num_speculative_tokens": 11, "revision": "v7"},
            Drafting("eagle3", 11, 0, 0, model="some/head", revision="v7"),
        ),
        ({"method": "mtp", "num_speculative_tokens": 2}, Drafting("mtp", 2, 0, 0)),
        ({"method": "deepseek_mtp", "num_speculative_tokens": 13}, Drafting("mtp", 13, 0, 0)),
    ],
)  # fmt: skip
def test_it_is_read_as_vllm_spells_it(given: dict[str, Any], expected: Drafting) -> None:
    assert parse(["m", "--speculative-config", json.dumps(given)], {}).engine.drafting == expected


NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
MODEL = {"model": "some/draft", "num_speculative_tokens": 3}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("[3]", "must be a JSON object"),
        ("{", "must be a JSON object"),
        ({}, "method is None: it must be one of ngram, suffix, draft_model, mtp, eagle3"),
        ({"method": ["ngram"]}, "method is"),
        ({"method": "eagle", "model": "/h", "num_speculative_tokens": 3}, "method is 'eagle': EAGLE heads of"),
        ({"method": "eagle3", "num_speculative_tokens": 3}, "model is None: it must name an EAGLE-3 head"),
        ({"method": "eagle3", "model": "/h"}, "num_speculative_tokens is None: eagle3 needs it"),
        ({"method": "qwen3_next_mtp"}, "'qwen3_next_mtp': such heads are not there yet"),
        ({"method": "deepseek_mtp"}, "num_speculative_tokens is None: mtp needs it"),
        ({"method": "mtp", "model": "/h", "num_speculative_tokens": 3}, "mtp has no such field"),
        ({"model": "some/draft"}, "num_speculative_tokens is None: draft_model needs it"),
        ({"method": "draft_model", "num_speculative_tokens": 3}, "model is None: it must name the model that drafts"),
        ({**MODEL, "draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size is 2: it must be a whole"),
        ({**MODEL, "revision": 3}, "revision is 3: it must be text"),
        ({**MODEL, "quantisation": "fp8"}, "draft_model has no such field"),
        ({**MODEL, "prompt_lookup_max": 3}, "draft_model has no such field"),
        ({"method": "ngram"}, "num_speculative_tokens is None: ngram needs it"),
        ({**NGRAM, "num_speculative_tokens": 17}, "num_speculative_tokens is 17: it must be a whole number from 1"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({**NGRAM, "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "prompt_lookup_min is 4: it must be at most"),
        ({**NGRAM, "prompt_lookup_max": 0}, "prompt_lookup_max is 0"),
        ({**NGRAM, "prompt_lookup_mx": 3}, "ngram has no such field; did you mean prompt_lookup_max"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 3}, "ngram has no such field"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": 9}, "suffix_decoding_max_cached_requests is 9"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": "much"}, "it must be a number from 0 to 1"),
    ],
)  # fmt: skip
def test_a_bad_value_names_its_field(given: Any, says: str) -> None:
    text = given if isinstance(given, str) else json.dumps(given)
    with pytest.raises(ConfigError, match=r"^speculative_config") as caught:
        EngineConfig("m", speculative_config=text).validate()
    assert says in caught.value.message
    with pytest.raises(ConfigError, match=r"^speculative_config"):
        parse(["m", f"--speculative-config={text}"], {})


def test_what_does_not_verify_drafts_refuses_them() -> None:
    text = json.dumps(NGRAM)
    with pytest.raises(ConfigError, match="speculative_config is for"):
        EngineConfig("m", speculative_config=text, runner="pooling").validate()
    EngineConfig("m", speculative_config=text, tensor_parallel_size=3, pipeline_parallel_size=2).validate()
    assert read_drafting("") is None


def test_a_verification_fits_a_step() -> None:
    drafting = Drafting("ngram", 5, 1, 4)
    assert drafting.verify_tokens(1024, 8192) == 256
    assert drafting.verify_tokens(3, 8192) == 18
    assert drafting.verify_tokens(3, 11) == 11
    assert drafting.verify_tokens(1, 1) == 0
