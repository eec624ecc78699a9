"""A model that sleeps gives its memory back, and says the same when it is awake again."""

from __future__ import annotations

import gc
import json
import mmap
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.drafts.random_pace import decide_by_chance
from tests.runtime.executor.eagle_heads import save_head
from transformers import LlamaConfig, LlamaForCausalLM

from stoker_runtime import LLM, LoRARequest, SamplingParams
from stoker_runtime.errors import AsleepError, ConfigError, ModelError, NotFoundError, RequestError, UnavailableError

MIB = 1024**2
VOCAB = 311


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 45 MiB in float32."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(11)
    config = LlamaConfig(
        hidden_size=448, intermediate_size=1600, num_hidden_layers=4, num_attention_heads=7, num_key_value_heads=7,
        head_dim=64, vocab_size=VOCAB, max_position_embeddings=512, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def opened(model: Path | str, **options: Any) -> LLM:
    given = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "cpu_threads": 1, "max_num_seqs": 5, **options}
    return LLM(str(model), enable_sleep_mode=True, **given)


def prompts(count: int, vocab: int = VOCAB) -> list[list[int]]:
    rng = random.Random(count)
    shared = [rng.randrange(3, vocab) for _ in range(40)]
    return [shared[: rng.randint(20, 40)] + [rng.randrange(3, vocab) for _ in range(9)] for _ in range(count)]


def resident() -> int:
    """Bytes of memory that this process takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=6, temperature=0.8, seed=77, presence_penalty=0.5, ignore_eos=True)


def said(llm: LLM, asked: list[list[int]]) -> list[list[int]]:
    found = llm.generate_tokens(asked, [(GREEDY, SAMPLED)[at % 2] for at in range(len(asked))])
    llm.engine.scheduler.check()
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_texts_after_each_level(checkpoint: Path, dtype: str) -> None:
    """bfloat16 is multiplied from weights in the CPU library's own order, which are made again."""
    asked = prompts(5)
    with opened(checkpoint, dtype=dtype, swap_space=0.01) as llm:
        before = said(llm, asked)
        for level, tags in ((1, None), (2, None), (1, ["kv_cache"]), (2, ["weights"])):
            llm.sleep(level)
            assert llm.engine.scheduler._placement.pages.available == llm.engine.executor.num_pages
            with pytest.raises(AsleepError):
                llm.generate_tokens(asked, GREEDY)
            llm.wake_up(tags)
            llm.wake_up()
            hits = llm.engine.stats().prefix_hits
            cold = llm.generate_tokens(asked[:1], GREEDY)
            assert llm.engine.stats().prefix_hits == hits, "a prefix outlived its pages"
            assert cold == before[:1]
            assert said(llm, asked) == before


def test_a_head_that_drafts_comes_back(checkpoint: Path, tmp_path: Path) -> None:
    """Beside the states that it reads, and the embedding that it shares."""
    model = shutil.copytree(checkpoint, tmp_path / "model")
    head = {"method": "eagle3", "model": save_head(str(model), 61), "num_speculative_tokens": 2}
    asked = prompts(4)
    with opened(checkpoint, speculative_config=head, num_gpu_blocks=60) as llm:
        decide_by_chance(llm.engine, random.Random(5))
        before = said(llm, asked)
        drafted = llm.engine.stats().draft_tokens
        for level in (2, 1):
            llm.sleep(level)
            llm.wake_up()
            assert said(llm, asked) == before
        assert llm.engine.stats().draft_tokens > drafted > 0


@pytest.mark.parametrize("drafting", [{"method": "ngram"}, {"model": "shape:tiny"}], ids=["ngram", "draft_model"])
def test_quantized_weights_and_drafts_come_back(drafting: dict[str, Any]) -> None:
    asked = prompts(6, 200)
    drafting = drafting | {"num_speculative_tokens": 2}
    with opened("shape:tiny", quantization="w4", speculative_config=drafting) as llm:
        decide_by_chance(llm.engine, random.Random(5))
        before = said(llm, asked)
        accepted = llm.engine.stats().accepted_tokens
        for level in (2, 1):
            llm.sleep(level)
            llm.wake_up()
            assert said(llm, asked) == before
        if "model" in drafting:
            assert llm.engine.stats().accepted_tokens > accepted > 0


