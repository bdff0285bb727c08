"""The binomial test: whether something happened more often than by chance."""

from __future__ import annotations

from math import exp, lgamma, log


def at_least_p_value(hits: int, trials: int, chance: float) -> float:
    """How likely so many hits or more are, where each trial hits with that chance."""
    if hits <= 0 or chance >= 1.0:
        return 1.0
    if chance <= 0.0:
        return 0.0
    whole = lgamma(trials + 1)
    terms = (
        whole - lgamma(k + 1) - lgamma(trials - k + 1)
        + k * log(chance) + (trials - k) * log(1.0 - chance)
        for k in range(hits, trials + 1)
    )  # fmt: skip
    return min(sum(map(exp, terms)), 1.0)
