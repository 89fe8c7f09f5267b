"""The trace: only changes are kept, the page is one file, and Chromium draws it without a complaint."""

from __future__ import annotations

import html
import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams
from minipaged.show import Recorder, Trace
from minipaged.show.frame import holders
from minipaged.show.trace import CACHED, FREE, PINNED, SERIES, page
from tests.unit.show.pictures import frame_by_hand, recorded

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt install chromium)")


def traced(recorder: Recorder, title: str = "a run") -> Trace:
    trace = Trace(title)
    for frame in recorder.frames:
        trace(*frame)
    return trace


def two_samples_and_a_later_request() -> Recorder:
    def add(engine):
        engine.add_request(
            "samples", {"prompt_token_ids": [1, 2, 3, 4, 5, 6, 7]}, SamplingParams(n=2, seed=0, max_tokens=6)
        )
        engine.add_request("later", {"prompt_token_ids": [9] * 10}, SamplingParams(max_tokens=8, ignore_eos=True))

    return recorded(add, num_blocks=7, enable_prefix_caching=True)


def test_of_each_block_only_the_changes_are_kept():
    trace = Trace()
    frames = [
        frame_by_hand({0: [(7, 4), (1, 2)]}),
        frame_by_hand({0: [(7, 4), (1, 3)]}),
        frame_by_hand({0: [(7, 4), (1, 3)], 1: [(7, 4)]}),
        frame_by_hand({1: [(7, 4)]}, cached=frozenset({1})),
        frame_by_hand({}, ref_counts=(0,) * 7 + (1, 0, 0)),
    ]
    for frame in frames:
        trace(*frame)
    changes = trace.data()["pools"]["device"]
    assert changes[7] == [0, 0, 1, 2, 0, 2, 3, 1, 1, 4, PINNED, 1]
    assert changes[1] == [0, 0, 1, 3, CACHED, 0, 4, FREE, 0]
    assert sum(map(len, changes)) == len(changes[7]) + len(changes[1])


def test_the_host_pool_and_swaps_are_kept_too():
    trace = Trace()
    trace(*frame_by_hand({1: [(4, 4)]}, num_host_blocks=3))
    out = {"swap_out": ((4, 2),), "preempted": ("b",), "groups": {"b": (1,)}}
    trace(*frame_by_hand({}, host_tables={1: [(2, 4)]}, num_host_blocks=3, **out))
    trace(*frame_by_hand({1: [(5, 4)]}, num_host_blocks=3, swap_in=((2, 5),)))
    data = trace.data()
    assert data["pools"]["host"] == [[], [], [1, 1, 1, 2, FREE, 0]]
    assert (data["marks"]["swap_out"], data["marks"]["swap_in"]) == ([(1, 4, 2)], [(2, 2, 5)])
    assert data["marks"]["preempt"] == [(1, "b")]


def test_a_trace_is_of_one_engine():
    trace = Trace("mine")
    trace(*frame_by_hand({}))
    with pytest.raises(InvalidParameter, match="trace = 'mine': is of one engine"):
        trace(*recorded(lambda engine: None, num_blocks=3, free_order=()).frames[0])


def test_tokens_are_spelled_where_their_texts_are_known(tmp_path):
    recorder = recorded(
        lambda engine: engine.add_request("one", {"prompt_token_ids": [5]}, SamplingParams(max_tokens=2))
    )
    trace = Trace(token_text=lambda token_id: f"<{token_id}>")
    for frame in recorder.frames:
        trace(*frame)
    assert "A samples “<" in trace.data()["words"][0]


