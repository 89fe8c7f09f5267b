"""What paging is for: how many requests the same KV memory serves, and how much of it lies empty (paper, section 2.3).

Paged is a block size of 16. `block_size = max_model_len` is how systems before reserved: room for the longest answer
that could come, in one piece. The scheduler and block manager are real. In the worker's place stands one that answers
without computing, so this takes seconds.
"""

from __future__ import annotations

from minipaged.bench.idle_worker import IdleWorker
from minipaged.bench.report import Report
from minipaged.bench.workload import Workload, check_work, load_workload, num_tokens_out
from minipaged.config import ModelConfig
from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine_args import EngineArgs
from minipaged.sampling_params import SamplingParams
from minipaged.snapshot import Snapshot
from minipaged.step import StepPlan, StepResult
from minipaged.worker.kv_cache import bytes_per_block
from minipaged.worker.worker import Worker

POOL_TOKENS = 16 * 1024  # at least; eight times the longest request


class Watch:
    """Sums over the steps of a run: how many sequences ran, what they had been given, what they had filled of it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.steps = self.running = self.most_running = self.allocated = self.filled = 0

    def __call__(self, plan: StepPlan, result: StepResult, snapshot: Snapshot) -> None:
        self.steps += 1
        self.running += len(snapshot.running)
        self.most_running = max(self.most_running, len(snapshot.running))
        self.allocated += snapshot.num_used_blocks * self.block_size
        self.filled += snapshot.num_filled


def measure(args) -> list[Report]:
    """The same requests over the same number of bytes, paged and in one piece."""
    base = EngineArgs(model=args.model, dtype=args.dtype, max_model_len=args.max_model_len)
    worker = Worker(base)
    length = worker.max_model_len
    workload = load_workload(args, worker.config.vocab_size)
    per_token = bytes_per_block(worker.config, 1, worker.dtype)
    pool = -(-POOL_TOKENS // length) * length  # whole blocks, also of those that are as long as a request may be
    report = Report(f"{len(workload)} requests over {pool:,} slots of KV ({pool * per_token / 2**20:,.0f} MiB)")
    for name, block_size in (("paged", 16), ("in one piece", length)):
        watch = _run(workload, worker.config, length, block_size, pool // block_size)
        report.add(
            how=name,
            block_size=block_size,
            steps=watch.steps,
            most_running=watch.most_running,
            running=watch.running / watch.steps,
            allocated_MiB=watch.allocated / watch.steps * per_token / 2**20,
            filled_MiB=watch.filled / watch.steps * per_token / 2**20,
            wasted=f"{1 - watch.filled / watch.allocated:.1%}",
        )
    report.notes.append("running, allocated and filled are means over the steps")
    return [report]


def _run(workload: Workload, config: ModelConfig, max_model_len: int, block_size: int, num_blocks: int) -> Watch:
    args = EngineArgs(block_size=block_size, max_model_len=max_model_len, num_gpu_blocks_override=num_blocks)
    watch = Watch(block_size)
    engine = LLMEngine(args, IdleWorker(config, max_model_len, num_blocks), on_step=watch)
    for i, request in enumerate(workload):
        params = SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True)
        engine.add_request(str(i), {"prompt_token_ids": request["prompt_token_ids"]}, params)
    num_tokens = 0
    while engine.has_unfinished_requests():
        num_tokens += sum(len(output.outputs[0].token_ids) for output in engine.step() if output.finished)
    check_work("minipaged", num_tokens, num_tokens_out(workload))
    return watch
