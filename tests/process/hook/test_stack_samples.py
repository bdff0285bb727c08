"""Samples fall where the time goes, whoever holds the interpreter lock."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from haiprof.in_job.own_library import load_own_library
from haiprof.in_job.stack_sampler import why_not_sampled

_JOB = """
import json, sys, threading, time
from haiprof.in_job.stack_sampler import StackSampler

values = [at * 7919 % 100003 for at in range(30000)]
took = dict.fromkeys(("in_python", "in_one_call", "asleep"), 0.0)

def in_python():
    return sum([number * number for number in range(60000)])

def in_one_call():
    return sorted(values)

def asleep():
    time.sleep(0.004)

ident = threading.get_ident()
sampler = StackSampler(lambda: ident, hz=200, note=print)
sampler.start()
over = time.perf_counter() + 6
while time.perf_counter() < over:
    for part in (in_python, in_one_call, asleep):
        began = time.perf_counter()
        part()
        took[part.__name__] += time.perf_counter() - began
sampler.stop()
time.sleep(0.2)
print(json.dumps([took, sampler.take_line()]))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not_sampled()), reason=why_not_sampled()),
    pytest.mark.skipif(load_own_library("_sample_clock") is None, reason="not compiled here"),
]


@pytest.fixture(scope="module")
def job() -> tuple[dict[str, float], Counter[tuple[str, str]]]:
    """Seconds of each function by its own clock; samples by function and state of the lock."""
    command = [sys.executable, "-c", _JOB]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    took, line = json.loads(ended.stdout)
    samples = Counter(
        (function, letter)
        for stack, letter in zip(line["stack"], line["lock_wait"], strict=True)
        for function in _functions(line, stack) & set(took)
    )
    return took, samples


def _functions(line: dict[str, Any], stack: int) -> set[str]:
    found = set()
    while stack > 0:
        stack, frame = line["stacks"][stack - 1]
        found.add(line["frames"][frame][2].partition(".")[0])
    return found


def test_samples_share_out_the_time_as_clocks_do(
    job: tuple[dict[str, float], Counter[tuple[str, str]]],
) -> None:
    took, samples = job
    whole_s, count = sum(took.values()), sum(samples.values())
    assert count > 200
    for function, seconds in took.items():
        own = sum(number for (name, _), number in samples.items() if name == function)
        assert own / count == pytest.approx(seconds / whole_s, abs=0.08), (took, samples)


def test_each_sample_says_who_held_the_lock(
    job: tuple[dict[str, float], Counter[tuple[str, str]]],
) -> None:
    _, samples = job
    for function, letter in (("in_python", "h"), ("in_one_call", "h"), ("asleep", "0")):
        own = Counter({state: n for (name, state), n in samples.items() if name == function})
        assert own[letter] > 0.8 * own.total(), (function, samples)
