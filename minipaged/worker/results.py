"""From hidden states to the StepResult: logits only for the rows that speak, since T tokens are fed and few do.

Letters: T tokens of the step, E hidden_size, R rows that sample, V vocab_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate

import torch

from minipaged.step import BestCandidates, Sample, ScoredToken, ScorePrompt, StepPlan, StepResult
from minipaged.worker.logprobs import best_candidates, score_prompt
from minipaged.worker.sampler import sample

SCORED_POSITIONS = 256  # scored at a time: the logits of a long prompt, [positions, V], would be large

ComputeLogits = Callable[[torch.Tensor], torch.Tensor]  # [R, E] -> [R, V]


def logit_rows(plan: StepPlan) -> list[list[int]]:
    """The tokens that need logits, by their places among the T; each list is one call of compute_logits.

    First the last tokens of all rows that sample, then each prompt to score, in pieces.
    """
    ends = list(accumulate(len(row.token_ids) for row in plan.work))  # where each row ends among the T tokens
    speaking = [ends[entry.row] - 1 for entry in plan.sampling if not isinstance(entry, ScorePrompt)]
    batches = [speaking] if speaking else []
    for entry in plan.sampling:
        if isinstance(entry, ScorePrompt):
            first = ends[entry.row] - len(plan.work[entry.row].token_ids) + entry.first
            tokens = list(range(first, first + len(entry.targets)))
            batches += [tokens[at : at + SCORED_POSITIONS] for at in range(0, len(tokens), SCORED_POSITIONS)]
    return batches


def answer_plan(plan: StepPlan, hidden: torch.Tensor, compute_logits: ComputeLogits) -> StepResult:
    """Answer each entry of plan.sampling. hidden [T, E] is in the order of the plan's rows."""
    computed = (compute_logits(hidden[rows]) for rows in logit_rows(plan))  # one batch at a time, when it is needed
    results: dict[int, tuple] = {}
    speaking = [(i, entry) for i, entry in enumerate(plan.sampling) if not isinstance(entry, ScorePrompt)]
    if speaking:
        logits = next(computed)  # [R, V]
        for kind, choose in ((Sample, sample), (BestCandidates, _best)):
            part = [k for k, (_, entry) in enumerate(speaking) if isinstance(entry, kind)]
            if part:
                rows = logits if len(part) == len(speaking) else logits[part]
                chosen = choose(rows, [speaking[k][1] for k in part])
                results.update((speaking[k][0], answer) for k, answer in zip(part, chosen, strict=True))
    results.update((i, _score(entry, computed)) for i, entry in enumerate(plan.sampling) if i not in results)
    return StepResult(tuple(results[i] for i in range(len(plan.sampling))))


def _best(logits: torch.Tensor, entries: list[BestCandidates]) -> list[tuple]:
    return best_candidates(logits, [entry.k for entry in entries])


def _score(entry: ScorePrompt, computed: Iterator[torch.Tensor]) -> tuple[ScoredToken, ...]:
    """The score of each target, from the next batches of logits."""
    scored: list[ScoredToken] = []
    for at in range(0, len(entry.targets), SCORED_POSITIONS):
        targets = entry.targets[at : at + SCORED_POSITIONS]
        scored += score_prompt(next(computed), ScorePrompt(entry.row, targets, entry.num_logprobs))
    return tuple(scored)
