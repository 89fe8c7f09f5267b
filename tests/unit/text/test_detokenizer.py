import pytest

from minipaged.text.detokenizer import MAX_WINDOW, IncrementalDetokenizer
from minipaged.text.tokenizer import Tokenizer

FAMILY = "👩‍👩‍👧"


def stream(tokenizer, token_ids, prompt=(), **options) -> list[str]:
    """What each token gives, and what finish gives."""
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    parts = [*map(detokenizer.append, token_ids), detokenizer.finish()]
    assert detokenizer.text == "".join(parts)
    return parts


def word_ids(byte_fallback) -> list[int]:
    """Of the tokens that begin with a space: ▁Hello and ▁world."""
    return [i for i in range(byte_fallback.vocab_size) if byte_fallback.token_text(i) in ("Hello", "world")]


def test_a_character_is_shown_when_its_last_byte_has_come(byte_level):
    assert stream(byte_level, byte_level.encode("aé🙂b")) == ["a", "", "é", "", "", "", "🙂", "b", ""]


def test_an_unfinished_character_is_shown_at_the_end_as_full_decoding_shows_it(byte_level):
    ids = byte_level.encode("a🙂")[:-1]
    assert stream(byte_level, ids) == ["a", "", "", "", byte_level.decode(ids)[1:]]


def test_finish_shows_what_was_held_back_once(byte_level):
    detokenizer = IncrementalDetokenizer(byte_level)
    detokenizer.append(byte_level.encode("é")[0])
    assert [detokenizer.finish(), detokenizer.finish()] == ["\ufffd", ""]


def test_a_special_token_ends_an_unfinished_character(byte_level):
    ids = [byte_level.encode("é")[0], byte_level.eos_token_id]
    assert stream(byte_level, ids, skip_special_tokens=False) == ["", "\ufffd</s>", ""]


def test_skipped_special_tokens_do_not_disturb_the_text_around_them(byte_level, byte_fallback):
    first, *rest = byte_level.encode("é")
    assert stream(byte_level, [first, byte_level.eos_token_id, *rest]) == ["", "", "é", ""]
    hello, world = word_ids(byte_fallback)
    assert stream(byte_fallback, [hello, *[byte_fallback.eos_token_id] * 50, world]) == [
        "Hello",
        *[""] * 50,
        " world",
        "",
    ]


def test_the_first_word_has_its_space_only_behind_a_prompt(byte_fallback):
    hello, world = word_ids(byte_fallback)
    assert stream(byte_fallback, [world]) == ["world", ""]
    assert stream(byte_fallback, [world], prompt=[hello]) == [" world", ""]
    assert stream(byte_fallback, [world, world]) == ["world", " world", ""]


def test_byte_fallback_shows_each_character_as_it_completes(byte_fallback):
    ids = byte_fallback.encode("a" + FAMILY + "b")
    parts = stream(byte_fallback, ids)
    assert "".join(parts) == byte_fallback.decode(ids) == "a" + FAMILY + "b"
    assert [part for part in parts if part] == ["a", *FAMILY, "b"]


def test_byte_fallback_continues_a_prompt_that_ends_in_bytes(byte_fallback):
    prompt, ids = byte_fallback.encode("🙂🙂🙂"), byte_fallback.encode("🙂a")[1:]
    assert "".join(stream(byte_fallback, ids, prompt)) == "🙂a"


def test_a_character_that_the_prompt_leaves_unfinished_belongs_to_the_output(byte_level, byte_fallback):
    for tokenizer in (byte_level, byte_fallback):
        *prompt, last = tokenizer.encode("ab🙂")
        after = tokenizer.encode("ab🙂c")[-1]
        assert "".join(stream(tokenizer, [last, after], prompt)) == "🙂c"


def test_neighbouring_special_tokens_are_joined_as_full_decoding_joins_them(spaced):
    ids = spaced.encode("red<s></s>green</s></s></s>")
    for spaces in (True, False):
        options = {"skip_special_tokens": False, "spaces_between_special_tokens": spaces}
        assert "".join(stream(spaced, ids, **options)) == spaced.decode(ids, **options)


def test_ids_that_are_no_tokens_show_nothing_and_disturb_nothing(byte_fallback):
    hello, world = word_ids(byte_fallback)
    assert stream(byte_fallback, [hello, *[999_999] * 50, world]) == ["Hello", *[""] * 50, " world", ""]


class Watched(Tokenizer):
    longest = 0

    def decode(self, token_ids, *args):
        self.longest = max(self.longest, len(token_ids))
        return super().decode(token_ids, *args)


@pytest.mark.parametrize("text", [b"word ", "🙂".encode(), b"\x80", b"\xf0", b"\xe4\xbd", b"\xff"], ids=repr)
def test_the_cost_of_a_token_does_not_grow_with_the_text_not_even_for_garbage(byte_level, text):
    tokenizer = Watched(byte_level._backend, byte_level.special_tokens)
    ids = list(text) * 100
    assert "".join(stream(tokenizer, ids)) == byte_level.decode(ids)
    assert tokenizer.longest <= MAX_WINDOW + 1


def test_a_run_of_bytes_that_turns_out_invalid_takes_back_no_shown_text(byte_fallback):
    first, second = byte_fallback.encode("é")[1:]
    parts = stream(byte_fallback, [first, second, first, first])
    assert parts[:2] == ["", "é"]
    assert "".join(parts).startswith("é\ufffd")


@pytest.mark.parametrize("num_garbage", range(MAX_WINDOW - 4, MAX_WINDOW + 2))
def test_a_character_behind_much_garbage_is_whole(byte_level, num_garbage):
    ids = [*[0x80] * num_garbage, *"🙂".encode()]
    assert "".join(stream(byte_level, ids)) == "\ufffd" * num_garbage + "🙂"
