"""One step in words: the sentences of every mechanism."""

from __future__ import annotations

from minipaged.beam_search_params import BeamSearchParams
from minipaged.sampling_params import SamplingParams
from minipaged.show import Frame, explain
from minipaged.snapshot import BlockEvent
from minipaged.step import Draw, Sample, SamplingRules, SequenceWork, StepPlan, StepResult
from tests.unit.show.pictures import frame_by_hand, recorded

PROMPT = {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7]}


def samples(count):
    params = SamplingParams(n=count, seed=0, max_tokens=3)
    return recorded(lambda engine: engine.add_request("mine", PROMPT, params)).frames


def test_two_samples_are_a_fork_and_one_copy():
    frames = recorded(
        lambda engine: engine.add_request("mine", PROMPT, SamplingParams(n=2, seed=0, max_tokens=3))
    ).frames
    first, second = explain(frames[0]), explain(frames[1])
    assert first[:2] == ["A takes blocks 7 1", "prefills A: 7 tokens at positions 0–6, into blocks 7 1"]
    assert first[2].startswith("A samples 2 tokens, one for each sample to be: #")
    assert second[:4] == [
        "B begins as a fork: it shares blocks 7 1, and nothing is copied",
        "copies block 1 → 3: A and B share it, and A writes",
        "decodes A: 1 token at position 7, into block 3, slot 3",
        "decodes B: 1 token at position 7, into block 1, slot 3",
    ]
    assert explain(frames[-1])[-2:] == [
        "B lets go of its blocks: blocks 2 1 7 free again",
        "there is nothing to compute",
    ]


def test_of_three_sharers_two_copy_and_each_copy_names_who_shares_then():
    frames = recorded(
        lambda engine: engine.add_request("mine", PROMPT, SamplingParams(n=3, seed=0, max_tokens=3))
    ).frames
    copies = [sentence for sentence in explain(frames[1]) if sentence.startswith("copies")]
    assert copies == [
        "copies block 1 → 3: A, B and C share it, and A writes",
        "copies block 1 → 0: B and C share it, and B writes",
    ]


def test_beams_are_compared():
    params = BeamSearchParams(beam_width=2, max_tokens=3)
    frames = recorded(lambda engine: engine.add_request("mine", PROMPT, params)).frames
    assert "the 4 best continuations of A are compared; the best is #" in explain(frames[0])[-1]


def test_the_words_of_tokens_are_quoted_where_they_are_known():
    sampling = (Sample(0, ((0, 0),), SamplingRules()),)
    plan = StepPlan(0, (SequenceWork(0, (3,), 2, (0,), 0),), sampling)
    frame = Frame(plan, StepResult(((Draw(9, None, ()),),)), frame_by_hand({0: [(0, 3)]}).snapshot)
    assert explain(frame)[-1] == "A samples #9"
    words = {9: " fathers\n", 3: " our"}
    assert explain(frame, words) == [
        "decodes A: “ our” at position 2, into block 0, slot 2",
        "A samples “ fathers⏎”",
    ]


def test_a_prompt_in_chunks_says_that_the_rest_follows():
    frames = recorded(
        lambda engine: engine.add_request("mine", PROMPT, SamplingParams(max_tokens=2)),
        max_num_batched_tokens=4,
        max_num_seqs=2,
    ).frames
    assert "computes a chunk of A: 4 tokens at positions 0–3, into block 7; the rest follows" in explain(frames[0])
    assert "computes the rest of A: 3 tokens at positions 4–6, into block 1" in explain(frames[1])


def test_the_prefix_cache_tells_hits_and_evictions():
    def add(engine):
        params = SamplingParams(max_tokens=2, temperature=0)
        for name, first in (("one", 1), ("two", 1), ("three", 20)):
            prompt = {"prompt_token_ids": list(range(first, first + 9))}
            engine.add_request(name, prompt, params)
            while engine.has_unfinished_requests():
                engine.step()

    frames = recorded(add, num_blocks=4, free_order=(3, 1, 2, 0), enable_prefix_caching=True).frames
    said = [sentence for frame in frames for sentence in explain(frame)]
    assert "B finds its first 8 tokens in the prefix cache: it begins with blocks 3 1" in said
    assert "evicts cached block 1: nothing else is free" in said
    assert "A lets go of its blocks: blocks 2 1 3 free again (1 3 kept in the prefix cache)" in said


def test_preemption_says_which_kind_it_is():
    by_recompute = frame_by_hand({}, preempted=("b",), waiting=("b",), groups={"b": (1,)})
    assert explain(by_recompute)[0] == "preempts b (B): too few blocks are free; its tokens will be computed again"
    by_swap = frame_by_hand(
        {},
        preempted=("b",),
        swapped=("b",),
        groups={"b": (1,)},
        host_tables={1: [(0, 4), (1, 2)]},
        num_host_blocks=4,
        swap_out=((5, 0), (6, 1)),
        events=(BlockEvent("swap_out", 1, (5, 6)),),
    )
    assert explain(by_swap)[:2] == [
        "preempts b (B): too few blocks are free; its blocks move to the host pool",
        "swaps out 2 blocks, device → host: 5 → 0, 6 → 1",
    ]
    freed = (BlockEvent("free", 5, (3,)), BlockEvent("free", 1, (2, 4)))
    in_order = frame_by_hand({}, preempted=("b",), waiting=("b",), groups={"b": (1,)}, events=freed)
    assert [sentence.split(" ")[0] for sentence in explain(in_order)[:3]] == ["F", "preempts", "B"]
    back = frame_by_hand({1: [(2, 4)]}, swap_in=((0, 2),), events=(BlockEvent("swap_in", 1, (2,)),))
    assert explain(back)[0] == "swaps in 1 block, host → device: 0 → 2"


def test_of_many_decodes_all_are_told_in_one_sentence():
    work = tuple(SequenceWork(seq_id, (1,), 4, (0, 1), 0) for seq_id in range(30))
    sampling = tuple(Sample(row, ((0, 0),), SamplingRules()) for row in range(30))
    plan = StepPlan(0, work, sampling)
    frame = Frame(plan, StepResult(((Draw(1, None, ()),),) * 30), frame_by_hand({}).snapshot)
    assert explain(frame) == ["decodes 30 sequences, A to D1: 1 token each", "30 sequences sample a token each"]
