"""Who is told what by the next step: each request with something new once, in the order in which it came."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from minipaged.engine.request import Request
from minipaged.outputs import RequestOutput


class Reports:
    """What the engine still has to say. A step that raises says nothing, and the next one says it all."""

    def __init__(self) -> None:
        self._new: dict[int, Request] = {}  # by request number
        self._again: list[RequestOutput] = []

    def __bool__(self) -> bool:
        return bool(self._new or self._again)

    def add(self, request: Request) -> None:
        """It has a new token, or an end."""
        self._new[request.group.number] = request

    def add_again(self, outputs: Iterable[RequestOutput]) -> None:
        """Outputs that somebody else was given."""
        self._again += outputs

    def drop(self, request_ids: Collection[str]) -> None:
        """Nobody wants to hear of these."""
        self._new = {number: request for number, request in self._new.items() if request.request_id not in request_ids}

    def take(self) -> list[RequestOutput]:
        """Everything, as it is now; afterwards there is nothing to say."""
        outputs = self._again + [request.output() for request in self._new.values()]
        self._new, self._again = {}, []
        return outputs
