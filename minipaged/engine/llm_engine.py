"""The engine: plan, apply, update. Requests come at any time, and each step brings some of them forward.

add_request ──▶ waiting ──▶ ┌────────────── step() ──────────────┐ ──▶ outputs
                            │ plan    scheduler: who, and where  │
                            │ apply   worker:    compute         │
                            │ update  tokens, text, ends         │
                            └────────────────────────────────────┘
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from minipaged.beam_search_params import BeamSearchParams
from minipaged.blocks.eviction import EvictionPolicy, check_eviction_policy
from minipaged.blocks.manager import BlockManager
from minipaged.blocks.prefix_cache import PrefixCache
from minipaged.blocks.prefix_sharing import PrefixSharing
from minipaged.config import ModelConfig
from minipaged.engine.beam_request import BeamRequest
from minipaged.engine.intake import Intake
from minipaged.engine.interrupt import Interruptible
from minipaged.engine.metering import Meter
from minipaged.engine.prompts import RequestLimits
from minipaged.engine.reports import Reports
from minipaged.engine.request import Request, SamplingRequest
from minipaged.engine_args import EngineArgs
from minipaged.errors import EngineDead, InvalidParameter
from minipaged.metrics import EngineMetrics
from minipaged.outputs import RequestOutput
from minipaged.sampling_params import SamplingParams
from minipaged.scheduling.group import SequenceGroup
from minipaged.scheduling.preemption import PreemptionPolicy, check_policy
from minipaged.scheduling.scheduler import Schedule, Scheduler
from minipaged.scheduling.sequence import Sequence
from minipaged.scheduling.viewing import take_snapshot
from minipaged.snapshot import OnStep, Snapshot
from minipaged.step import BestCandidates, Draw, ScorePrompt, StepPlan, StepResult, TokenLogprob
from minipaged.text.tokenizer import Tokenizer

logger = logging.getLogger("minipaged")


class PlanWorker(Protocol):
    """What the engine needs of whoever applies its plans: a real model, or a test's stand-in."""

    config: ModelConfig
    max_model_len: int
    num_blocks: int
    num_host_blocks: int

    def execute(self, plan: StepPlan) -> StepResult: ...


