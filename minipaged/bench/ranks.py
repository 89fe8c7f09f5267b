"""What crosses between ranks in a step: the plan's bytes, and the collectives (paper, section 4.6)."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from dataclasses import dataclass, field

from minipaged.bench.report import Report
from minipaged.engine.llm import LLM
from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams
from minipaged.snapshot import Snapshot
from minipaged.step import StepPlan, StepResult
from minipaged.worker.plan_message import PlanWriter
from minipaged.worker.results import logit_rows

NUM_RANKS = 3  # of the default model, whose 3 KV heads they divide
NUM_TOKENS = 40
COLLECTIVES = ("broadcast", "all_reduce", "gather")


@dataclass
class Crossing:
    """One step's traffic."""

    plan: StepPlan
    traffic: Counter[str]


@dataclass
class Watch:
    """Notes what each step has sent."""

    traffic: Counter[str]  # the ranks' own, which grows
    steps: list[Crossing] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = self.traffic.copy()

    def __call__(self, plan: StepPlan, result: StepResult, snapshot: Snapshot) -> None:
        self.steps.append(Crossing(plan, self.traffic - self.before))
        self.before = self.traffic.copy()


def measure(args) -> list[Report]:
    """What a generation over several ranks sends, step by step of each kind; and what each rank holds."""
    size = NUM_RANKS if args.tensor_parallel_size is None else args.tensor_parallel_size
    if size == 1:
        raise InvalidParameter("tensor_parallel_size", size, "at least 2: one rank alone sends nothing")
    with LLM(args.model, dtype=args.dtype, max_model_len=args.max_model_len, tensor_parallel_size=size) as llm:
        worker = llm.llm_engine.worker
        rng = random.Random(0)
        tokens = range(worker.config.vocab_size)
        prompts = [{"prompt_token_ids": rng.choices(tokens, k=rng.randint(20, 300))} for _ in range(args.requests)]
        watch = llm.llm_engine.on_step = Watch(worker.ranks.traffic)
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False)
        return [_traffic(watch.steps, len(prompts), worker.config.num_layers), _held(llm)]


def _traffic(steps: list[Crossing], num_requests: int, num_layers: int) -> Report:
    report = Report(f"{num_requests} requests, {NUM_TOKENS} tokens each: a step's traffic (means)")
    for kind, chosen in _by_kind(steps).items():
        plans = [step.plan for step in chosen]
        columns = {
            "rows": [len(plan.work) for plan in plans],
            "tokens": [plan.num_tokens for plan in plans],
            "plan_bytes": [step.traffic["plan bytes"] for step in chosen],
            "without_memory": [len(PlanWriter().write(plan, logit_rows(plan))) for plan in plans],
            "pickled": [len(pickle.dumps(plan)) for plan in plans],
            **{name: [step.traffic[name] for step in chosen] for name in COLLECTIVES},
        }
        means = {name: round(sum(numbers) / len(chosen)) for name, numbers in columns.items()}
        report.add(step=kind, steps=len(chosen), **means)
    report.notes += [
        "Without memory: all block tables, in every step. Pickled: the plan with its sampling, as Python would.",
        f"{num_layers} layers sum hidden states 1 + 2 × {num_layers} = {1 + 2 * num_layers} times: once for the",
        "embedding, and in each layer for attention and MLP. One gather brings the logits to rank 0, which draws.",
        "One broadcast says how long the plan is, another one is the plan.",
    ]
    return report


def _by_kind(steps: list[Crossing]) -> dict[str, list[Crossing]]:
    """Steps that feed prompts; decodes whose tables are those of the step before; decodes that take a block."""
    kinds: dict[str, list[Crossing]] = {"prefill": [], "decode": [], "decode, new blocks": []}
    known: dict[int, int] = {}
    for step in steps:
        work = step.plan.work
        is_prefill = any(len(row.token_ids) > 1 for row in work)
        is_known = all(known.get(row.seq_id) == row.table_version for row in work)
        kinds["prefill" if is_prefill else "decode" if is_known else "decode, new blocks"].append(step)
        known = {row.seq_id: row.table_version for row in work}
    return {kind: chosen for kind, chosen in kinds.items() if chosen}


def _held(llm: LLM) -> Report:
    report = Report(f"what each rank holds, in MiB: {llm.describe()}")
    for rank, held in enumerate(llm.llm_engine.worker.held_bytes):
        report.add(rank=rank, weights=held.weights / 2**20, KV_blocks=held.kv / 2**20)
    return report
