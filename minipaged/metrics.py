"""What is counted and timed: for each request, and for the engine as a whole. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RequestMetrics:
    """Moments on the clock of time.perf_counter(), in seconds; None until they come.

        arrival ── queue_time ──▶ first scheduled ── prefill_time ──▶ first token ── decode_time ──▶ finished

    Time that a preempted request waits for its return belongs to the phase in which it was preempted.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0  # of the prompt, taken from the prefix cache

    @property
    def queue_time(self) -> float | None:
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def prefill_time(self) -> float | None:
        return _between(self.first_scheduled_time, self.first_token_time)

    @property
    def decode_time(self) -> float | None:
        return _between(self.first_token_time, self.finished_time)

    @property
    def time_to_first_token(self) -> float | None:
        return _between(self.arrival_time, self.first_token_time)


def _between(begin: float | None, end: float | None) -> float | None:
    return None if begin is None or end is None else end - begin


@dataclass(slots=True)
class EngineCounts:
    """What has been counted since the engine was made."""

    num_steps: int = 0
    num_finished_requests: int = 0  # aborted and failed ones too
    num_computed_tokens: int = 0  # fed to the model: prompts, generated tokens, and what was computed again
    num_generated_tokens: int = 0
    num_recomputed_tokens: int = 0  # fed again after a preemption
    num_preemptions_by_recompute: int = 0
    num_preemptions_by_swap: int = 0
    num_blocks_swapped_out: int = 0
    num_blocks_swapped_in: int = 0
    num_blocks_copied: int = 0  # copy-on-write
    num_prompt_tokens: int = 0  # of the requests that were scheduled
    num_cached_tokens: int = 0  # of these, taken from the prefix cache

    @property
    def prefix_cache_hit_rate(self) -> float:
        """The share of prompt tokens that came from the prefix cache."""
        return self.num_cached_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """The engine at one moment, and its counts until then."""

    num_running: int  # requests
    num_waiting: int
    num_swapped: int
    num_blocks: int
    num_used_blocks: int  # named by a block table or pinned
    num_cached_blocks: int  # free, and kept for their content
    num_filled_slots: int  # of the used blocks; each shared block is one
    block_size: int
    num_host_blocks: int
    num_used_host_blocks: int
    counts: EngineCounts

    @property
    def kv_use(self) -> float:
        """The share of the pool that is in use, 0 to 1."""
        return self.num_used_blocks / self.num_blocks

    @property
    def kv_fill(self) -> float:
        """How far the used blocks are filled, 0 to 1; what is missing is all that paging wastes (paper, 4.3)."""
        slots = self.num_used_blocks * self.block_size
        return self.num_filled_slots / slots if slots else 1.0