def test_memory_is_given_back(checkpoint: Path) -> None:
    """What the system counts, and what is said of it. Pages of KV take memory once they were written."""
    with opened(checkpoint, num_gpu_blocks=600, max_model_len=512, max_num_seqs=32) as llm:
        page = llm.engine.executor.arena[:, :, 0].nbytes  # type: ignore[attr-defined]
        with torch.inference_mode():
            llm.engine.executor.arena.fill_(1.0)  # type: ignore[attr-defined]
        weights = llm.engine.executor.plan.weights  # type: ignore[attr-defined]
        assert min(600 * page, weights) > 30 * MIB
        full = resident()
        llm.sleep(1)
        without_kv = resident()
        assert full - without_kv > 0.9 * 600 * page
        assert llm.engine.stats().bytes_freed == 600 * page
        llm.sleep(2)
        gc.collect()
        assert without_kv - resident() > 0.9 * weights
        assert llm.engine.stats().bytes_freed == 600 * page + weights
        assert not llm.engine.executor.arena.any()  # type: ignore[attr-defined]
        llm.wake_up()
        assert llm.engine.stats().bytes_freed == 0
        assert said(llm, prompts(2))


@pytest.fixture
def broken(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may take apart."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_files_that_are_gone_or_others(broken: Path) -> None:
    """It says so and sleeps on; once they are right again it wakes, with what they hold now."""
    asked, file = prompts(3), broken / "model.safetensors"
    tensors = load_file(file)
    with opened(broken) as llm:
        before = said(llm, asked)
        llm.sleep(2)
        file.rename(broken / "elsewhere")
        with pytest.raises(ModelError, match="safetensors"):
            llm.wake_up()
        assert llm.engine.stats().asleep
        missing = {name: tensor for name, tensor in tensors.items() if "layers.2.mlp.up" not in name}
        save_file(missing, file)
        with pytest.raises(ModelError, match=r"layers\.2\.mlp\.up_proj"):
            llm.wake_up(["weights"])
        with pytest.raises(AsleepError):
            said(llm, asked)
        save_file({name: tensor * 1.5 for name, tensor in tensors.items()}, file)
        llm.wake_up()
        assert said(llm, asked) != before
        llm.sleep(2)
        (broken / "elsewhere").rename(file)
        llm.wake_up()
        assert said(llm, asked) == before


def test_adapters_come_back_to_their_slots(tmp_path: Path) -> None:
    """Two slots for three adapters: what stood in them is read from the host again."""
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, detokenize=False)
    loras = [LoRARequest(f"l{at}", at, str(adapter(tmp_path / str(at), at))) for at in (1, 2, 3)]
    asked: list[Any] = [{"prompt_token_ids": each} for each in prompts(6, 200)]
    with opened("shape:tiny", enable_lora=True, max_loras=2, max_cpu_loras=3) as llm:

        def answers() -> list[tuple[int, ...]]:
            outputs = llm.generate(asked, params, lora_request=[*loras, None, *loras[:2]])
            return [tuple(output.outputs[0].token_ids) for output in outputs]

        before = answers()
        for level in (1, 2):
            llm.sleep(level)
            assert llm.engine.executor.adapters.slab.untyped_storage().nbytes() == 0  # type: ignore[union-attr]
            llm.wake_up()
            assert answers() == before
            llm.engine.adapters.check()


