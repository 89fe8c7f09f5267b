"""From hidden states to the StepResult: logits only for the rows that speak, since T tokens are fed and few do.

Letters: T tokens of the step, E hidden_size, R rows that sample, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch

from minipaged.step import BestCandidates, Sample, ScoredToken, ScorePrompt, StepPlan, StepResult
from minipaged.worker.logprobs import best_candidates, score_prompt
from minipaged.worker.sampler import sample

SCORED_POSITIONS = 256  # scored at a time: the logits of a long prompt, [positions, V], would be large

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]  # [R, E] -> [R, V]


def answer_plan(plan: StepPlan, hidden: torch.Tensor, compute_logits: ComputeLogits) -> StepResult:
    """Answer each entry of plan.sampling. hidden [T, E] is in the order of the plan's rows."""
    ends = list(accumulate(len(row.token_ids) for row in plan.work))  # where each row ends among the T tokens
    results: dict[int, tuple] = {}

    speaking = [(i, entry) for i, entry in enumerate(plan.sampling) if not isinstance(entry, ScorePrompt)]
    if speaking:
        logits = compute_logits(hidden[[ends[entry.row] - 1 for _, entry in speaking]])  # [R, V]
        for kind, choose in ((Sample, sample), (BestCandidates, _best)):
            part = [k for k, (_, entry) in enumerate(speaking) if isinstance(entry, kind)]
            if part:
                rows = logits if len(part) == len(speaking) else logits[part]
                chosen = choose(rows, [speaking[k][1] for k in part])
                results.update((speaking[k][0], answer) for k, answer in zip(part, chosen, strict=True))

    for i, entry in enumerate(plan.sampling):
        if isinstance(entry, ScorePrompt):
            first = ends[entry.row] - len(plan.work[entry.row].token_ids) + entry.first
            results[i] = _score(entry, hidden[first : first + len(entry.targets)], compute_logits)
    return StepResult(tuple(results[i] for i in range(len(plan.sampling))))


def _best(logits: torch.Tensor, entries: list[BestCandidates]) -> list[tuple]:
    return best_candidates(logits, [entry.k for entry in entries])


def _score(entry: ScorePrompt, hidden: torch.Tensor, compute_logits: ComputeLogits) -> tuple[ScoredToken, ...]:
    """hidden [len(targets), E] -> the score of each target."""
    scored: list[ScoredToken] = []
    for at in range(0, len(entry.targets), SCORED_POSITIONS):
        part = slice(at, at + SCORED_POSITIONS)
        scored += score_prompt(
            compute_logits(hidden[part]), ScorePrompt(entry.row, entry.targets[part], entry.num_logprobs)
        )
    return tuple(scored)
