"""Which group must go when the blocks do not suffice: a small policy, replaceable (paper, section 4.5).

The scheduler asks again and again until the answer is None; `must` says that what is left does not fit, so that
somebody has to go. The paper's rule is first come, first served: the earliest request is served first and the latest
goes first.
"""

from __future__ import annotations

from typing import Protocol

from minipaged.errors import InvalidParameter
from minipaged.scheduling.group import SequenceGroup


class PreemptionPolicy(Protocol):
    """Tests pass one that preempts at random: when a token comes may change, which one may not."""

    def next_victim(self, running: tuple[SequenceGroup, ...], must: bool) -> SequenceGroup | None:
        """One of `running` (in order of arrival, not empty), or None where nobody has to go and nobody shall.

        Whoever is named, its tokens are kept and it comes back when there is room, so a policy cannot lose anything. A
        step that preempts admits nobody; a policy that always names somebody would starve the others.
        """
        ...


class PreemptLatest:
    """The latest arrival, and only when somebody must go."""

    def next_victim(self, running: tuple[SequenceGroup, ...], must: bool) -> SequenceGroup | None:
        return running[-1] if must else None


def check_policy(policy: PreemptionPolicy | None) -> None:
    """What is no policy is refused before the first step asks it."""
    if policy is not None and (isinstance(policy, type) or not callable(getattr(policy, "next_victim", None))):
        raise InvalidParameter("policy", policy, "must be an object with the method next_victim(running, must)")
