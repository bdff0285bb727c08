"""Comparing ways of running the same thing: interleaved rounds, paired differences, a table."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way of running against the bare one; every value has the unit of the measurements."""

    name: str
    median: float
    """Median of the runs."""
    added: float
    """Median over rounds of the difference to the bare run of the same round."""
    spread: float
    """Robust standard error of `added`: 1.48 MAD / sqrt(rounds)."""
    low: float
    high: float
    """95 % percentile bootstrap interval of `added`, rounds drawn with replacement."""
    ratio: float
    """Median over rounds of the ratio to the bare run of the same round."""
    round_count: int


def interleaved(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, list]:
    """Results of every way, one per round; the order is shuffled in each round."""
    results: dict[str, list] = {name: [] for name in ways}
    for number in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            results[name].append(ways[name]())
        print(f"round {number + 1} of {rounds}", flush=True)
    return results


def against(base: Sequence[float], values: Sequence[float], name: str) -> Row:
    """Pairs values with those of the bare run, round by round."""
    differences = [value - first for value, first in zip(values, base, strict=True)]
    added = statistics.median(differences)
    deviation = statistics.median(abs(d - added) for d in differences)
    low, high = bootstrap_median(differences)
    ratios = [value / first for value, first in zip(values, base, strict=True)]
    return Row(
        name=name,
        median=statistics.median(values),
        added=added,
        spread=1.48 * deviation / len(differences) ** 0.5,
        low=low,
        high=high,
        ratio=statistics.median(ratios),
        round_count=len(differences),
    )


def bootstrap_median(values: Sequence[float], *, draws: int = 2000) -> tuple[float, float]:
    """95 % percentile bootstrap interval of the median (Efron 1979); always the same draws."""
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(values, k=len(values))) for _ in range(draws))
    return medians[draws // 40], medians[-draws // 40]


def table(rows: Iterable[Row], *, title: str, unit: str) -> str:
    """The rows as Markdown."""
    lines = [
        f"**{title}**",
        "",
        f"| | median, {unit} | added, {unit} | 95 % interval | ratio | rounds |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.name} | {r.median:.1f} | {r.added:+.1f} ± {r.spread:.1f} |"
        f" {r.low:+.1f} to {r.high:+.1f} | x{r.ratio:.3f} | {r.round_count} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def save(path: Path, content: dict[str, object]) -> None:
    """Writes results with a word on the machine they are from."""
    machine = {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, **content}, indent=1) + "\n")
