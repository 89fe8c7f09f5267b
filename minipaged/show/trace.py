"""The trace: a whole run on one page, time against physical block, each run of steps in its owner's colour.

    trace = Trace("my run")
    llm = LLM(on_step=trace)
    llm.generate(...)
    trace.save("out.html")             # one file, no network; open it in any browser

Ten thousand steps of two thousand blocks are twenty million moments, and nearly all are as the moment before. So only
changes are kept: for each block a flat list (step, owner, references, step, owner, references, …). The owner is a
sequence number, or FREE, CACHED or PINNED; of several that share a block, the lowest number.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from typing import Any

from minipaged.errors import InvalidParameter
from minipaged.show.frame import Frame, Tables, token_ids
from minipaged.show.words import explain
from minipaged.snapshot import Snapshot
from minipaged.step import StepPlan, StepResult

FREE, CACHED, PINNED = -1, -2, -3
MARKS = ("copy", "swap_out", "swap_in", "evict", "preempt", "hit")
SERIES = ("step", "milliseconds", "sequences", "tokens", "used", "filled", "cached", "waiting", "swapped")
DETAILED = 2  # a page of thousands of steps tells the rows of a larger batch together


class PoolChanges:
    """What changes in one pool: `changes[block]` is the flat list that the page draws."""

    def __init__(self, num_blocks: int) -> None:
        self.changes: list[list[int]] = [[] for _ in range(num_blocks)]
        self._owners = [FREE] * num_blocks
        self._ref_counts: Sequence[int] = (0,) * num_blocks

    def note(self, step: int, ref_counts: Sequence[int], tables: Tables, cached: Iterable[int] = ()) -> None:
        """The pool as it is in this step."""
        owners = [FREE if count == 0 else PINNED for count in ref_counts]
        for block in cached:
            owners[block] = CACHED
        for seq_id, table in sorted(tables.items(), reverse=True):
            for block, _ in table:
                owners[block] = seq_id
        if owners != self._owners or ref_counts != self._ref_counts:
            moments = zip(owners, ref_counts, self._owners, self._ref_counts, strict=True)
            for block, (owner, count, owner_before, count_before) in enumerate(moments):
                if owner != owner_before or count != count_before:
                    self.changes[block] += (step, owner, count)
        self._owners, self._ref_counts = owners, ref_counts


class Trace:
    """An `on_step` for one engine that keeps changes and words; `save` writes the page.

    `token_text` gives a token's text (`Tokenizer.token_text`) or None; tokens without a text are numbers.
    """

    def __init__(self, title: str = "", token_text: Callable[[int], str | None] | None = None) -> None:
        self.title = title
        self.token_text = token_text
        self._pools = {"device": PoolChanges(0), "host": PoolChanges(0)}
        self._block_size = 0
        self._requests: dict[int, str] = {}  # which request a sequence belongs to
        self._marks: dict[str, list[tuple]] = {kind: [] for kind in MARKS}
        self._series: dict[str, list[int]] = {name: [] for name in SERIES}
        self._words: list[str] = []
        self._begin = time.perf_counter()

    def __call__(self, plan: StepPlan, result: StepResult, snapshot: Snapshot) -> None:
        step = len(self._words)
        self._note_pools(step, snapshot)
        self._note_marks(step, plan, snapshot)
        self._note_series(plan, snapshot)
        for request_id, seq_ids in snapshot.groups.items():
            self._requests |= dict.fromkeys(seq_ids, request_id)
        frame = Frame(plan, result, snapshot)
        self._words.append("\n".join(explain(frame, self._spell(frame), DETAILED)))

    def data(self) -> dict[str, Any]:
        """What the page is drawn from."""
        return {
            "title": self.title,
            "blockSize": self._block_size,
            "pools": {name: pool.changes for name, pool in self._pools.items()},
            "requests": self._requests,
            "marks": self._marks,
            "series": self._series,
            "words": self._words,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self.data()))

    def _spell(self, frame: Frame) -> dict[int, str]:
        if self.token_text is None:
            return {}
        texts = {token_id: self.token_text(token_id) for token_id in token_ids(frame)}
        return {token_id: text for token_id, text in texts.items() if text is not None}

    def _note_pools(self, step: int, snapshot: Snapshot) -> None:
        if step == 0:
            self._block_size = snapshot.block_size
            self._pools["device"] = PoolChanges(len(snapshot.ref_counts))
            self._pools["host"] = PoolChanges(len(snapshot.host_ref_counts))
        device, host = self._pools["device"], self._pools["host"]
        expected = (len(device.changes), self._block_size)
        if (len(snapshot.ref_counts), snapshot.block_size) != expected:
            raise InvalidParameter("trace", self.title, "is of one engine; another one needs a Trace of its own")
        device.note(step, snapshot.ref_counts, snapshot.tables, snapshot.cached)
        host.note(step, snapshot.host_ref_counts, snapshot.host_tables)

    def _note_marks(self, step: int, plan: StepPlan, snapshot: Snapshot) -> None:
        for kind, pairs in (("copy", plan.copies), ("swap_out", plan.swap_out), ("swap_in", plan.swap_in)):
            self._marks[kind] += ((step, *pair) for pair in pairs)
        for event in snapshot.events:
            if event.kind in ("evict", "hit"):
                self._marks[event.kind] += ((step, block) for block in event.blocks)
        self._marks["preempt"] += ((step, request_id) for request_id in snapshot.preempted)

    def _note_series(self, plan: StepPlan, snapshot: Snapshot) -> None:
        now = (
            plan.step,
            round(1000 * (time.perf_counter() - self._begin)),
            len(plan.work),
            plan.num_tokens,
            snapshot.num_used_blocks,
            snapshot.num_filled,
            len(snapshot.cached),
            len(snapshot.waiting),
            len(snapshot.swapped),
        )
        for name, value in zip(SERIES, now, strict=True):
            self._series[name].append(value)


def page(data: dict[str, Any]) -> str:
    """The page around the data: style, scripts and data become part of the one file."""
    files = resources.files("minipaged.show") / "page"
    # In HTML, "</script>" inside the data would end it; to JSON, "\u003c" is the same character.
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    parts = {"style": "trace.css", "rows": "trace_rows.js", "draw": "trace_draw.js", "move": "trace_move.js"}
    html = (files / "trace.html").read_text("utf-8")
    for name, file in parts.items():
        html = html.replace(f"{{{{ {name} }}}}", (files / file).read_text("utf-8"))
    return html.replace("{{ data }}", text)  # last, since it may contain anything
