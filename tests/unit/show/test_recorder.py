"""Frames are kept, saved and loaded without loss, and say what stands in each slot."""

from __future__ import annotations

import dataclasses
import json

import pytest

from minipaged.beam_search_params import BeamSearchParams
from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams
from minipaged.show import Recorder, contents_at, each
from minipaged.step import SequenceWork
from tests.unit.show.pictures import frame_by_hand, recorded, text_of


def everything(engine):
    """Requests that together use every field of a plan and every kind of answer."""
    prompt = {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7]}
    engine.add_request("samples", prompt, SamplingParams(n=2, seed=0, max_tokens=4, logprobs=2, repetition_penalty=1.1))
    engine.add_request("scores", prompt, SamplingParams(prompt_logprobs=1, max_tokens=3, logit_bias={3: 1.0}))
    engine.add_request("beams", prompt, BeamSearchParams(beam_width=2, max_tokens=3))


def test_a_recording_comes_back_from_its_file_as_it_was(tmp_path):
    recorder = recorded(everything, num_blocks=20, enable_prefix_caching=True)
    recorder.token_text = lambda token_id: f"<{token_id}>"
    recorder.title = "everything"
    recorder.save(tmp_path / "steps.jsonl")
    loaded = Recorder.load(tmp_path / "steps.jsonl")
    assert loaded.frames == recorder.frames
    assert (loaded.title, loaded.words) == ("everything", recorder.words)
    assert loaded.words[7] == "<7>"
    assert text_of(loaded.draw(2)) == text_of(recorder.draw(2))


def test_moves_to_and_from_the_host_come_back_as_well(tmp_path):
    recorder = Recorder()
    frame = frame_by_hand({0: [(1, 4)]}, host_tables={1: [(0, 3)]}, num_host_blocks=2, swap_out=((5, 0),))
    recorder(*frame)
    recorder.save(tmp_path / "steps.jsonl")
    assert Recorder.load(tmp_path / "steps.jsonl").frames == [frame]


def test_what_is_no_recording_is_refused_with_the_line_that_is_wrong(tmp_path):
    file = tmp_path / "steps.jsonl"
    with pytest.raises(InvalidParameter, match="cannot be read"):
        Recorder.load(file)
    for content, message in (
        ("", "is empty"),
        ("{}", "line 1"),
        ('{"format": "other"}', "its format is 'other'"),
        (json.dumps({"format": "minipaged frames 1", "title": "", "words": {}}) + "\n{}", "line 2"),
        ("[]", "line 1"),
        ("no json", "line 1"),
    ):
        file.write_text(content)
        with pytest.raises(InvalidParameter, match=message):
            Recorder.load(file)


def test_the_plans_alone_tell_what_stands_in_each_slot():
    prompt = {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7]}
    recorder = recorded(lambda engine: engine.add_request("mine", prompt, SamplingParams(n=2, seed=0, max_tokens=3)))
    a, b = (draw.token_id for draw in recorder.frames[0].result.entries[0])
    before, after = contents_at(recorder.frames, 0), contents_at(recorder.frames, 1)
    assert before.device == {7: [1, 2, 3, 4], 1: [5, 6, 7, None]}
    assert after.device == {7: [1, 2, 3, 4], 3: [5, 6, 7, a], 1: [5, 6, 7, b]}


def test_frames_of_another_engine_do_not_count():
    prompt = {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7]}
    first = recorded(lambda engine: engine.add_request("mine", prompt, SamplingParams(max_tokens=3))).frames
    other = recorded(
        lambda engine: engine.add_request("mine", {"prompt_token_ids": [9]}, SamplingParams(max_tokens=3)),
        free_order=(5,),
    ).frames
    assert contents_at(first + other, len(first)).device == {5: [9, None, None, None]}


def test_swapped_contents_go_to_the_host_and_back():
    frames = [
        frame_by_hand({}, work=(SequenceWork(0, (11, 12), 0, (4,), 0),)),
        frame_by_hand({}, swap_out=((4, 1),)),
        frame_by_hand({}, swap_in=((1, 6),)),
    ]
    frames = [frame._replace(plan=dataclasses.replace(frame.plan, step=step)) for step, frame in enumerate(frames)]
    contents = contents_at(frames)
    assert contents.host == {1: [11, 12, None, None]}
    assert contents.device[6] == [11, 12, None, None]


def test_several_hooks_hear_the_same_step_in_order():
    heard = []
    each(lambda *step: heard.append(("one", step)), lambda *step: heard.append(("two", step)))("p", "r", "s")
    assert heard == [("one", ("p", "r", "s")), ("two", ("p", "r", "s"))]
