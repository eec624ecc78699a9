"""Pages of layers with a window: what is held, what is given up, what of a prefix is a hit."""

from __future__ import annotations

import pytest
from tests.runtime.scheduler.harness import Harness

from stoker_runtime.errors import RequestError
from stoker_runtime.kvcache.sight import READ_BLOCK, Sight
from stoker_runtime.scheduler.near import part_key
from stoker_runtime.scheduler.sequence import Sequence

# Six tokens back, in places of four: from the place that begins at or before the first.
SIGHT = Sight(window=6, parts=2, page_size=4, block=4)


def harness(pages: int, **sizes: object) -> Harness:
    """Pages of four tokens, of which two parts lie in places of their own."""
    return Harness(num_pages=pages, sight=SIGHT, max_model_len=200, **sizes)


def places(sequence: Sequence) -> tuple[int, int]:
    """The first place in sight, and the end."""
    return sequence.near_from, sequence.near_from + len(sequence.near)


def test_what_is_in_sight() -> None:
    sight = Sight(window=6, parts=1, page_size=4, block=4)
    # A query at 9 sees 4…9; at 10 5…10, of which 5 lies in place 1; at 13 8…13.
    assert [sight.first(position) for position in (0, 5, 8, 9, 10, 12, 13)] == [0, 0, 0, 1, 1, 1, 2]
    assert sight.span == 3
    blocks = Sight(window=70, parts=1, page_size=16)
    assert blocks.first(1000) == (1000 - 69) // READ_BLOCK * READ_BLOCK // 16
    # At 1009 sees from 940; the block begins at 896: eight places.
    assert max(1000 // 16 + 1 - blocks.first(position) for position in range(1000, 1008)) <= blocks.span


@pytest.mark.parametrize("page", [16, 32, 64, 128])
@pytest.mark.parametrize("window", [1, 63, 64, 65, 128, 517])
def test_the_span_is_the_most_that_any_position_sees(window: int, page: int) -> None:
    sight = Sight(window, 3, page)
    most = max(position // page + 1 - sight.first(position) for position in range(window + 400))
    assert most == sight.span or page > READ_BLOCK


@pytest.mark.parametrize("parts", [1, 3])
def test_the_longest_sequence_is_one_that_fits(parts: int) -> None:
    sight = Sight(37, parts, 16)
    for pages in range(1, 120):
        longest = sight.tokens(pages)
        assert sight.pages(longest) <= pages < sight.pages(longest + 1)


def test_a_decode_holds_its_window_alone() -> None:
    device = harness(60)
    sequence = device.add(5, max_tokens=100)
    seen = set()
    while sequence.finish is None:
        device.step()
        if sequence.slot >= 0:
            seen.add(len(sequence.near))
            assert len(sequence.pages) == (sequence.computed + 3) // 4
    assert max(seen) == SIGHT.span
    assert device.scheduler.stats().pages_used == 0


def test_chunks_give_up_what_the_next_one_does_not_see() -> None:
    device = harness(60)
    sequence = device.add(40, max_tokens=2)
    held = []
    for _ in range(3):
        device.step()
        held.append(places(sequence))
    # 16 tokens a chunk: the second one begins at 16 and sees from 11, the third at 32 and from 27.
    assert held == [(0, 4), (2, 8), (6, 10)]


def test_a_chunk_ends_where_the_pages_do() -> None:
    # Ten places of all tokens, and 4 of the window's two parts.
    device = harness(10 + 8)
    sequence = device.add(40, max_tokens=1)
    lengths = [len(device.step()[0].prefills[0].token_ids) for _ in range(4)]
    assert lengths == [16, 8, 8, 8]
    assert sequence.finish is not None


def test_the_longest_possible_request_runs_and_a_longer_one_is_refused() -> None:
    device = harness(20)
    longest = SIGHT.tokens(20)
    assert longest == (20 - 2 * SIGHT.span) * 4
    sequence = device.add(longest - 30, max_tokens=100)
    device.run()
    assert len(sequence.tokens) == longest
    with pytest.raises(RequestError, match=f"holds at most {longest} per sequence"):
        device.add(longest, max_tokens=1)


def test_a_prefix_is_a_hit_where_its_end_is_in_sight() -> None:
    device = harness(60)
    prompt = tuple(range(1, 42))
    device.add(prompt, max_tokens=1)
    device.run()
    sequence = device.add(prompt, max_tokens=1)
    device.step()
    assert sequence.cached_tokens == 40
    device.run()
    # A shorter one ends where another place is in sight.
    shorter = device.add((*prompt[:22], 77), max_tokens=1)
    device.step()
    assert shorter.cached_tokens == 20
    device.run()


def test_a_prefix_without_the_pages_that_its_end_sees_is_as_long_as_the_last_that_has_them() -> None:
    device = harness(60)
    prompt = tuple(range(1, 42))
    first = device.add(prompt, max_tokens=1)
    device.run()
    index = device.scheduler._placement.pages.index
    assert index is not None
    # One part of place 8, which the token at 40 sees, and that at 36; that at 32 does not.
    page = index.page_of(part_key(first.keys[8], 1))
    assert page is not None
    del index._idle[page]
    index._forget(page)
    device.scheduler._placement.pages._free.append(page)
    sequence = device.add(prompt, max_tokens=1)
    device.step()
    assert sequence.cached_tokens == 32
    device.run()
    assert sequence.finish is not None


def test_a_prompt_in_the_cache_whole_computes_its_last_page() -> None:
    device = harness(60)
    prompt = tuple(range(1, 41))
    device.add(prompt, max_tokens=1)
    device.run()
    sequence = device.add(prompt, max_tokens=1)
    batch, _ = device.step()
    assert sequence.cached_tokens == 36
    assert not batch.copies
    assert batch.prefills[0].token_ids == prompt[36:]


def test_choices_of_one_prompt_share_full_pages() -> None:
    device = harness(60)
    one, other = (device.add(18, max_tokens=30, family="f") for _ in range(2))
    for _ in range(3):
        device.step()
    assert one.pages[:4] == other.pages[:4]
    assert one.near[0] == other.near[0] or one.near_from != other.near_from
    assert other.cached_tokens == 16
    device.run()
    assert device.scheduler.stats().pages_used == 0


def test_two_that_prefill_without_a_page_left_do_not_wait_for_each_other() -> None:
    device = harness(80, policy="priority")
    late = device.add(tuple(range(1, 61)), max_tokens=1, priority=1)
    device.step()
    urgent = device.add(tuple(range(2, 62)), max_tokens=1, priority=0)
    device.step()
    assert late.slot >= 0
    assert urgent.slot >= 0
    # Whoever they are, others have taken all that is left when these have given up what they can.
    device.scheduler._settle()
    pages = device.scheduler._placement.pages
    taken = pages.allocate(pages.available)
    batch = device.scheduler.schedule()
    assert batch is not None
    assert [chunk.slot for chunk in batch.prefills] == [urgent.slot]
    assert late.slot < 0
    pages.release(taken)
    device.commit(batch)
    device.run()
    assert late.finish is not None
    assert urgent.finish is not None
