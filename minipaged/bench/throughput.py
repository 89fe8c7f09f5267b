"""Tokens per second over a batch of requests: eager, compiled and a peer measured in turn in the same run.

Machines are noisy and differ: what travels is the ratio. The peer is the continuous batching of transformers, whose API
takes one length for all requests: it gets the mean.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from functools import partial
from pathlib import Path

from minipaged.bench.report import Report
from minipaged.bench.roofs import gflops, weights_read
from minipaged.engine.llm import LLM
from minipaged.sampling_params import SamplingParams
from minipaged.snapshot import OnStep

Workload = list[dict]  # each with "prompt_token_ids" and "max_tokens"


def make_workload(count: int, vocab_size: int) -> Workload:
    """Random tokens; lengths log-normal, as those of real requests are: a mean of about 120 in and 100 out."""
    rng = random.Random(0)

    def length(mean: float, longest: int) -> int:
        return min(longest, max(4, round(rng.lognormvariate(mean, 0.7))))

    return [
        {
            "prompt_token_ids": rng.choices(range(1000, vocab_size), k=length(4.5, 700)),
            "max_tokens": length(4.4, 300),
        }
        for _ in range(count)
    ]


def read_workload(path: str) -> Workload:
    """A JSON file: {"requests": [{"prompt_token_ids": [...], "max_tokens": n}, ...]}."""
    return json.loads(Path(path).read_text())["requests"]


def load_workload(args, vocab_size: int) -> Workload:
    """The file that the user names, or random requests; the first `--requests` of them."""
    workload = read_workload(args.workload) if args.workload else make_workload(args.requests, vocab_size)
    return workload[: args.requests]


def run_ours(llm: LLM, workload: Workload) -> float:
    """Tokens per second, greedy, every request to exactly its length."""
    prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in workload]
    params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in workload]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - begin)


def run_transformers(model, workload: Workload) -> float:
    """Tokens per second of `generate_batch`."""
    from transformers import GenerationConfig

    mean = round(statistics.mean(request["max_tokens"] for request in workload))
    config = GenerationConfig(max_new_tokens=mean, do_sample=False, eos_token_id=-1, pad_token_id=0)
    begin = time.perf_counter()
    outputs = model.generate_batch(inputs=[r["prompt_token_ids"] for r in workload], generation_config=config)
    return sum(len(output.generated_tokens) for output in outputs.values()) / (time.perf_counter() - begin)


def measure(args, on_step: OnStep | None = None) -> list[Report]:
    """Each of ours and the peer in turn, `--repeats` times each, after a short warm-up of each."""
    llms = {
        name: LLM(
            args.model,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            enforce_eager=name == "eager",
            tensor_parallel_size=args.tensor_parallel_size,
            on_step=on_step,
        )
        for name in args.modes
    }
    worker = next(iter(llms.values())).llm_engine.worker
    workload = load_workload(args, worker.config.vocab_size)
    short = [{**workload[0], "max_tokens": 2}]
    runs = {f"minipaged, {name}": partial(run_ours, llm) for name, llm in llms.items()}
    if args.peer == "hf":
        from transformers import AutoModelForCausalLM

        peer = AutoModelForCausalLM.from_pretrained(worker.path, dtype=worker.dtype, attn_implementation="sdpa").eval()
        runs["transformers, continuous batching"] = partial(run_transformers, peer)
    for run in runs.values():
        run(short)
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            measured[name].append(run(workload))

    num_out = sum(request["max_tokens"] for request in workload)
    flops = 2 * weights_read(worker.config) * (num_out + sum(len(r["prompt_token_ids"]) for r in workload)) / 1e9
    compute = gflops(worker.dtype)
    medians = {name: statistics.median(speeds) for name, speeds in measured.items()}
    last = list(medians.values())[-1]
    report = Report(f"{len(workload)} requests, {num_out:,} tokens out; {next(iter(llms.values())).describe()}")
    for name, median in medians.items():
        report.add(
            who=name,
            tokens_per_s=median,
            all_runs=measured[name],
            times_the_last=median / last,
            of_the_roof=f"{flops * median / num_out / compute:.0%}",
        )
    report.notes.append(f"roof: {compute:,.0f} GFLOP/s in a product of two 2048 × 2048; the work: {flops:,.0f} GFLOP")
    return [report]
