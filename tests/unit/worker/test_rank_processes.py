"""Ranks in processes of their own: they work, they end with their engine, and one that ends takes the engine along."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from minipaged import LLM, BeamSearchParams, SamplingParams
from minipaged.errors import EngineDead, InvalidParameter, RankFailed
from minipaged.worker import rank_processes, worker
from minipaged.worker.parallel_worker import HeldBytes
from tests.tiny_llama import random_prompt, tiny_llama

ROOT = Path(__file__).parents[3]
WITHIN = 10  # seconds, for a failure to be told and for processes to be gone
PROMPTS = [{"prompt_token_ids": random_prompt(length, seed=length)} for length in (5, 19, 3)]
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
COMMON = {"skip_tokenizer_init": True, "dtype": "float64", "num_gpu_blocks_override": 64, "block_size": 4}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_llama("gqa").save(tmp_path_factory.mktemp("gqa"))  # 4 heads, 2 KV heads, 2 layers


@pytest.fixture(autouse=True)
def on_its_own(monkeypatch):
    """No test inherits a place among ranks from the environment."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def make_llm(directory, size=2, **args):
    return LLM(directory, tensor_parallel_size=size, **COMMON, **args)


def pids_of(llm):
    return llm.llm_engine.worker.processes.pids


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def assert_gone(pids, within=WITHIN):
    deadline = time.monotonic() + within
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a rank still runs"
        time.sleep(0.05)


def tokens(outputs):
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


def everything(llm):
    """Greedy, parallel samples and beams."""
    sampled = SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True)
    [beams] = llm.beam_search(PROMPTS[:1], BeamSearchParams(beam_width=3, max_tokens=6))
    return (
        tokens(llm.generate(PROMPTS, [GREEDY, sampled, GREEDY], use_tqdm=False)),
        [sequence.tokens for sequence in beams.sequences],
    )


