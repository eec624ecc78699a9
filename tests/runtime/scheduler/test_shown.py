"""Images among the tokens of sequences: what chunks meet, where they may end, what pages are told apart by."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest

from stoker_runtime.engine.messages import Add, decode, encode
from stoker_runtime.errors import RequestError
from stoker_runtime.kvcache.prefix_index import extend_keys, root_key
from stoker_runtime.ranks.wire import Wire
from stoker_runtime.request import Image, Request, SamplingParams
from stoker_runtime.scheduler.limits import SchedulerConfig
from stoker_runtime.scheduler.scheduler import Scheduler
from stoker_runtime.scheduler.shown import met, shift_before, whole_stop
from stoker_runtime.step.batch import Batch, PrefillChunk
from stoker_runtime.step.result import StepResult

PLACEHOLDER, VOCAB = 7, 50


def image(rng: random.Random, at: int, tokens: int) -> Image:
    height, width = rng.randint(1, 4), rng.randint(1, 4)
    return Image(
        at, tokens, height, width, rng.randbytes(height * width * 3), rng.randbytes(32), span=rng.randint(1, tokens)
    )


def prompt(rng: random.Random, count: int, *, longest: int = 20) -> tuple[tuple[int, ...], tuple[Image, ...]]:
    """Texts of random lengths with `count` images between them."""
    ids: list[int] = []
    images = []
    for _ in range(count):
        ids.extend(rng.randrange(10, VOCAB) for _ in range(rng.randint(0, 12)))
        images.append(image(rng, len(ids), rng.randint(1, longest)))
        ids.extend([PLACEHOLDER] * images[-1].tokens)
    ids.extend(rng.randrange(10, VOCAB) for _ in range(rng.randint(1, 12)))
    return tuple(ids), tuple(images)


def request(rng: random.Random, count: int, name: str = "r", **more: int) -> Request:
    ids, images = prompt(rng, count, **more)
    return Request(name, ids, SamplingParams(max_tokens=3, temperature=0.0), images=images)


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    return random.Random(seed)


def test_what_a_chunk_meets_by_its_tokens(rng: random.Random) -> None:
    ids, images = prompt(rng, 4)
    owners = [next((each for each in images if each.at <= at < each.end), None) for at in range(len(ids))]
    for _ in range(50):
        start = rng.randrange(len(ids))
        stop = rng.randint(start + 1, len(ids))
        assert met(images, start, stop) == tuple(each for each in images if each in owners[start:stop])
        whole = whole_stop(images, start, stop)
        assert start <= whole <= stop
        if whole > start and whole < len(ids):
            assert owners[whole] is None or owners[whole].at == whole
        ended = [each for each in images if each.end <= start]
        assert shift_before(images, start) == sum(each.span - each.tokens for each in ended)


def test_pages_are_told_apart_by_what_their_images_show(rng: random.Random) -> None:
    ids, images = prompt(rng, 3)
    size, tokens = rng.choice((4, 8)), array("i", ids)

    def keys(shown: tuple[Image, ...], salt: str = "") -> list[bytes]:
        found: list[bytes] = []
        extend_keys(found, tokens, size, root_key(salt), shown)
        return found

    known = keys(images)
    assert keys(images) == known, "the same images give the same keys"
    other = rng.randrange(3)
    changed = keys(tuple(replace(each, digest=bytes(32)) if at == other else each for at, each in enumerate(images)))
    first = images[other].at // size
    assert changed[:first] == known[:first]
    assert all(one != two for one, two in zip(changed[first:], known[first:], strict=True))
    # One key after the other, as pages fill, comes to the same.
    grown: list[bytes] = []
    for end in range(len(tokens) + 1):
        extend_keys(grown, tokens[:end], size, root_key(""), images)
    assert grown == known


def test_a_request_crosses_with_its_images(rng: random.Random) -> None:
    sent = Add(5, request(rng, 3))
    assert decode(encode(sent)) == sent


def test_a_step_crosses_to_other_ranks_with_its_images(rng: random.Random) -> None:
    writer, reader = Wire(), Wire()
    for step in range(1, 5):
        chunks = tuple(
            PrefillChunk(
                slot, rng.randrange(100), (1, 2, 3), rng.random() < 0.5,
                images=tuple(image(rng, rng.randrange(100), 9) for _ in range(rng.randint(0, 2))),
                shift=-rng.randrange(30),
            )
            for slot in range(rng.randint(0, 3))
        )  # fmt: skip
        batch = Batch(step, (4,), chunks)
        assert reader.decode(writer.encode(batch)) == batch


@pytest.mark.parametrize("whole", [False, True])
def test_every_token_of_every_image_is_shown_once(whole: bool, rng: random.Random) -> None:
    size = 4
    config = SchedulerConfig(
        num_pages=200, page_size=size, max_num_seqs=3, max_model_len=200, max_num_batched_tokens=24,
        vocab_size=VOCAB, sees=True, whole_images=whole, prefix_caching=False,
    )  # fmt: skip
    scheduler = Scheduler(config)
    asked = [request(rng, rng.randint(0, 3), str(at)) for at in range(5)]
    sequences = [scheduler.add(each) for each in asked]
    seen: dict[str, list[int]] = {each.id: [] for each in asked}
    while (batch := scheduler.schedule()) is not None:
        for chunk in batch.prefills:
            sequence = next(each for each in sequences if each.slot == chunk.slot and each.finish is None)
            stop = chunk.start + len(chunk.token_ids)
            seen[sequence.request.id].extend(range(chunk.start, stop))
            images = sequence.request.images
            assert chunk.images == met(images, chunk.start, stop)
            assert chunk.shift == shift_before(images, chunk.start)
            if whole:
                assert not any(each.at < stop < each.end for each in images)
        rows = len(batch.decodes) + sum(chunk.sample for chunk in batch.prefills)
        scheduler.commit(batch, StepResult([9] * rows))
    for each in asked:
        assert seen[each.id] == list(range(len(each.prompt_token_ids)))


def test_what_cannot_be_shown_is_refused_by_name(rng: random.Random) -> None:
    config = SchedulerConfig(
        num_pages=200, page_size=4, max_num_seqs=3, max_model_len=200, max_num_batched_tokens=24, vocab_size=VOCAB
    )  # fmt: skip
    good = request(rng, 2)
    with pytest.raises(RequestError, match="reads text only") as refused:
        Scheduler(config).add(good)
    assert refused.value.param == "images"
    seeing = Scheduler(replace(config, sees=True))
    seeing.add(good)
    first, second = good.images
    for images, said in (
        ((second, first), "one behind the other"),
        ((first, replace(second, tokens=second.tokens + 20)), "within the prompt"),
        ((replace(first, pixels=first.pixels[:-1]),), "as many pixels"),
        ((replace(first, span=0),), "one behind the other"),
    ):
        with pytest.raises(RequestError, match=said):
            seeing.add(replace(good, images=images))
    large = Image(0, 22, 1, 1, b"rgb", bytes(32), 22)
    with pytest.raises(RequestError, match="22 tokens does not fit"):
        Scheduler(replace(config, sees=True, whole_images=True)).add(
            replace(good, prompt_token_ids=(PLACEHOLDER,) * 22 + (9,), images=(large,))
        )
