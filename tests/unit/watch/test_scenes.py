"""Each scene shows what it says it shows: its frames, over a shadow worker and the default model's tokenizer."""

from __future__ import annotations

import functools

import pytest

from minipaged.engine.llm import LLM
from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.loading import find_model
from minipaged.show import Frame, Recorder, explain
from minipaged.text.tokenizer import load_tokenizer
from minipaged.watch.player import summary
from minipaged.watch.run import Run
from minipaged.watch.scenes import BEST_OF_TIMES, FOUR_SCORE, SCENES
from tests.shadow_worker import ShadowWorker
from tests.unit.show.pictures import text_of

pytestmark = pytest.mark.real_model


@functools.cache
def default_tokenizer():
    return load_tokenizer(find_model())


@functools.cache  # looked at by several tests, changed by none
def play(name: str) -> Recorder:
    scene, tokenizer = SCENES[name], default_tokenizer()
    recorder = Recorder(tokenizer.token_text)
    args = EngineArgs(**scene.engine_args)
    worker = ShadowWorker(
        scene.num_blocks,
        scene.block_size,
        tokenizer.vocab_size,
        args.max_model_len or 1000,
        num_host_blocks=6 if args.swap_space else 0,
    )
    engine = LLMEngine(args, worker, tokenizer, on_step=recorder, free_order=scene.free_order)
    run(engine, scene)
    return recorder


def run(engine: LLMEngine, scene) -> None:
    steps = Run(engine, scene.arrivals)
    while steps.advance():
        pass
    assert not steps.advance()


def blocks(frame: Frame, seq_id: int = 0) -> list[tuple[int, int]]:
    return [tuple(entry) for entry in frame.snapshot.tables[seq_id]]


def most_at_once(recorder: Recorder) -> int:
    return max(len(frame.plan.work) for frame in recorder.frames)


def events(recorder: Recorder, kind: str) -> list[tuple[int, tuple[int, ...]]]:
    """(step, blocks) of each event of that kind."""
    return [
        (step, event.blocks)
        for step, frame in enumerate(recorder.frames)
        for event in frame.snapshot.events
        if event.kind == kind
    ]


@pytest.mark.parametrize("name", SCENES)
def test_every_scene_ends_with_all_blocks_free_and_fits_into_80_columns(name):
    recorder = play(name)
    assert 4 <= len(recorder.frames) <= 12
    assert not any(recorder.frames[-1].snapshot.ref_counts)
    for index in range(len(recorder.frames)):
        assert max(map(len, text_of(recorder.draw(index)).splitlines())) <= 80


def test_the_paper_s_prompt_has_seven_tokens():
    tokenizer = default_tokenizer()
    assert len(tokenizer.encode(FOUR_SCORE)) == 7
    assert len(tokenizer.encode(BEST_OF_TIMES)) == 6


def test_growing_takes_the_physical_blocks_of_figure_6_in_the_paper_s_order():
    frames = play("growing").frames
    assert blocks(frames[0]) == [(7, 4), (1, 3)]
    assert blocks(frames[1]) == [(7, 4), (1, 4)]
    assert blocks(frames[2]) == [(7, 4), (1, 4), (3, 1)]
    assert [seq.token_ids for seq in frames[0].plan.work] == [tuple(default_tokenizer().encode(FOUR_SCORE))]


def test_two_requests_take_blocks_as_they_come():
    recorder = play("two")
    assert [entry[0] for entry in blocks(recorder.frames[4], 0)] == [7, 1, 3]
    assert [entry[0] for entry in blocks(recorder.frames[4], 1)] == [5, 2, 0]
    assert recorder.frames[0].snapshot.tables.keys() == {0}


def test_parallel_sampling_makes_the_one_copy_of_figure_8():
    recorder = play("parallel")
    frames = recorder.frames
    assert [frame.plan.copies for frame in frames] == [(), ((1, 3),), (), (), ()]
    assert frames[0].plan.num_tokens == 7
    assert (blocks(frames[1], 0), blocks(frames[1], 1)) == ([(7, 4), (3, 4)], [(7, 4), (1, 4)])
    assert frames[1].snapshot.ref_counts[7] == 2
    assert "copies block 1 → 3: A and B share it, and A writes" in explain(frames[1])