def test_ranks_in_processes_give_the_tokens_of_one_and_end_with_the_engine(directory):
    """Also counts what crosses in a step, and weighs what each rank holds."""
    llm, steps = make_llm(directory, size=2), []
    pids = pids_of(llm)
    assert len(pids) == 1 and all(map(is_running, pids))
    traffic = llm.llm_engine.worker.ranks.traffic
    llm.llm_engine.on_step = lambda plan, result, snapshot, traffic=traffic: steps.append((plan, dict(traffic)))

    with LLM(directory, **COMMON) as alone:
        assert everything(llm) == everything(alone)
        whole = alone.llm_engine.worker

    for (_, before), (plan, after) in zip(steps, steps[1:], strict=False):
        if plan.work:
            crossed = {name: after[name] - before[name] for name in ("broadcast", "all_reduce", "gather", "collect")}
            assert crossed == {"broadcast": 2, "all_reduce": 1 + 2 * 2, "gather": bool(plan.sampling), "collect": 0}
            assert after["plan bytes"] - before["plan bytes"] < 24 + 4 * plan.num_tokens + 60 * len(plan.work)

    split_weights = sum(p.nbytes for name, p in whole.model.named_parameters() if "norm" not in name)
    norms = sum(p.nbytes for name, p in whole.model.named_parameters() if "norm" in name)
    a_row = 2 * 32 * 8  # of embedding and head: the vocabulary of 61 is split as 31 and 30
    held = [HeldBytes(split_weights // 2 + norms + a * a_row // 2, whole.cache.num_bytes // 2) for a in (1, -1)]
    assert llm.llm_engine.worker.held_bytes == held
    assert "on each of 2 ranks" in llm.describe()

    del llm
    gc.collect()
    assert_gone(pids, within=1)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_in_the_middle_of_a_generation_ends_the_engine_with_its_name(directory, size):
    def kill(plan, result, snapshot):
        if snapshot.step == 5:
            os.kill(pids[-1], signal.SIGKILL)
            killed_at.append(time.monotonic())

    llm, killed_at = make_llm(directory, size, on_step=kill), []
    pids = pids_of(llm)
    with pytest.raises(RankFailed, match=f"^rank {size - 1} was killed by SIGKILL$") as caught:
        llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert time.monotonic() - killed_at[0] < WITHIN
    assert caught.value.rank == size - 1
    assert_gone(pids, within=0)
    engine = llm.llm_engine
    assert engine.blocks.num_free == engine.blocks.num_blocks
    with pytest.raises(EngineDead, match=f"can run no more steps: rank {size - 1} was killed by SIGKILL"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.close()


def test_a_rank_that_raises_ends_the_engine_with_its_traceback(directory):
    llm = make_llm(directory)
    pids = pids_of(llm)
    llm.llm_engine.worker._writer.write = lambda plan, rows: b"no plan"
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)^rank 1 raised:\nTraceback .*plan_message\.py.*ValueError: ") as caught:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert caught.value.rank == 1
    assert time.monotonic() - begin < WITHIN
    assert_gone(pids, within=0)


def test_what_rank_0_raises_in_a_step_ends_the_others_and_close_is_no_error_twice(directory, monkeypatch):
    llm = make_llm(directory)
    pids = pids_of(llm)
    monkeypatch.setattr(worker, "answer_plan", lambda *args: 1 / 0)
    with pytest.raises(RankFailed, match=r"(?s)^rank 0 raised:\nTraceback .*ZeroDivisionError"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_gone(pids, within=0)
    llm.close()
    llm.close()


def test_a_rank_that_cannot_load_ends_the_start_with_its_traceback(directory, monkeypatch):
    start, started = rank_processes.RankProcesses.start, []

    def start_without_a_model(self, rank, given):
        lost = type(given.args)(model="/no/such/place")
        start(self, rank, type(given)(lost, given.rank, given.size, given.port, given.parent))
        started.extend(self.pids)

    monkeypatch.setattr(rank_processes.RankProcesses, "start", start_without_a_model)
    with pytest.raises(RankFailed, match=r"(?s)^rank 1 raised:\nTraceback .*ModelNotFound: model = '/no/such/place'"):
        make_llm(directory)
    assert_gone(started, within=0)


SCRIPT = """
    import sys
    from minipaged import LLM, SamplingParams

    def report(plan, result, snapshot):
        print("step", flush=True)

    llm = LLM(sys.argv[1], tensor_parallel_size=2, skip_tokenizer_init=True, on_step=report)
    print(*llm.llm_engine.worker.processes.pids, flush=True)
    while True:
        try:
            llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=250, ignore_eos=True))
        except KeyboardInterrupt:
            print("interrupted", flush=True)
"""


def test_ctrl_c_is_for_rank_0_alone_and_no_rank_outlives_a_killed_program(directory):
    """A script without a main guard, in a session of its own, as at a terminal."""
    script = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    try:
        pids = [int(pid) for pid in script.stdout.readline().split()]
        assert len(pids) == 1
        assert script.stdout.readline() == "step\n"
        os.killpg(script.pid, signal.SIGINT)
        while script.stdout.readline() != "interrupted\n":
            assert script.poll() is None
        for _ in range(5):  # it goes on, with the same ranks
            assert script.stdout.readline() == "step\n"
        assert all(map(is_running, pids))
        os.kill(script.pid, signal.SIGKILL)
    finally:
        script.kill()
        script.wait()
    assert_gone(pids)


def test_ranks_that_are_still_starting_end_with_a_killed_program_too(directory):
    script = """
        import os, time
        from minipaged.worker.rank import Start
        from minipaged.worker.rank_processes import RankProcesses

        processes = RankProcesses()
        for rank in (1, 2):
            processes.start(rank, Start(None, rank, 3, 9, os.getpid()))
        print(*processes.pids, flush=True)
        time.sleep(60)
    """
    starter = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    pids = [int(pid) for pid in starter.stdout.readline().split()]
    starter.kill()
    starter.wait()
    assert len(pids) == 2
    assert_gone(pids)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (3, "tensor_parallel_size = 3: must divide the model's 4 attention heads"),
        (8, "tensor_parallel_size = 8: must divide the model's 4 attention heads"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE = 'many': the environment must give a number"),
        ({"WORLD_SIZE": "2"}, "RANK = None: the environment must give a number"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "0"}, "MASTER_PORT = 0: must be a port, from 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT = 65536: must be a port, from 1 to 65535"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_WORLD_SIZE = '1': all ranks must be on one"),
    ],
)
def test_a_number_of_ranks_that_cannot_be_is_refused_before_anything_starts(directory, monkeypatch, size, message):
    monkeypatch.setattr(rank_processes.subprocess, "Popen", None)
    monkeypatch.setattr(worker, "read_weights", None)
    environment, size = (size, 2) if isinstance(size, dict) else ({}, size)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidParameter, match=message):
        make_llm(directory, size)


@pytest.mark.parametrize(
    ("size", "device", "message"),
    [
        (4, "auto", "tensor_parallel_size = 4: this machine has 2 CUDA devices, and each rank needs one"),
        (2, "cuda:1", "device = 'cuda:1': 2 ranks need one device each: say cuda"),
    ],
)
def test_more_ranks_than_cuda_devices_are_refused(directory, monkeypatch, size, device, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidParameter, match=message):
        make_llm(directory, size, device=device)


def test_an_address_that_is_taken_is_refused_before_anything_starts(directory, monkeypatch):
    monkeypatch.setattr(rank_processes.subprocess, "Popen", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(InvalidParameter, match=f"MASTER_PORT = {port}: .* the address is taken"):
            make_llm(directory)
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(InvalidParameter, match=f"MASTER_PORT = {port}: .* the address is taken"):
            make_llm(directory)


def test_another_number_than_was_started_from_outside_is_refused(directory, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(InvalidParameter, match=r"tensor_parallel_size = 2: 3 ranks were started \(WORLD_SIZE\)"):
        make_llm(directory)
    assert tokens(make_llm(directory, size=1).generate(PROMPTS[:1], GREEDY, use_tqdm=False))
