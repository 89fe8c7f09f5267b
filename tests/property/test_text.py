"""Streams equal wholes: whatever the tokens, and however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minipaged.text.detokenizer import REPLACEMENT, IncrementalDetokenizer
from minipaged.text.stop_window import StopWindow
from minipaged.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = st.text(alphabet=st.sampled_from("ab ,\n0é日本🙂👩\u200d\ufffd"), max_size=12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    from minipaged.loading import find_model

    return load_tokenizer(find_model())


@pytest.fixture(scope="module")
def unfinished(tokenizer) -> list[int]:
    """The tokens that are parts of characters."""
    return [i for i in range(tokenizer.vocab_size) if REPLACEMENT in tokenizer.token_text(i)]


def draw_token_ids(data, tokenizer, unfinished) -> list[int]:
    """Arbitrary tokens, and what is rare among them: parts of characters, special tokens, no tokens, real text."""
    piece = st.one_of(
        st.integers(0, tokenizer.vocab_size - 1).map(lambda token_id: [token_id]),
        st.lists(st.sampled_from(unfinished), min_size=1, max_size=50),
        st.sampled_from(sorted(tokenizer.all_special_ids)).map(lambda token_id: [token_id]),
        st.just([tokenizer.vocab_size + 5]),
        TEXTS.map(tokenizer.encode),
    )
    return sum(data.draw(st.lists(piece, max_size=12)), [])


@pytest.mark.real_model
@given(data=st.data(), prompt=TEXTS, skip=st.booleans(), spaces=st.booleans())
def test_the_parts_of_a_stream_add_up_to_full_decoding(tokenizer, unfinished, data, prompt, skip, spaces):
    prompt_ids, output_ids = tokenizer.encode(prompt), draw_token_ids(data, tokenizer, unfinished)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip, spaces)
    for token_id in output_ids:
        detokenizer.append(token_id)
    detokenizer.finish()
    num_prompt = len(tokenizer.decode(prompt_ids, skip, spaces).rstrip(REPLACEMENT))
    assert detokenizer.text == tokenizer.decode(prompt_ids + output_ids, skip, spaces)[num_prompt:]


@pytest.mark.real_model
@given(data=st.data())
def test_at_every_token_the_text_so_far_is_a_beginning_of_full_decoding(tokenizer, unfinished, data):
    output_ids = draw_token_ids(data, tokenizer, unfinished)
    detokenizer = IncrementalDetokenizer(tokenizer)
    for i, token_id in enumerate(output_ids):
        detokenizer.append(token_id)
        assert tokenizer.decode(output_ids[: i + 1]).startswith(detokenizer.text)
    detokenizer.finish()
    assert detokenizer.text == tokenizer.decode(output_ids)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
PUSHES = st.lists(st.tuples(st.text("abc", max_size=4), st.booleans()), max_size=10)


def plain_search(pushes, stops, include) -> tuple[str, str | None]:
    """The slow twin: after each push, search the whole text for stop strings that end in what was pushed."""
    text = ""
    for new_text, may_stop in pushes:
        num_old, text = len(text), text + new_text
        starts = [
            (start, order)
            for order, stop in enumerate(stops)
            for start in range(len(text))
            if text.startswith(stop, start) and start + len(stop) > num_old
        ]
        if may_stop and starts:
            start, order = min(starts)
            return text[: start + len(stops[order]) if include else start], stops[order]
    return text, None


@given(pushes=PUSHES, stops=STOPS, include=st.booleans())
def test_a_stop_window_finds_what_searching_the_whole_text_finds(pushes, stops, include):
    window, shown, stop = StopWindow(stops, include), "", None
    for new_text, may_stop in pushes:
        text, stop = window.push(new_text, may_stop)
        shown += text
        if stop is not None:
            break
    shown += window.flush()
    assert (shown, stop) == plain_search(pushes, stops, include)


@given(texts=st.lists(st.text("abc", max_size=4), max_size=10), stops=STOPS)
def test_a_stop_window_keeps_back_only_what_may_still_become_a_stop_string(texts, stops):
    window, shown, pushed = StopWindow(stops), "", ""
    for new_text in texts:
        pushed += new_text
        text, stop = window.push(new_text)
        shown += text
        if stop is not None:
            return
        kept = pushed.removeprefix(shown)
        assert shown + kept == pushed
        assert kept == "" or any(stop.startswith(kept) and stop != kept for stop in stops)
