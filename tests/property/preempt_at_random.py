"""A preemption policy for tests: when a token comes may change, which one may not."""

import random


class PreemptAtRandom:
    """Puts anybody out at any time, and the latest when somebody must go."""

    def __init__(self, seed: int, probability: float) -> None:
        self.random = random.Random(seed)
        self.probability = probability

    def next_victim(self, running, must):
        if self.random.random() < self.probability:
            return self.random.choice(list(running))
        return running[-1] if must else None
