"""Who is measured: ours and its peers, each no more than a function from a workload to the seconds that it takes.

    eager, compiled    an `LLM` in this process
    hf                 transformers in this process: continuous batching, or `generate` for a request alone
    /path/to/python    vLLM in an environment of its own, a process for each of eager and compiled (vllm_process.py)

All are loaded before the first is measured, and then run by turns: machines are noisy, and what travels is the ratio.
Everybody decodes greedily, and each request ends at exactly its `max_tokens`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from minipaged.bench.vllm_peer import vllm_peer
from minipaged.bench.workload import Workload, check_work, num_tokens_out
from minipaged.engine.llm import LLM
from minipaged.loading.progress import progress_line
from minipaged.sampling_params import SamplingParams
from minipaged.snapshot import OnStep
from minipaged.worker.worker import Worker

Run = Callable[[Workload], float]  # seconds
MODES = ("eager", "compiled")
PAGE_SIZE = 256  # slots of a block of transformers' cache, its own default


class Contestants:
    """Our engines, and all that run by their names, ours first."""

    def __init__(self, llms: dict[str, LLM], runs: dict[str, Run]) -> None:
        self.llms = llms
        self.runs = runs

    @property
    def worker(self) -> Worker:
        return next(iter(self.llms.values())).llm_engine.worker

    def describe(self) -> str:
        """What all of them have in common; their attention is not."""
        return f"{self.worker.path.name} on {self.worker.device}, {self.worker.dtype}"

    def by_turns(self, scenes: Sequence[Workload], repeats: int) -> dict[str, list[list[float]]]:
        """Seconds `[scene][repeat]` of each contestant, after a short warm-up."""
        seconds = {name: [[] for _ in scenes] for name in self.runs}
        for run in self.runs.values():
            run([{**request, "max_tokens": min(2, request["max_tokens"])} for request in scenes[0][:4]])
        for repeat in range(repeats):
            for name, run in self.runs.items():
                with progress_line(f"{name}: run {repeat + 1} of {repeats}"):
                    for scene, times in zip(scenes, seconds[name], strict=True):
                        times.append(run(scene))
        return seconds


@contextmanager
def contestants(args, dtype: str, on_step: OnStep | None = None) -> Iterator[Contestants]:
    """Load whom the user asks for: `--modes` of ours, and the peers, each in the modes that it has."""
    with ExitStack() as stack:
        llms = {
            mode: LLM(
                args.model,
                dtype=dtype,
                max_model_len=args.max_model_len,
                enforce_eager=mode == "eager",
                tensor_parallel_size=args.tensor_parallel_size,
                on_step=on_step,
            )
            for mode in modes_of(args)
        }
        for llm in llms.values():
            stack.callback(llm.close)
        found = Contestants(llms, {f"minipaged, {mode}": partial(run_ours, llm) for mode, llm in llms.items()})
        for peer in dict.fromkeys(args.peer):
            for name, run in _load_peer(peer, found.worker, args, stack):
                found.runs[name if name not in found.runs else f"{peer}: {name}"] = run
        yield found


def modes_of(args) -> list[str]:
    """What the user asks for, once each; else what there is: over several ranks nothing is compiled."""
    both = MODES if (args.tensor_parallel_size or 1) == 1 else MODES[:1]
    return list(dict.fromkeys(args.modes or both))


def _load_peer(peer: str, worker: Worker, args, stack: ExitStack) -> Iterator[tuple[str, Run]]:
    if peer == "hf":
        yield "transformers", TransformersPeer(worker).run
        return
    for mode in modes_of(args):
        with progress_line(f"{peer}: vLLM, {mode}, is being loaded (minutes the first time)"):
            vllm = stack.enter_context(vllm_peer(peer, worker.path, worker.dtype, mode, args.max_model_len))
        yield f"vLLM {vllm.version}, {mode}", vllm.run


def run_ours(llm: LLM, workload: Workload) -> float:
    """Seconds of `LLM.generate`."""
    prompts = [{"prompt_token_ids": request["prompt_token_ids"]} for request in workload]
    params = [SamplingParams(temperature=0, max_tokens=r["max_tokens"], ignore_eos=True) for r in workload]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    check_work("minipaged", sum(len(output.outputs[0].token_ids) for output in outputs), num_tokens_out(workload))
    return seconds


class TransformersPeer:
    """Its continuous batching takes one length for all requests, so each gets the mean: as many tokens together.

    Its cache gets room for all of them at once, and its steps as many tokens as ours: left to itself it would take most
    of the machine's memory. Making that cache is a part of every call, and so of its time (some seconds).
    """

    def __init__(self, worker: Worker) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(worker.path, dtype=worker.dtype, attn_implementation="sdpa")
        self.model = model.eval()
        self.max_batch_tokens = worker.args.scheduler_config(worker.max_model_len).max_num_batched_tokens

    def run(self, workload: Workload) -> float:
        """Seconds. One request alone goes to `generate`, which is its quicker way for that."""
        import torch
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig

        mean = round(num_tokens_out(workload) / len(workload))
        config = GenerationConfig(max_new_tokens=mean, do_sample=False, eos_token_id=-1, pad_token_id=0)
        prompts = [request["prompt_token_ids"] for request in workload]
        begin = time.perf_counter()
        if len(prompts) == 1:
            self.model.generate(torch.tensor(prompts), generation_config=config)
        else:
            pages = sum(-(-(len(prompt) + mean) // PAGE_SIZE) for prompt in prompts)
            batching = ContinuousBatchingConfig(
                page_size=PAGE_SIZE, num_blocks=pages, max_batch_tokens=self.max_batch_tokens
            )
            outputs = self.model.generate_batch(prompts, config, batching).values()
            num_tokens = sum(len(output.generated_tokens) for output in outputs)
            check_work("transformers", num_tokens, mean * len(workload))
        return time.perf_counter() - begin


def median_speed(workload: Workload, seconds: list[float]) -> float:
    """Tokens out per second, the median of some runs."""
    return num_tokens_out(workload) / statistics.median(seconds)
