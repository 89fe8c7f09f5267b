import pytest

from minipaged.text.stop_window import Shown, StopWindow


def stream(window: StopWindow, *texts: str) -> tuple[str, str | None]:
    """All that is shown of texts pushed one by one, and the stop string that ended them."""
    shown = ""
    for text in texts:
        text, stop = window.push(text)
        shown += text
        if stop is not None:
            return shown, stop
    return shown + window.flush(), None


def test_without_stop_strings_everything_is_shown_at_once():
    window = StopWindow()
    assert window.push("any") == Shown("any", None)
    assert window.flush() == ""


@pytest.mark.parametrize("texts", [("xDEFy",), ("xD", "EFy"), ("x", "D", "E", "F", "y"), ("xDE", "Fy")])
def test_a_stop_string_is_found_inside_a_token_and_across_tokens(texts):
    assert stream(StopWindow(["DEF"]), *texts) == ("x", "DEF")
    assert stream(StopWindow(["DEF"], include_stop_str_in_output=True), *texts) == ("xDEF", "DEF")


def test_a_stop_string_shorter_than_its_token_cuts_the_token():
    assert stream(StopWindow(["gani"]), "volunteer", " organization") == ("volunteer or", "gani")


def test_a_beginning_is_kept_until_it_turns_out_to_be_something_else():
    window = StopWindow(["\n\nUser:"])
    pushed = ["Yes.", "\n", "\nUs", "ual", "\n\nUser:"]
    assert [window.push(text) for text in pushed] == [
        Shown("Yes."),
        Shown(""),
        Shown(""),
        Shown("\n\nUsual"),
        Shown("", "\n\nUser:"),
    ]


def test_what_is_kept_can_begin_anew_inside_itself():
    assert stream(StopWindow(["aab"]), "a", "a", "a", "b", "c") == ("a", "aab")


def test_flush_shows_what_never_became_a_stop_string():
    assert stream(StopWindow(["STOP"]), "go ST") == ("go ST", None)
    window = StopWindow(["STOP"])
    window.push("go ST")
    assert [window.flush(), window.flush()] == ["ST", ""]


def test_including_the_stop_string_delays_nothing_and_shows_nothing_twice():
    window = StopWindow(["STOP"], include_stop_str_in_output=True)
    assert [window.push(text).text for text in ("go S", "TO", "P now")] == ["go S", "TO", "P"]
    window = StopWindow(["STOP"], include_stop_str_in_output=True)
    assert window.push("go S").text + window.flush() == "go S"


def test_the_earliest_start_wins():
    assert stream(StopWindow(["world", "hello"]), "say hello world") == ("say ", "hello")


def test_of_two_that_start_together_the_one_given_first_wins():
    assert stream(StopWindow(["ab", "abc"]), "abc") == ("", "ab")
    assert stream(StopWindow(["abc", "ab"]), "abc") == ("", "abc")


def test_text_before_min_tokens_never_matches():
    window = StopWindow([".", "longer"])
    assert window.push("One.", may_stop=False) == Shown("One.")
    assert window.push(" Two") == Shown(" Two")
    assert window.push(". Three") == Shown("", ".")


def test_a_stop_string_that_begins_before_min_tokens_and_ends_after_is_found():
    window = StopWindow(["END"])
    assert window.push("the E", may_stop=False) == Shown("the ")
    assert window.push("ND.") == Shown("", "END")


def test_a_stop_string_inside_the_beginning_of_another_is_not_found_late():
    window = StopWindow(["aXb", "X"])
    assert window.push("aX", may_stop=False) == Shown("")
    assert window.push("c") == Shown("aXc")
