"""A worker that computes nothing, for measurements of the control plane."""

from __future__ import annotations

import time

from minipaged.config import ModelConfig
from minipaged.step import Draw, StepPlan, StepResult


class IdleWorker:
    """Answers every draw with token 0. `seconds` of this thread went into that, since it was last set to 0."""

    num_host_blocks = 0

    def __init__(self, config: ModelConfig, max_model_len: int, num_blocks: int) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.num_blocks = num_blocks
        self.seconds = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        begin = time.thread_time()
        result = StepResult(tuple((Draw(0, None, ()),) * len(entry.draws) for entry in plan.sampling))
        self.seconds += time.thread_time() - begin
        return result