def test_the_page_is_one_file_that_asks_for_nothing(tmp_path):
    trace = traced(two_samples_and_a_later_request(), "</script><!-- {{ data }} {{ draw }}")
    trace.save(tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text()
    assert not re.search(r"https?://|src=|@import|url\(", text)
    assert text.count("</script>") == 2 and "<!--" not in text.split("<body>")[1]
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(data)["title"] == "</script><!-- {{ data }} {{ draw }}"
    assert json.loads(data)["words"] == trace.data()["words"]


# ---------------------------------------------------------------- in a browser


def open_in_chromium(text: str, directory: Path, fragment: str = "", then: str = "") -> tuple[dict, str]:
    """The data attributes of the body and the whole DOM after the page has run, and `then` after it.

    Fails where the page has written to the console: it writes only what went wrong.
    """
    file = directory / "page.html"
    file.write_text(text.replace("</body>", f"<script>{then}</script></body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    command += [f"--user-data-dir={directory / 'profile'}", "--virtual-time-budget=5000", f"{file.as_uri()}{fragment}"]
    environment = os.environ | {"HOME": str(directory)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert "CONSOLE" not in done.stderr, done.stderr
    [body] = re.findall(r"<body([^>]*)>", done.stdout)
    return dict(re.findall(r'data-([a-z-]+)="([^"]*)"', body)), html.unescape(done.stdout)


@in_chromium
def test_chromium_counts_what_the_run_did_and_shows_the_step_that_the_address_names(tmp_path):
    recorder = two_samples_and_a_later_request()
    trace = traced(recorder)
    data, dom = open_in_chromium(page(trace.data()), tmp_path, "#step=2")
    frames = recorder.frames
    kinds = [event.kind for frame in frames for event in frame.snapshot.events]
    assert data["ready"] == "yes"
    assert int(data["steps"]) == len(frames)
    assert (data["blocks"], data["host-blocks"]) == ("7", "0")
    assert int(data["copies"]) == sum(len(frame.plan.copies) for frame in frames) == 1
    assert int(data["preemptions"]) == sum(len(frame.snapshot.preempted) for frame in frames) >= 1
    assert int(data["evictions"]) == kinds.count("evict")
    assert int(data["sequences"]) == 3
    changes = trace.data()["pools"]["device"]
    assert int(data["runs"]) == sum(owner != FREE for block in changes for owner in block[1::3])
    assert data["step"] == "2"
    words = re.search(r'<ol id="words">(.*?)</ol>', dom, re.DOTALL).group(1)
    assert re.findall(r"<li>(.*?)</li>", words) == trace.data()["words"][2].split("\n")


@in_chromium
def test_the_page_knows_of_every_block_in_every_step_who_held_it(tmp_path):
    recorder = two_samples_and_a_later_request()
    ask = """
        const owners = [...words.keys()].map((step) => places.map((place) => momentAt(place.changes, step).owner));
        document.body.dataset.owners = JSON.stringify(owners);
    """
    data, _ = open_in_chromium(page(traced(recorder).data()), tmp_path, then=ask)
    held_by = [holders(frame.snapshot.tables) for frame in recorder.frames]
    expected = [
        [held[block][0] if block in held else CACHED if block in frame.snapshot.cached else FREE for block in range(7)]
        for frame, held in zip(recorder.frames, held_by, strict=True)
    ]
    assert json.loads(data["owners"]) == expected


@in_chromium
def test_a_step_is_chosen_by_keys_and_by_clicks(tmp_path):
    trace = traced(two_samples_and_a_later_request())
    keys = """
        const stage = document.getElementById("canvases");
        const press = (key) => stage.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        ["End", "Home", "ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown", "+", "]", "-", "["].forEach(press);
        document.body.dataset.afterKeys = document.body.dataset.step;
        document.body.dataset.block = document.getElementById("block").textContent;
        press("Home"); press("n");
        document.body.dataset.mark = document.body.dataset.step;
        const box = stage.getBoundingClientRect();
        const at = { clientX: box.left + stage.clientWidth - 12, clientY: box.top + 60, bubbles: true, pointerId: 1 };
        stage.setPointerCapture = () => {};
        stage.dispatchEvent(new PointerEvent("pointermove", at));
        document.body.dataset.tip = document.getElementById("tip").textContent.split("\\n")[0];
        document.getElementById("whole").click();
        stage.dispatchEvent(new PointerEvent("pointerdown", at));
        stage.dispatchEvent(new PointerEvent("pointerup", at));
    """
    data, _ = open_in_chromium(page(trace.data()), tmp_path, then=keys)
    last = len(trace.data()["words"]) - 1
    first_mark = min(mark[0] for kind in ("copy", "evict", "preempt") for mark in trace.data()["marks"][kind])
    assert data["after-keys"] == "2"
    assert data["block"].startswith("block 1 is held by")
    assert int(data["mark"]) == first_mark
    assert data["tip"].startswith("step ")
    assert int(data["step"]) == last


@in_chromium
def test_ten_thousand_steps_of_two_thousand_blocks_are_drawn(tmp_path):
    rng, num_steps, num_blocks = random.Random(0), 10_000, 2_000
    changes: list[list[int]] = [[] for _ in range(num_blocks)]
    for block in changes:
        step = rng.randrange(300)
        while step < num_steps:
            block += (step, rng.randrange(1500), rng.choice((1, 1, 1, 2)))
            step += rng.randrange(100, 600)
            block += (step, FREE, 0)
            step += rng.randrange(1, 50)
    data = {
        "title": "long",
        "blockSize": 16,
        "pools": {"device": changes, "host": []},
        "requests": {number: f"request-{number}" for number in range(1500)},
        "marks": {kind: [] for kind in ("swap_out", "swap_in", "preempt", "hit")}
        | {
            "copy": [(step, 1, 2) for step in range(0, num_steps, 3)],
            "evict": [(step, 5) for step in range(num_steps)],
        },
        "series": {name: list(range(num_steps)) for name in SERIES},
        "words": [f"decodes 64 sequences in step {step}" for step in range(num_steps)],
    }
    text = page(data)
    assert len(text) < 10e6
    found, dom = open_in_chromium(text, tmp_path, "#step=9000")
    assert (found["steps"], found["blocks"], found["ready"]) == ("10000", "2000", "yes")
    assert int(found["runs"]) == sum(owner != FREE for block in changes for owner in block[1::3])
    assert "<li>decodes 64 sequences in step 9000</li>" in dom


@in_chromium
def test_a_run_without_a_step_is_an_empty_page_and_no_error(tmp_path):
    trace = Trace("nothing")
    found, _ = open_in_chromium(page(trace.data()), tmp_path)
    assert (found["steps"], found["ready"]) == ("0", "yes")
