"""`python -m minipaged.watch`: forwards, backwards, recordings, pipes; and no traceback for a mistake."""

from __future__ import annotations

import io
import os
import pty
import select
import subprocess
import sys

import pytest
from rich.console import Console

from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams
from minipaged.show import Recorder
from minipaged.watch.__main__ import main, parse_arguments
from minipaged.watch.keys import BACK, NEXT, QUIT, RUN, from_lines
from minipaged.watch.player import Player, summary
from minipaged.watch.scenes import SCENES
from tests.reading_order import README
from tests.unit.show.pictures import recorded


@pytest.fixture(scope="module")
def recording():
    params = SamplingParams(max_tokens=4)
    recorder = recorded(lambda engine: engine.add_request("mine", {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7]}, params))
    recorder.title = "a title"
    return recorder


@pytest.fixture
def file(recording, tmp_path):
    recording.save(tmp_path / "steps.jsonl")
    return str(tmp_path / "steps.jsonl")


def steps_shown(recording, commands, is_live=False):
    """The step numbers that a viewer with these commands sees, and all that is written."""
    commands, console = iter(commands), Console(file=io.StringIO(), width=80)
    Player(recording, lambda: False, console, lambda: next(commands), "heading", is_live).play()
    text = console.file.getvalue()
    return [int(line.split()[1].rstrip(":")) for line in text.splitlines() if line.startswith("step ")], text


def test_enter_goes_on_and_b_goes_back_as_far_as_the_beginning(recording):
    shown, _ = steps_shown(recording, [NEXT, NEXT, BACK, BACK, BACK, NEXT, QUIT])
    assert shown == [0, 1, 2, 1, 0, 0, 1]


def test_r_runs_on_to_the_end_and_a_person_may_go_back_from_there(recording):
    assert steps_shown(recording, [NEXT, RUN])[0] == [0, 1, 2, 3, 4]
    shown, text = steps_shown(recording, [RUN, BACK, NEXT, NEXT], is_live=True)
    assert shown == [0, 1, 2, 3, 4, 3, 4]
    assert text.count("the end ·") == 2
    assert text.rstrip().endswith("were filled")


def test_frames_come_as_they_are_asked_for(recording):
    recorder, source = Recorder(), iter(recording.frames)

    def advance():
        frame = next(source, None)
        if frame is not None:
            recorder(*frame)
        return frame is not None

    commands = iter([NEXT, NEXT, QUIT])
    Player(recorder, advance, Console(file=io.StringIO()), lambda: next(commands), "").play()
    assert len(recorder.frames) == 3


def test_lines_are_commands_and_their_end_runs_on():
    read = from_lines(io.StringIO("\nb\nwhat?\n Q \n"))
    assert [read() for _ in range(4)] == [NEXT, BACK, QUIT, RUN]


def test_a_recording_is_replayed_without_a_model_from_a_pipe(file):
    code = (
        "import sys; from minipaged.watch.__main__ import main; "
        f"code = main(['--replay', {file!r}]); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], input="", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("a title\n\nstep 0: 7 tokens computed")
    assert done.stdout.count("step ") == 5


def test_the_clock_needs_no_keys(file, capsys):
    assert main(["--replay", file, "--auto", "0"]) == 0
    assert capsys.readouterr().out.count("step ") == 5


def test_what_was_seen_becomes_a_page(file, tmp_path, capsys):
    assert main(["--replay", file, "--auto", "0", "--trace", str(tmp_path / "out.html")]) == 0
    page = (tmp_path / "out.html").read_text()
    assert '"title":"a title"' in page
    assert "prefills A: 7 tokens" in page


def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(capsys):
    for option in ("--trace", "--record"):
        with pytest.raises(SystemExit):
            main(["growing", option, "/no/such/place/out"])
        assert "must be a file that can be written" in capsys.readouterr().err


def test_a_reader_who_leaves_ends_it_quietly(file):
    command = f"{sys.executable} -m minipaged.watch --replay {file} < /dev/null | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""


def test_on_a_terminal_single_keys_are_read(file):
    """A pseudo-terminal: a key for the next step, b, q, and no Enter after any of them."""
    controller, terminal = pty.openpty()
    command = [sys.executable, "-m", "minipaged.watch", "--replay", file]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, close_fds=True) as process:
        os.close(terminal)
        try:
            for key, expected in ((b" ", b"step 0"), (b"b", b"step 1"), (b"q", b"step 0")):
                seen = b""
                while expected not in seen or b"q quit" not in seen:
                    assert select.select([controller], [], [], 60)[0], seen.decode()
                    seen += os.read(controller, 4096)
                os.write(controller, key)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()
    os.close(controller)


def test_the_list_names_every_scene(capsys):
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(scene.name in listed and scene.title in listed for scene in SCENES.values())
    assert max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nonsense", "invalid choice: 'nonsense'"),
        ("growing --prompt x", "exclude each other"),
        ("growing --replay f", "exclude each other"),
        ("growing --n 2", "--n is for --prompt"),
        ("--num-blocks 8", "--num-blocks is for --prompt"),
        ("--prompt x --beam-width 2 --seed 1", "--seed means nothing with --beam-width"),
        ("--replay f --model m", "--replay needs no --model"),
        ("--auto -1", "--auto must be at least 0"),
    ],
)
def test_an_argument_that_is_wrong_or_would_be_ignored_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(arguments.split())
    assert message in capsys.readouterr().err


def test_a_wrong_file_or_model_is_explained_without_a_traceback(capsys):
    assert main(["--replay", "/no/such/file"]) == 2
    assert "recording = '/no/such/file': cannot be read" in capsys.readouterr().err
    assert main(["growing", "--model", "/no/such/model"]) == 2
    assert "model = '/no/such/model'" in capsys.readouterr().err


@pytest.mark.real_model
def test_the_picture_in_the_readme_is_what_the_scene_shows(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["parallel"]) == 0
    shown = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    [picture] = [block for block in README.read_text().split("```\n") if block.startswith("step 1:")]
    assert picture in shown


@pytest.mark.real_model
def test_a_scene_on_the_real_model_is_recorded_and_replayed_alike(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\n\n"))
    file = str(tmp_path / "parallel.jsonl")
    assert main(["parallel", "--record", file]) == 0
    first = capsys.readouterr().out
    assert "copies block 1 → 3: A and B share it, and A writes" in first
    assert "│Four│ score│ and│ seven│" in first
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["--replay", file]) == 0
    assert capsys.readouterr().out == first


@pytest.mark.real_model
def test_prompts_of_one_s_own_are_watched_and_checked_before_the_first_step(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["--prompt", "One, two,", "--prompt", "A, B,", "--max-tokens", "2", "--num-blocks", "6"]) == 0
    assert "running  prompt-1 (A)  prompt-2 (B)" in capsys.readouterr().out
    assert main(["--prompt", "One", "--prompt", "word " * 100, "--num-blocks", "6"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "prompt" in captured.err


def test_a_run_without_work_has_a_summary_too():
    assert summary([]) == "nothing ran"
    with pytest.raises(InvalidParameter):
        SamplingParams(n=0)