def test_the_deeper_level_reads_adapters_from_their_folders_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, detokenize=False)
    folder = adapter(tmp_path / "moss", 31)
    lora, asked = LoRARequest("moss", 7, str(folder)), {"prompt_token_ids": prompts(1, 90)[0]}
    other = adapter(tmp_path / "fern", 57) / "adapter_model.safetensors"
    with opened("shape:tiny", enable_lora=True, max_loras=1, max_cpu_loras=2) as llm:

        def answer() -> list[int]:
            return llm.generate([asked], params, lora_request=lora)[0].token_ids  # type: ignore[list-item]

        before = answer()
        fern = llm.generate([asked], params, lora_request=LoRARequest("fern", 8, str(other.parent)))[0].token_ids  # type: ignore[list-item]
        other.replace(folder / "adapter_model.safetensors")
        llm.sleep(1)
        llm.wake_up()
        assert answer() == before != fern
        llm.sleep(2)
        llm.wake_up()
        assert answer() == fern
        (folder / "adapter_model.safetensors").unlink()
        llm.sleep(2)
        with caplog.at_level("WARNING"):
            llm.wake_up()
        assert answer() == fern
        assert str(folder) in caplog.text


def adapter(folder: Path, seed: int) -> Path:
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight":
            torch.randn((5, 64) if side == "A" else (64, 5), generator=generator) * 0.4
        for layer in range(2) for side in "AB"
    }  # fmt: skip
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 5, "lora_alpha": 10, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_who_cannot_sleep_says_so() -> None:
    with LLM("shape:tiny", device="cpu", dtype="float32", max_num_seqs=2) as llm:
        with pytest.raises(NotFoundError, match="enable-sleep-mode"):
            llm.sleep()
        with pytest.raises(NotFoundError, match="enable-sleep-mode"):
            llm.wake_up()
    with opened("shape:tiny", max_num_seqs=2) as llm, pytest.raises(RequestError, match="level is 0"):
        llm.sleep(0)
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        opened("shape:tiny", runner="pooling")


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_the_gpu_is_given_back(eager: bool) -> None:
    """Weights and KV at least, and the same texts through graphs that were captured anew."""
    asked = prompts(9, 1000)
    options = {"device": "cuda", "dtype": "bfloat16", "gpu_memory_utilization": 0.3, "enforce_eager": eager}
    with opened("shape:qwen3-0.6b", **options, max_num_seqs=64) as llm:
        executor: Any = llm.engine.executor
        least = executor.plan.weights + executor.plan.kv_bytes
        before = said(llm, asked)
        while executor.idle():
            pass
        graphs = executor.graphs.captured
        assert bool(graphs) is not eager
        for level in (1, 2, 1):
            torch.cuda.synchronize()
            awake, _ = torch.cuda.mem_get_info()
            llm.sleep(level)
            asleep, _ = torch.cuda.mem_get_info()
            assert asleep - awake >= least - 64 * MIB
            # It looked a moment apart, and the driver keeps books in units of 2 MiB.
            assert abs(llm.engine.stats().bytes_freed - (asleep - awake)) <= 64 * MIB
            assert (llm.engine.stats().host_weight_bytes > 0.99 * executor.plan.weights) is (level == 1)
            assert executor.graphs.captured == 0
            llm.wake_up(["weights"])
            llm.wake_up(["kv_cache"])
            assert said(llm, asked) == before
            while executor.idle():
                pass
            assert executor.graphs.captured >= graphs
            assert said(llm, asked) == before
        torch.cuda.synchronize()
        assert awake - torch.cuda.mem_get_info()[0] < 256 * MIB, "each sleep leaves something behind"


@pytest.mark.gpu
def test_a_gpu_without_room_is_said_and_waited_for() -> None:
    asked = prompts(4, 1000)
    with opened("shape:qwen3-0.6b", device="cuda", dtype="bfloat16", gpu_memory_utilization=0.6) as llm:
        before = said(llm, asked)
        for level in (1, 2):
            llm.sleep(level)
            free, _ = torch.cuda.mem_get_info()
            others = torch.empty(free - 2048 * MIB, dtype=torch.uint8, device="cuda")
            for _ in range(2):
                with pytest.raises(UnavailableError, match="no room"):
                    llm.wake_up()
                assert torch.cuda.mem_get_info()[0] > 1536 * MIB, "who sleeps on keeps nothing"
            del others
            torch.cuda.empty_cache()
            llm.wake_up()
            assert said(llm, asked) == before
