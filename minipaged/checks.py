"""Checks of single values, as building blocks of a table "field → check" (SamplingParams, EngineArgs).

A check takes a field's name and its value. It returns the value in its normal form (NumPy's scalars become Python's),
or raises InvalidParameter, which names the field, the value and, in words, what is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

from minipaged.errors import InvalidParameter

Check = Callable[[str, Any], Any]


def integer(allowed: str, test: Callable[[int], bool]) -> Check:
    """An integer that passes the test; a bool is none."""

    def check(field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, Integral) or not test(value):
            raise InvalidParameter(field, value, allowed)
        return int(value)

    return check


def number(allowed: str, test: Callable[[float], bool]) -> Check:
    """A real number that passes the test, which NaN must fail (it fails every comparison); a bool is none."""

    def check(field: str, value: Any) -> float:
        try:
            if isinstance(value, Real) and not isinstance(value, bool) and test(float(value)):
                return float(value)
        except OverflowError:  # an integer that no float can hold
            pass
        raise InvalidParameter(field, value, allowed)

    return check


def flag(field: str, value: Any) -> bool:
    """True or False, and nothing that merely counts as one of them."""
    if not isinstance(value, bool):
        raise InvalidParameter(field, value, "must be True or False")
    return value


def one_of(choices: Collection[str]) -> Check:
    """One of some words."""

    def check(field: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise InvalidParameter(field, value, f"must be one of {', '.join(choices)}")
        return value

    return check


def optional(check: Check) -> Check:
    """None, or what passes the check."""
    return lambda field, value: None if value is None else check(field, value)


def check_fields(instance: Any, checks: dict[str, Check]) -> None:
    """Put each field of a dataclass, a frozen one too, into its normal form."""
    for field, check in checks.items():
        object.__setattr__(instance, field, check(field, getattr(instance, field)))


def refuse_unknown(cls: type, given: dict[str, Any]) -> None:
    """Refuse, by name, what is no field of a dataclass, with the field that was probably meant."""
    known = [field.name for field in fields(cls)]
    for name, value in given.items():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise InvalidParameter(name, value, f"{cls.__name__} has no such option{hint}")
