"""How a beam search is to run: vLLM's `BeamSearchParams`, checked once, when it is made.

The names, their order and their defaults are vLLM's; `early_stopping` is ours, with the meaning it has in transformers
(`decoding/beam_search.py`). An option of `SamplingParams` that means nothing here is refused by name, since beam search
follows the most probable continuations and draws nothing.

As with `SamplingParams`, a change made later is not checked: an engine takes its own copy with `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from minipaged.checks import Check, check_fields, flag, integer, number, refuse_unknown
from minipaged.errors import InvalidParameter
from minipaged.sampling_params import SamplingParams


def _early_stopping(field: str, value: Any) -> bool | str:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise InvalidParameter(field, value, 'must be True, False or "never"')
    return value


_COUNT = integer("must be an integer, at least 1", lambda v: v >= 1)

_CHECKS: dict[str, Check] = {
    "beam_width": _COUNT,
    "max_tokens": _COUNT,
    "ignore_eos": flag,
    "temperature": number("must be 0: beam search draws nothing", lambda v: v == 0),
    # Any context's length to the power of 10 is still a float; without a bound the score could overflow.
    "length_penalty": number("must be a number from -10 to 10", lambda v: -10 <= v <= 10),
    "include_stop_str_in_output": flag,
    "early_stopping": _early_stopping,
}


@dataclass
class BeamSearchParams:
    """One beam search's wishes. Raises `InvalidParameter` for a value, or an option, that is not allowed."""

    beam_width: int  # how many beams run side by side, and how many outputs there are
    max_tokens: int  # the longest output; the context may end it before
    ignore_eos: bool = False  # an end-of-sequence is a token like any other
    temperature: float = 0.0  # accepted for vLLM's sake, as 0 alone
    length_penalty: float = 1.0  # an output's score is its log-probability ÷ length ** length_penalty
    include_stop_str_in_output: bool = False  # outputs keep the end-of-sequence token that ended them
    early_stopping: bool | Literal["never"] = False  # when enough outputs have finished for the search to end

    def __new__(cls, *args: Any, **given: Any) -> BeamSearchParams:
        """Refuse the options of sampling by name."""
        foreign = {field.name for field in fields(SamplingParams)} | {"structured_outputs"}
        for field in sorted(given.keys() & (foreign - _CHECKS.keys())):
            raise InvalidParameter(field, given[field], "is not an option of beam search")
        refuse_unknown(cls, given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self, _CHECKS)
