"""A scene at work: requests come at their steps, and each `advance` is one step of the engine."""

from __future__ import annotations

from collections.abc import Iterable

from minipaged.engine.llm_engine import LLMEngine
from minipaged.watch.scenes import Arrival


class Run:
    """Steps an engine through arrivals, and once more when all have ended, so that the last blocks are seen to go."""

    def __init__(self, engine: LLMEngine, arrivals: Iterable[Arrival]) -> None:
        self._engine = engine
        self._to_come = sorted(arrivals, key=lambda arrival: arrival.step)
        self._step = 0
        self._is_over = False

    def advance(self) -> bool:
        """One step; False where there is none left."""
        if self._is_over:
            return False
        while self._to_come and self._to_come[0].step <= self._step:
            arrival = self._to_come.pop(0)
            self._engine.add_request(arrival.name, arrival.prompt, arrival.params)
        self._is_over = not self._to_come and not self._engine.has_unfinished_requests()
        self._engine.step()
        self._step += 1
        return True
