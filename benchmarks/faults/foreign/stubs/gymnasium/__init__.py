"""The cart pole of gymnasium, by its equations: the real package is not installed."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import numpy as np


class _CartPole:
    spec = SimpleNamespace(reward_threshold=float("inf"))

    def reset(self, seed=None):
        self.dice = random.Random(seed) if seed is not None else self.dice
        self.state = [self.dice.uniform(-0.05, 0.05) for _ in range(4)]
        self.turns = 0
        return np.array(self.state, dtype=np.float32), {}

    def step(self, action):
        _, speed, angle, turn = self.state
        force = 10.0 if action == 1 else -10.0
        push = (force + 0.05 * turn**2 * math.sin(angle)) / 1.1
        fall = 9.8 * math.sin(angle) - math.cos(angle) * push
        fall /= 0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1)
        gain = push - 0.05 * fall * math.cos(angle) / 1.1
        moved = zip(self.state, (speed, gain, turn, fall), strict=True)
        self.state = [value + 0.02 * change for value, change in moved]
        self.turns += 1
        over = abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.21
        return np.array(self.state, dtype=np.float32), 1.0, over, self.turns >= 100, {}


def make(name, **_):
    return _CartPole()