def test_beam_search_forks_and_frees_as_in_figure_9():
    recorder = play("beams")
    forked, freed = events(recorder, "fork"), events(recorder, "free")
    assert [step for step, _ in forked].count(1) == 3  # one prompt becomes four beams
    assert any(1 < step < len(recorder.frames) - 1 for step, _ in freed)  # a beam was dropped on the way
    assert all(frame.snapshot.ref_counts[0] == 4 for frame in recorder.frames[1:-1])  # the prompt's full block
    assert most_at_once(recorder) == 4


def test_a_shared_system_prompt_is_computed_once():
    recorder = play("prefix")
    shared = len(events(recorder, "hit")[0][1])
    assert [step for step, _ in events(recorder, "hit")] == [0, 0]
    assert list(recorder.frames[0].snapshot.ref_counts).count(3) == shared >= 3


def test_recompute_puts_the_later_request_out_and_computes_its_tokens_again():
    recorder = play("recompute")
    [step] = [i for i, frame in enumerate(recorder.frames) if frame.snapshot.preempted]
    assert recorder.frames[step].snapshot.preempted == ("second",)
    assert recorder.frames[step].snapshot.waiting == ("second",)
    starts = [(row.start, len(row.token_ids)) for f in recorder.frames for row in f.plan.work if row.seq_id == 1]
    assert starts[0] == (0, 6) and (0, 9) in starts  # six of the prompt, then those and three more


def test_swap_moves_the_later_request_to_the_host_and_back_and_computes_nothing_twice():
    scene, recorder = SCENES["swap"], Recorder()
    run(LLM(on_step=recorder, free_order=scene.free_order, **scene.engine_args).llm_engine, scene)
    [out] = [i for i, frame in enumerate(recorder.frames) if frame.plan.swap_out]
    [back] = [i for i, frame in enumerate(recorder.frames) if frame.plan.swap_in]
    assert out < back
    assert all(frame.snapshot.swapped == ("second",) for frame in recorder.frames[out:back])
    assert recorder.frames[out].snapshot.host_tables.keys() == {1}
    assert sum(frame.plan.num_tokens for frame in recorder.frames) == 7 + 6 + 5 + 5
    assert any("its blocks move to the host pool" in sentence for sentence in explain(recorder.frames[out]))
    assert "host: 2 of 6" in text_of(recorder.draw(out))


def test_chunks_fill_each_step_s_budget_beside_a_decode():
    frames = play("chunked").frames
    assert [len(frame.plan.work) for frame in frames[:3]] == [1, 1, 2]
    assert all(frame.plan.num_tokens == 8 for frame in frames[2:6])
    assert all(frame.plan.work[0].seq_id == 0 and len(frame.plan.work[0].token_ids) == 1 for frame in frames[1:8])


def test_the_prefix_cache_is_found_and_gives_up_what_others_need():
    recorder = play("eviction")
    (found, whole), (again, less) = events(recorder, "hit")
    assert (found, again) == (2, 6)
    assert 0 < len(less) < len(whole)
    assert {step for step, _ in events(recorder, "evict")} == {4, 6}


def test_contiguous_runs_two_requests_where_paged_runs_four():
    contiguous, paged = play("contiguous"), play("paged")
    assert (most_at_once(contiguous), most_at_once(paged)) == (2, 4)
    slots = [
        recorder.frames[0].snapshot.block_size * len(recorder.frames[0].snapshot.ref_counts)
        for recorder in (contiguous, paged)
    ]
    assert slots == [64, 64]
    share = [int(summary(r.frames).split("in use, ")[1].split("%")[0]) for r in (contiguous, paged)]
    assert share[0] < 40 < 75 < share[1]
