"""`LLM`: vLLM's offline face. A list of prompts goes in, a list of outputs comes out, in the same order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

from minipaged.beam_search_params import BeamSearchParams
from minipaged.blocks.eviction import EvictionPolicy
from minipaged.engine.beam_request import beam_search_output
from minipaged.engine.interrupt import deferred_interrupt
from minipaged.engine.llm_engine import LLMEngine
from minipaged.engine.pinned_prefix import PinnedPrefix
from minipaged.engine.progress import GenerationProgress
from minipaged.engine.prompts import Prompt, as_prompt_list, params_for_each
from minipaged.engine_args import EngineArgs
from minipaged.errors import InvalidInput, InvalidParameter, InvalidPrompt
from minipaged.metrics import EngineMetrics
from minipaged.outputs import BeamSearchOutput, RequestOutput
from minipaged.sampling_params import SamplingParams
from minipaged.scheduling.preemption import PreemptionPolicy
from minipaged.snapshot import OnStep
from minipaged.text.chat_template import encode_chat
from minipaged.text.tokenizer import load_tokenizer
from minipaged.worker.launch import closing_on_error, make_worker


class LLM:
    """A model, ready to generate. Arguments are those of EngineArgs; `on_step` is called in each step, `free_order` is
    the order in which blocks are handed out first (both: LLMEngine), and the two policies replace who is preempted and
    what is evicted (scheduling/preemption.py, blocks/eviction.py).

    from minipaged import LLM, SamplingParams
    llm = LLM()
    [output] = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8))
    print(output.outputs[0].text)
    """

    def __init__(
        self,
        model: Any = None,
        *,
        on_step: OnStep | None = None,
        policy: PreemptionPolicy | None = None,
        eviction_policy: EvictionPolicy | None = None,
        free_order: Iterable[int] | None = None,
        **engine_args: Any,
    ) -> None:
        args = EngineArgs(model=model, **engine_args)
        worker = make_worker(args)
        with closing_on_error(worker):
            tokenizer = None if args.skip_tokenizer_init else load_tokenizer(worker.tokenizer_source)
            worker.load(args.scheduler_config(worker.max_model_len).max_num_batched_tokens)
            self.llm_engine = LLMEngine(args, worker, tokenizer, policy, on_step, free_order, eviction_policy)
        self._numbers = itertools.count()
        self._lock = threading.RLock()  # calls from several threads take turns: a step belongs to one of them

    def close(self) -> None:
        """End the other ranks, where there are any: no step follows then. So does the end of a with block, or `del`."""
        self.llm_engine.worker.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def describe(self) -> str:
        """The model, where it runs, and the pool, in one line."""
        worker = self.llm_engine.worker
        dtype = str(worker.dtype).removeprefix("torch.")
        mode = "" if worker.args.enforce_eager else "compiled, "
        return (
            f"{worker.path.name} on {worker.device} in {dtype}, {mode}{worker.backend.name} attention, "
            f"{worker.num_blocks} KV blocks of {worker.cache.block_size} tokens "
            f"({worker.cache.num_bytes / 2**20:,.0f} MiB)"
            + (f" on each of {worker.ranks.size} ranks" if worker.ranks.size > 1 else "")
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; one SamplingParams for all, or one each.

        `use_tqdm` (vLLM's name) allows a progress bar on stderr, which shows on a terminal and only when the work takes
        long. Ctrl-C ends this call's requests between two steps, then raises.
        """
        return self._generate(prompts, sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """The `beam_width` best continuations of each prompt, by transformers' rules (decoding/beam_search.py)."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidParameter("params", params, "must be BeamSearchParams")
        outputs = self._generate(prompts, params, use_tqdm)
        return [beam_search_output(output, self.llm_engine.tokenizer) for output in outputs]

    def _generate(self, prompts: Any, params: Any, show_progress: bool) -> list[RequestOutput]:
        """Sampling or beam search. Every prompt is checked before any is queued."""
        listed = as_prompt_list(prompts)
        params = params_for_each(params, len(listed))
        for i, (prompt, wishes) in enumerate(zip(listed, params, strict=True)):
            try:
                self.llm_engine.validate(prompt, wishes)
            except InvalidInput as error:
                if len(listed) > 1:
                    error.allowed += f" (request {i} of {len(listed)})"
                raise
        with self._lock:
            return self._run(listed, params, show_progress)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of {"role", "content"} messages, or a list of conversations."""
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise InvalidParameter("skip_tokenizer_init", True, "chat needs a tokenizer")
        if not isinstance(messages, (list, tuple)) or not messages:
            raise InvalidPrompt("messages", messages, "must be a conversation or a list of them")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        prompts = [{"prompt_token_ids": encode_chat(tokenizer, conversation)} for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def max_blocks_needed(self, prompt: Prompt, params: SamplingParams | BeamSearchParams | None = None) -> int:
        """The most KV blocks that a request can hold at one time: every sample or beam at its full length, the prompt's
        full blocks shared. A pool of that size runs it to its end; what does not fit ends early, with "length".
        """
        return self.llm_engine.max_blocks_needed(prompt, SamplingParams() if params is None else params)

    def get_metrics(self) -> EngineMetrics:
        """Queues and pools at this moment, and what was counted until now (metrics.py)."""
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; requests that run keep their blocks. False where there is no prefix cache.

        Pinned ones are forgotten too: their handles hold blocks that nobody finds, until they are released.
        """
        prefixes = self.llm_engine.prefixes
        if prefixes is not None:
            with self._lock:
                prefixes.reset()
        return prefixes is not None

    def pin_prefix(self, prompt: Prompt) -> PinnedPrefix:
        """Compute the prompt once and keep its full blocks cached until the handle is released (paper, section 4.4).

        Prompts that begin with it then find it in the cache, whatever else comes and goes. Needs enable_prefix_caching.
        Tokens behind the last full block are not kept, so a prompt shorter than a block pins nothing.
        """
        prefixes = self.llm_engine.prefixes
        if prefixes is None:
            raise InvalidParameter("enable_prefix_caching", False, "pin_prefix needs True")
        with self._lock:  # nobody evicts it between the two
            [output] = self.generate([prompt], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
            if output.error is not None:
                raise output.error
            if not output.outputs[0].token_ids:  # ended with "length" before it was computed
                raise InvalidPrompt("prompt", prompt, "does not fit into the KV blocks that other pins leave")
            salt = prompt.get("cache_salt", "") if isinstance(prompt, dict) else ""
            return PinnedPrefix(prefixes, prefixes.pin(output.prompt_token_ids, salt), self._lock)

    def _run(self, prompts: list[Any], params: list[Any], show_progress: bool) -> list[RequestOutput]:
        """Add the requests, and step until all have ended. Whatever goes wrong, none of them stays behind.

        Requests that somebody else has added to the engine go on meanwhile; whoever steps next is told of their ends.
        """
        engine, names = self.llm_engine, [f"generate-{next(self._numbers)}" for _ in prompts]
        done = dict.fromkeys(names)
        others: list[RequestOutput] = []
        try:
            progress = GenerationProgress(len(names), show_progress)
            with deferred_interrupt(engine.interruptible) as interrupt, progress:
                for name, prompt, wishes in zip(names, prompts, params, strict=True):
                    engine.add_request(name, prompt, wishes)
                    interrupt.check()
                while any(output is None for output in done.values()):
                    outputs = engine.step()
                    for output in outputs:
                        if output.finished and output.request_id in done:
                            done[output.request_id] = output
                        elif output.finished:
                            others.append(output)
                    progress.update(outputs)
                    interrupt.check()
        finally:
            engine.abort_request(names, report=False)
            engine.report_again(others)
        return list(done.values())
