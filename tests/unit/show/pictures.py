"""What the tests of pictures share: text as a terminal would show it, frames by hand, and frames of a shadow engine."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType

from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.show import Frame, Recorder, make_snapshot
from minipaged.step import StepPlan, StepResult
from tests.shadow_worker import ShadowWorker


def text_of(picture: RenderableType, width: int = 80) -> str:
    """Without colour, trailing blanks cut."""
    console = Console(file=io.StringIO(), width=width, no_color=True)
    console.print(picture)
    return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())


def frame_by_hand(tables: dict, work: tuple = (), copies: tuple = (), **others: Any) -> Frame:
    """Block size 4, ten blocks; `others` are those of make_snapshot."""
    plan = StepPlan(0, work, (), copies=copies, swap_out=others.pop("swap_out", ()), swap_in=others.pop("swap_in", ()))
    return Frame(plan, StepResult(()), make_snapshot(4, 10, tables, **others))


def recorded(
    add: Callable[[LLMEngine], None], num_blocks: int = 12, free_order: tuple = (7, 1, 3), **args: Any
) -> Recorder:
    """All steps of the requests that `add` adds, and one more when everything is free again."""
    recorder = Recorder()
    free_order = [block for block in free_order if block < num_blocks]
    order = [*free_order, *(block for block in range(num_blocks) if block not in free_order)]
    args = EngineArgs(block_size=4, **args)
    worker = ShadowWorker(num_blocks, args.block_size)
    engine = LLMEngine(args, worker, on_step=recorder, free_order=order)
    add(engine)
    while engine.has_unfinished_requests():
        engine.step()
    engine.step()
    return recorder
