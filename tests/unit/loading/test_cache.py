"""A directory in the cache is whole or not there, whatever processes do and die of."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from minipaged.loading.cache import cache_directory, make_once

fork = multiprocessing.get_context("fork")


def build_two_files(directory: Path) -> None:
    (directory / "first").write_text("1")
    with open(directory.parent / "builds", "a") as log:  # one letter for each build
        log.write("x")
    time.sleep(0.2)
    (directory / "second").write_text("2")


def build_half_and_hang(directory: Path) -> None:
    (directory / "half").write_text("made")
    time.sleep(60)


def content(directory: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in directory.iterdir()}


def wait_for(path: Path) -> None:
    for _ in range(500):
        if path.exists():
            return
        time.sleep(0.01)
    pytest.fail(f"{path} never came")


def test_processes_that_start_at_once_build_once(tmp_path):
    final = tmp_path / "deep" / "model"
    processes = [fork.Process(target=make_once, args=(final, build_two_files), daemon=True) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert content(final) == {"first": "1", "second": "2"}
    assert (final.parent / "builds").read_text() == "x"


def test_a_process_killed_while_it_builds_leaves_nothing_that_counts_as_a_model(tmp_path):
    final = tmp_path / "model"
    victim = fork.Process(target=make_once, args=(final, build_half_and_hang), daemon=True)
    victim.start()
    wait_for(tmp_path / "model.building" / "half")
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()
    assert not final.exists()
    assert (tmp_path / "model.building").exists()
    assert content(make_once(final, build_two_files)) == {"first": "1", "second": "2"}
    assert not (tmp_path / "model.building").exists()


def test_a_process_waits_for_a_live_builder_and_takes_over_from_a_dead_one(tmp_path):
    final = tmp_path / "model"
    first = fork.Process(target=make_once, args=(final, build_half_and_hang), daemon=True)
    first.start()
    wait_for(tmp_path / "model.building" / "half")
    second = fork.Process(target=make_once, args=(final, build_two_files), daemon=True)
    second.start()
    time.sleep(0.3)
    assert content(tmp_path / "model.building") == {"half": "made"}
    os.kill(first.pid, signal.SIGKILL)
    second.join()
    first.join()
    assert content(final) == {"first": "1", "second": "2"}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_build_that_fails_leaves_nothing(tmp_path, error):
    def fail(directory):
        (directory / "first").write_text("half")
        raise error

    with pytest.raises(error):
        make_once(tmp_path / "model", fail)
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == []


def test_what_is_there_is_not_built_again(tmp_path):
    def never(directory):
        raise AssertionError

    (tmp_path / "model").mkdir()
    assert make_once(tmp_path / "model", never) == tmp_path / "model"


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("MINIPAGED_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_directory() == tmp_path / ".cache" / "minipaged"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "minipaged"
    monkeypatch.setenv("MINIPAGED_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"
