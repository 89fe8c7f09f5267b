"""What sharing saves: blocks, when one prompt is answered several times; work, when many prompts begin alike."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from minipaged.bench.report import Report
from minipaged.bench.workload import plain_tokens
from minipaged.engine.llm import LLM
from minipaged.sampling_params import SamplingParams
from minipaged.show import each
from minipaged.snapshot import OnStep, Snapshot
from minipaged.step import StepPlan, StepResult


@dataclass
class Watch:
    """Counts over the steps of a call."""

    most_blocks: int = 0
    num_tokens: int = 0
    num_copies: int = 0

    def __call__(self, plan: StepPlan, result: StepResult, snapshot: Snapshot) -> None:
        self.most_blocks = max(self.most_blocks, snapshot.num_used_blocks)
        self.num_tokens += plan.num_tokens
        self.num_copies += len(plan.copies)


def measure(args, on_step: OnStep | None = None) -> list[Report]:
    """Parallel samples, then a common prefix."""
    rng = random.Random(0)
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        enable_prefix_caching=True,
        on_step=on_step,
    )
    tokens = plain_tokens(llm.llm_engine.worker.config.vocab_size)
    parallel = _parallel_sampling(llm, rng.choices(tokens, k=150))
    prefix = rng.choices(tokens, k=512)
    prompts = [{"prompt_token_ids": prefix + rng.choices(tokens, k=16)} for _ in range(32)]
    return [parallel, _common_prefix(llm, prompts)]


def _watched(llm: LLM, prompts: list, params: SamplingParams | list) -> tuple[Watch, float]:
    llm.reset_prefix_cache()
    watch, on_step = Watch(), llm.llm_engine.on_step
    llm.llm_engine.on_step = each(watch, on_step)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    llm.llm_engine.on_step = on_step
    return watch, time.perf_counter() - begin


def _parallel_sampling(llm: LLM, prompt: list[int]) -> Report:
    """n = 4 against four requests with other salts, which share nothing."""
    report = Report("four samples of a prompt of 150 tokens, 40 tokens each")
    common = {"max_tokens": 40, "ignore_eos": True}
    together, _ = _watched(llm, [{"prompt_token_ids": prompt}], SamplingParams(n=4, seed=0, **common))
    apart, _ = _watched(
        llm,
        [{"prompt_token_ids": prompt, "cache_salt": str(i)} for i in range(4)],
        [SamplingParams(seed=i, **common) for i in range(4)],
    )
    for name, watch in (("four requests", apart), ("one request, n=4", together)):
        report.add(
            how=name,
            KV_blocks_at_most=watch.most_blocks,
            tokens_computed=watch.num_tokens,
            block_copies=watch.num_copies,
        )
    report.notes.append(f"saved: {1 - together.most_blocks / apart.most_blocks:.0%} of the blocks")
    return report


def _common_prefix(llm: LLM, prompts: list[dict]) -> Report:
    """The prefix computed once, in one step, against each request with a salt of its own."""
    report = Report("32 requests, 512 tokens in common and 16 of their own, 8 tokens out")
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    salted = [{**prompt, "cache_salt": str(i)} for i, prompt in enumerate(prompts)]
    apart, slow = _watched(llm, salted, params)
    shared, quick = _watched(llm, prompts, params)
    for name, watch, seconds in (("nothing shared", apart, slow), ("prefix cache", shared, quick)):
        report.add(how=name, seconds=seconds, tokens_computed=watch.num_tokens, KV_blocks_at_most=watch.most_blocks)
    report.notes.append(f"{slow / quick:.1f} times as fast")
    return report
