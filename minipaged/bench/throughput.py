"""Tokens per second over a batch of requests, ours and a peer's measured in turn in the same run.

Machines are noisy and differ: what travels is the ratio. The peer is the continuous batching of transformers, whose API
takes one length for all requests: it gets the mean.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from minipaged.engine.llm import LLM
from minipaged.engine.llm_engine import OnStep
from minipaged.sampling_params import SamplingParams

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


def measure(args, on_step: OnStep | None = None) -> None:
    """Ours and the peer's in turn, `--repeats` times each, after a short warm-up of each."""
    llm = LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=args.max_model_len,
        tensor_parallel_size=args.tensor_parallel_size,
        on_step=on_step,
    )
    vocab_size = llm.llm_engine.worker.config.vocab_size
    workload = read_workload(args.workload) if args.workload else make_workload(args.requests, vocab_size)
    workload = workload[: args.requests]
    runs = {"minipaged": lambda: run_ours(llm, workload)}
    run_ours(llm, [{**workload[0], "max_tokens": 2}])
    if args.peer == "hf":
        from transformers import AutoModelForCausalLM

        worker = llm.llm_engine.worker
        peer = AutoModelForCausalLM.from_pretrained(worker.path, dtype=worker.dtype, attn_implementation="sdpa").eval()
        run_transformers(peer, [{**workload[0], "max_tokens": 2}])
        runs["transformers, continuous batching"] = lambda: run_transformers(peer, workload)
    measured: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.repeats):
        for name, run in runs.items():
            measured[name].append(run())
    medians = {name: statistics.median(speeds) for name, speeds in measured.items()}
    table = Table(title=f"{llm.describe()}: {len(workload)} requests", title_justify="left")
    for column in ("", "tokens/s (median)", "all runs", "minipaged is"):
        table.add_column(column)
    for name, median in medians.items():
        every = ", ".join(f"{speed:.1f}" for speed in measured[name])
        table.add_row(name, f"{median:.1f}", every, f"{medians['minipaged'] / median:.2f} ×")
    Console(width=160).print(table)
