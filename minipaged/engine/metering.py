"""Counts what each step did, and says so in the log every few seconds of long work.

`logging.basicConfig(level=logging.INFO)` makes the line visible:

    running 12, waiting 3, swapped 1 | 61 tokens/s | KV use 84%, fill 97% | 2 preemptions, 0 tokens computed again
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping

from minipaged.engine.request import Request
from minipaged.metrics import EngineCounts, EngineMetrics, RequestMetrics
from minipaged.scheduling.group import GroupState
from minipaged.scheduling.scheduler import Schedule, Scheduler

logger = logging.getLogger("minipaged")

LOG_INTERVAL = 5.0  # seconds


class Meter:
    """The engine's counts and its requests' moments. Reads the scheduler, and changes nothing else."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.counts = EngineCounts()
        self._scheduler = scheduler
        self._logged_at = time.perf_counter()
        self._logged_tokens = 0

    def count_plan(self, schedule: Schedule, requests: Mapping[str, Request]) -> None:
        """A step was planned: who was put out for it, and who runs for the first time."""
        swapped = sum(group.state is GroupState.SWAPPED for group in schedule.preempted)
        self.counts.num_preemptions_by_swap += swapped
        self.counts.num_preemptions_by_recompute += len(schedule.preempted) - swapped
        for group in schedule.preempted:
            requests[group.request_id].metrics.num_preemptions += 1
        now = time.perf_counter()
        for group, _, _ in schedule.shares:
            metrics = requests[group.request_id].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = now
                metrics.num_cached_tokens = group.num_cached_tokens
                self.counts.num_prompt_tokens += group.sequences[0].num_prompt_tokens
                self.counts.num_cached_tokens += group.num_cached_tokens

    def count_tokens(self, metrics: RequestMetrics, count: int) -> None:
        """A request has got so many tokens, over all its sequences."""
        self.counts.num_generated_tokens += count
        if metrics.first_token_time is None:
            metrics.first_token_time = time.perf_counter()

    def count_end(self, metrics: RequestMetrics) -> None:
        """A request has ended, by itself or from outside."""
        self.counts.num_finished_requests += 1
        metrics.finished_time = time.perf_counter()

    def count_step(self, schedule: Schedule) -> None:
        """It was applied, and is not counted by the scheduler yet."""
        plan, counts = schedule.plan, self.counts
        counts.num_steps += 1
        counts.num_computed_tokens += plan.num_tokens
        counts.num_blocks_copied += len(plan.copies)
        counts.num_blocks_swapped_out += len(plan.swap_out)
        counts.num_blocks_swapped_in += len(plan.swap_in)
        for share in schedule.shares:
            again = min(share.end, share.seq.num_once_computed) - share.seq.num_computed
            counts.num_recomputed_tokens += max(0, again)

    def metrics(self) -> EngineMetrics:
        """This moment; the counts are a copy."""
        scheduler = self._scheduler
        device, host = scheduler.blocks, scheduler.host
        filled = dict(block for table in device.tables().values() for block in table.entries())
        cached = len(device.allocator.evictable)
        pinned = {block: device.block_size for block in device.pinned}  # full blocks
        return EngineMetrics(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_swapped=len(scheduler.swapped),
            num_blocks=device.num_blocks,
            num_used_blocks=device.num_blocks - device.num_free,
            num_cached_blocks=cached,
            num_filled_slots=sum((filled | pinned).values()),
            block_size=device.block_size,
            num_host_blocks=host.num_blocks,
            num_used_host_blocks=host.num_blocks - host.num_free,
            counts=dataclasses.replace(self.counts),
        )

    def begin_interval(self) -> None:
        """From here on the next interval is counted."""
        self._logged_at = time.perf_counter()
        self._logged_tokens = self.counts.num_generated_tokens

    def log_now_and_then(self) -> None:
        """At most one line in LOG_INTERVAL seconds of work, and none when nobody listens."""
        elapsed = time.perf_counter() - self._logged_at
        if elapsed >= LOG_INTERVAL:
            num_tokens = self.counts.num_generated_tokens - self._logged_tokens
            if logger.isEnabledFor(logging.INFO):
                logger.info("%s", describe(self.metrics(), num_tokens / elapsed))
            self.begin_interval()


def describe(metrics: EngineMetrics, tokens_per_second: float) -> str:
    """One line about the engine."""
    counts = metrics.counts
    parts = [
        f"running {metrics.num_running}, waiting {metrics.num_waiting}, swapped {metrics.num_swapped}",
        f"{tokens_per_second:.0f} tokens/s",
        f"KV use {metrics.kv_use:.0%}, fill {metrics.kv_fill:.0%}",
        f"{counts.num_preemptions_by_recompute + counts.num_preemptions_by_swap} preemptions, "
        f"{counts.num_recomputed_tokens} tokens computed again",
    ]
    if counts.num_cached_tokens:
        parts.append(f"prefix cache hits {counts.prefix_cache_hit_rate:.0%}")
    return " | ".join(parts)
