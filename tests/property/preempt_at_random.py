"""A preemption policy for tests: when a token comes may change, which one may not."""

import random

PATIENCE = 1000  # questions; without an end, a long prompt in small chunks may never come through


class PreemptAtRandom:
    """Puts anybody out at any time, and the latest when somebody must go."""

    def __init__(self, seed: int, probability: float) -> None:
        self.random = random.Random(seed)
        self.probability = probability
        self.asked = 0

    def next_victim(self, running, must):
        self.asked += 1
        if self.asked <= PATIENCE and self.random.random() < self.probability:
            return self.random.choice(list(running))
        return running[-1] if must else None