class LLMEngine:
    """Serves requests, step by step, over one worker.

    on_step(plan, result, snapshot) is called in each step, after the plan was applied and before anything is counted.
    Should it raise, nothing is lost: the next step computes the same tokens again. `free_order` is the order in which
    the pool's blocks are handed out first (None: by number).
    """

    def __init__(
        self,
        args: EngineArgs,
        worker: PlanWorker,
        tokenizer: Tokenizer | None = None,
        policy: PreemptionPolicy | None = None,
        on_step: OnStep | None = None,
        free_order: Iterable[int] | None = None,
        eviction_policy: EvictionPolicy | None = None,
    ) -> None:
        self.worker = worker
        self.tokenizer = tokenizer
        self.on_step = on_step
        cache = PrefixCache(args.block_size) if args.enable_prefix_caching else None
        check_policy(policy)
        check_eviction_policy(eviction_policy, args.enable_prefix_caching)
        if on_step is not None and not callable(on_step):
            raise InvalidParameter("on_step", on_step, "must be a function of (plan, result, snapshot)")
        self.blocks = BlockManager(worker.num_blocks, args.block_size, free_order, cache, eviction_policy)
        self.prefixes = None if cache is None else PrefixSharing(self.blocks, cache)
        host = BlockManager(worker.num_host_blocks, args.block_size, pool="host")
        config = args.scheduler_config(worker.max_model_len)
        self.scheduler = Scheduler(config, self.blocks, policy, self.prefixes, host)
        limits = RequestLimits(
            worker.config.vocab_size, worker.max_model_len, args.max_num_seqs, worker.num_blocks, args.block_size
        )
        self._meter = Meter(self.scheduler)
        self._intake = Intake(tokenizer, limits, worker.config.eos_token_ids, args.seed)
        self._requests: dict[str, Request] = {}  # the unfinished ones
        self._reports = Reports()
        self.interruptible = Interruptible()  # while the worker or on_step runs
        self._is_stepping = False
        self._numbers = itertools.count()
        self._seq_ids = itertools.count()

    # ---------------------------------------------------------------- requests come and go

    def validate(self, prompt: Any, params: SamplingParams | BeamSearchParams) -> None:
        """Raises what add_request would raise for this prompt and these parameters; adds nothing."""
        self._intake.make_request("", 0, 0, prompt, params)

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams | BeamSearchParams) -> None:
        """Queue a request. What can never run is refused here, with the reason."""
        if not isinstance(request_id, str) or request_id in self._requests:
            raise InvalidParameter("request_id", request_id, "must be a string that no unfinished request has")
        request = self._intake.make_request(request_id, next(self._numbers), next(self._seq_ids), prompt, params)
        if not self._requests:
            self._meter.begin_interval()
        self._requests[request_id] = request
        self.scheduler.add(request.group)

    def abort_request(self, request_id: str | Iterable[str], report: bool = True) -> None:
        """End requests wherever they are. Their blocks are free at once; the next step reports them with "abort", or
        says nothing of them (`report`).

        An id that is unknown or finished is no error: it may have finished a moment ago.
        """
        if not isinstance(request_id, Iterable):
            raise InvalidParameter("request_id", request_id, "must be a string, or several")
        names = dict.fromkeys([request_id] if isinstance(request_id, str) else request_id)
        for name in names:
            request = self._requests.get(name)
            if request is not None:
                self._end(request, "abort")
        if not report:  # nor of those that had ended before, in a step that raised
            self._reports.drop(names)

    def report_again(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs that a step returned to somebody else: the next step returns them once more."""
        self._reports.add_again(outputs)

    def max_blocks_needed(self, prompt: Any, params: SamplingParams | BeamSearchParams) -> int:
        """The most KV blocks that this request can hold at one time, with all its samples or beams at full length."""
        return self._intake.max_blocks_needed(prompt, params)

    def get_metrics(self) -> EngineMetrics:
        """Queues and pools at this moment, and what was counted until now."""
        return self._meter.metrics()

    def snapshot(self) -> Snapshot:
        """Tables, pools and queues between two steps; the snapshots of a step go to `on_step`."""
        return take_snapshot(self.scheduler)

    def has_unfinished_requests(self) -> bool:
        """Whether a step would report anything more."""
        return bool(self._requests or self._reports)

    # ---------------------------------------------------------------- one step

    def step(self) -> list[RequestOutput]:
        """Bring requests one step forward. Returns those with something new; each reports its end exactly once."""
        if self._is_stepping:
            raise InvalidParameter("on_step", self.on_step, "must not step the engine, whose own step is not over yet")
        self._is_stepping = True
        try:
            return self._step()
        finally:
            self._is_stepping = False

    def _step(self) -> list[RequestOutput]:
        schedule = self._plan()
        snapshot = take_snapshot(self.scheduler, schedule) if self.on_step is not None else None
        self.blocks.drain_events()  # a snapshot has taken them, or nobody wants them
        result = None
        with self._ending_requests_on_error(schedule), self.interruptible:
            result = StepResult(()) if schedule.plan.is_empty else self.worker.execute(schedule.plan)
            self.scheduler.confirm()
            self._meter.count_step(schedule)
        if result is not None:
            if self.on_step is not None and snapshot is not None:
                with self.interruptible:
                    self.on_step(schedule.plan, result, snapshot)
            with self._ending_requests_on_error(schedule):
                self._update(schedule, result)
        self._meter.log_now_and_then()
        return self._reports.take()

    def _plan(self) -> Schedule:
        schedule = self.scheduler.schedule()
        for request in self._unfinished(schedule.outgrown):
            self._end(request, "length")
        self._meter.count_plan(schedule, self._requests)
        return schedule

    def _update(self, schedule: Schedule, result: StepResult) -> None:
        """Results go back: computed counts advance, tokens are appended, ended sequences free their blocks."""
        self.scheduler.advance(schedule)
        candidates: dict[str, dict[int, tuple[TokenLogprob, ...]]] = {}
        for entry, rows in zip(schedule.plan.sampling, result.entries, strict=True):
            group, seq, _ = schedule.shares[entry.row]
            request = self._requests.get(group.request_id)
            if request is None or seq.is_finished:  # aborted while the step ran
                continue
            if isinstance(entry, ScorePrompt):
                request.add_prompt_scores(rows)
            elif isinstance(entry, BestCandidates):
                candidates.setdefault(request.request_id, {})[seq.seq_id] = rows
            else:
                self._append_draws(request, seq, rows)
        for request_id, rows in candidates.items():
            self._advance_beams(self._requests[request_id], rows)

    def _advance_beams(self, request: BeamRequest, candidates: dict[int, tuple[TokenLogprob, ...]]) -> None:
        """All beams of a search have spoken in this step; nothing is shown before it is over."""
        request.advance(candidates, self.scheduler, self._seq_ids)
        self._note_tokens(request, len(request.beams) or len(candidates))  # the last ones run no more
        if request.state.is_over:
            self._reports.add(request)

    def _append_draws(self, request: SamplingRequest, seq: Sequence, draws: tuple[Draw, ...]) -> None:
        request.append_draws(seq, draws, self.scheduler, self._seq_ids)
        self._note_tokens(request, len(draws))
        self._reports.add(request)

    def _note_tokens(self, request: Request, count: int) -> None:
        self._meter.count_tokens(request.metrics, count)
        self._forget_if_finished(request)

    # ---------------------------------------------------------------- ends

    def _end(self, request: Request, reason: str, error: BaseException | None = None) -> None:
        """End a request from outside; whatever it has is kept, and reported by the next report."""
        self.scheduler.finish_group(request.group, reason)
        request.error = error
        request.end(reason)
        self._forget_if_finished(request)
        self._reports.add(request)

    def _forget_if_finished(self, request: Request) -> None:
        if not request.group.live:
            self._meter.count_end(request.metrics)
            del self._requests[request.request_id]

    def _unfinished(self, groups: Iterable[SequenceGroup]) -> Iterator[Request]:
        """Their requests, but for those that have ended; such a name may have been given to another one."""
        for group in groups:
            request = self._requests.get(group.request_id)
            if request is not None and request.group is group:
                yield request

    @contextmanager
    def _ending_requests_on_error(self, schedule: Schedule) -> Iterator[None]:
        """What raises inside a step ends the requests of that step with "error" and the cause; the engine goes on.

        Their blocks may be half written, so there is no going on for them. An interrupt is not swallowed, nor is
        the ranks' end.
        """
        try:
            yield
        except BaseException as cause:
            for request in self._unfinished(share.group for share in schedule.shares):
                self._end(request, "error", cause)
            self.scheduler.withdraw()
            if not isinstance(cause, Exception) or isinstance(cause, EngineDead):
                raise
            logger.exception("a step failed; its requests have ended with an error")
