import pytest

from minipaged.decoding.stopping import StopLimits, Verdict, check_stop

EOS, OTHER_EOS, STOP_ID, WORD = 2, 7, 9, 100
RUNS_ON, LENGTH = Verdict(), Verdict("length")


def limits(**changes) -> StopLimits:
    return StopLimits(
        **{"max_model_len": 100, "eos_token_ids": (EOS, OTHER_EOS), "stop_token_ids": (STOP_ID,)} | changes
    )


def test_a_word_ends_nothing():
    assert check_stop(WORD, 1, 10, limits()) == RUNS_ON
    assert not RUNS_ON.finished


@pytest.mark.parametrize("token_id", [EOS, OTHER_EOS])
def test_each_end_of_sequence_stops_without_a_reason(token_id):
    assert check_stop(token_id, 1, 10, limits()) == Verdict("stop", None)


def test_a_stop_token_is_its_own_reason():
    assert check_stop(STOP_ID, 1, 10, limits()) == Verdict("stop", STOP_ID)


def test_an_end_of_sequence_that_is_a_stop_token_too_counts_as_end_of_sequence():
    assert check_stop(EOS, 1, 10, limits(stop_token_ids=(EOS,))) == Verdict("stop", None)


def test_ignore_eos_ignores_the_end_of_sequence_but_not_the_stop_tokens():
    ignoring = limits(ignore_eos=True)
    assert check_stop(EOS, 1, 10, ignoring) == RUNS_ON
    assert check_stop(STOP_ID, 1, 10, ignoring) == Verdict("stop", STOP_ID)
    assert check_stop(EOS, 1, 10, limits(ignore_eos=True, stop_token_ids=(EOS,))) == Verdict("stop", EOS)


@pytest.mark.parametrize("token_id", [EOS, STOP_ID])
def test_nothing_stops_before_more_than_min_tokens_exist(token_id):
    patient = limits(min_tokens=3)
    assert [check_stop(token_id, n, 10 + n, patient).finished for n in (1, 2, 3, 4)] == [False, False, False, True]


def test_max_tokens_counts_output_tokens():
    assert check_stop(WORD, 4, 50, limits(max_tokens=5)) == RUNS_ON
    assert check_stop(WORD, 5, 51, limits(max_tokens=5)) == LENGTH


def test_without_max_tokens_only_the_context_limits():
    assert check_stop(WORD, 98, 99, limits()) == RUNS_ON
    assert check_stop(WORD, 99, 100, limits()) == LENGTH


def test_min_tokens_does_not_hold_up_a_length():
    assert check_stop(WORD, 5, 100, limits(min_tokens=50, max_tokens=60)) == LENGTH
    assert check_stop(EOS, 5, 15, limits(min_tokens=5, max_tokens=5)) == LENGTH


def test_a_last_token_that_stops_is_a_stop_and_not_a_length():
    assert check_stop(EOS, 5, 100, limits(max_tokens=5)) == Verdict("stop")
