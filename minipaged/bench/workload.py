"""The requests that are served: prompts of token ids, and how many tokens each is to generate."""

from __future__ import annotations

import json
import random
from pathlib import Path

from minipaged.errors import InvalidParameter

Workload = list[dict]  # each with "prompt_token_ids" and "max_tokens"
SHAPE = 'a JSON file, {"requests": [{"prompt_token_ids": [1, 2], "max_tokens": 3}, …]}'


def load_workload(args, vocab_size: int) -> Workload:
    """The file that the user names, or random requests; the first `--requests` of them."""
    workload = read_workload(args.workload) if args.workload is not None else make_workload(args.requests, vocab_size)
    return workload[: args.requests]


def read_workload(path: str) -> Workload:
    """A JSON file: {"requests": [{"prompt_token_ids": [...], "max_tokens": n}, ...]}.

    Raises:
        InvalidParameter: it is not such a file, or holds no request.
    """
    try:
        requests = json.loads(Path(path).read_text())["requests"]
        found = [
            {"prompt_token_ids": list(request["prompt_token_ids"]), "max_tokens": _count(request["max_tokens"])}
            for request in requests
        ]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidParameter("workload", path, f"{SHAPE} ({type(error).__name__}: {error})") from error
    if not found:
        raise InvalidParameter("workload", path, f"{SHAPE}, at least one")
    return found


def _count(number: object) -> int:
    if not isinstance(number, int) or number < 1:
        raise ValueError(f"max_tokens is {number!r}")
    return number


def make_workload(count: int, vocab_size: int) -> Workload:
    """Random tokens; lengths log-normal, as those of real requests are: a mean of about 120 in and 100 out."""
    rng = random.Random(0)

    def length(mean: float, longest: int) -> int:
        return min(longest, max(4, round(rng.lognormvariate(mean, 0.7))))

    return [
        {
            "prompt_token_ids": rng.choices(plain_tokens(vocab_size), k=length(4.5, 700)),
            "max_tokens": length(4.4, 300),
        }
        for _ in range(count)
    ]


def random_request(num_prompt: int, max_tokens: int, vocab_size: int) -> dict:
    """One request of random tokens, the same in every call."""
    tokens = random.Random(0).choices(plain_tokens(vocab_size), k=num_prompt)
    return {"prompt_token_ids": tokens, "max_tokens": max_tokens}


def plain_tokens(vocab_size: int) -> range:
    """Special tokens, where a vocabulary begins with them, are left out."""
    return range(vocab_size // 8, vocab_size)


def num_tokens_out(workload: Workload) -> int:
    return sum(request["max_tokens"] for request in workload)


def num_tokens_in(workload: Workload) -> int:
    return sum(len(request["prompt_token_ids"]) for request in workload)


def check_work(who: str, num_tokens: int, num_wanted: int) -> None:
    """Nobody is faster by doing less: a request that was cut short, or that failed, is no measurement."""
    if num_tokens != num_wanted:
        allowed = f"{who} generated {num_tokens:,} tokens of {num_wanted:,}: is max_model_len too short for a request?"
        raise InvalidParameter("workload", f"{num_wanted:,} tokens", allowed)
