"""The path against a simulated program: what is on it decides how long the program takes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof.trace_analysis.critical_path import CriticalPath
from tests.sampling import examples
from tests.unit.analysis.trace.shared import Event, event, kernel, launch
from tests.unit.analysis.trace.test_critical_path import call, mark, op, path_of

STREAMS = (7, 20)
CALL_US, LATENCY_US, TAIL_US = 3, 5, 4
Action = tuple[str, int, int]
"""What, how long or which stream, how long."""


@dataclass
class Program:
    """A thread that computes, launches, synchronises, and makes one stream wait for another."""

    now: int = 1
    free: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    awaited: dict[int, int] = field(default_factory=lambda: dict.fromkeys(STREAMS, 0))
    events: list[Event] = field(default_factory=list)

    def run(self, number: int, action: Action) -> None:
        what, first, second = action
        start = self.now
        if what == "cpu":
            self.now += first
            self.events.append(op(f"op{number}", start, first))
        elif what == "launch":
            self.launch(number, STREAMS[first % 2], second)
        elif what == "wait":
            stream, other = STREAMS[first % 2], STREAMS[1 - first % 2]
            self.awaited[stream] = max(self.awaited[stream], self.free[other])
            self.now += CALL_US
            self.events += [
                call("cudaStreamWaitEvent", start, CALL_US, correlation=number + 1),
                event("Stream Wait Event", "cuda_sync", start, 1, pid=0, tid=stream,
                      correlation=number + 1, device=0, stream=stream, wait_on_stream=other,
                      cuda_sync_kind="Stream Wait Event"),
            ]  # fmt: skip
        else:
            done = max(self.free.values())
            self.now = done + TAIL_US if done > start else start + CALL_US
            self.events.append(call("cudaDeviceSynchronize", start, self.now - start))
        self.now += 1

    def launch(self, number: int, stream: int, length: int) -> None:
        start = max(self.now, self.free[stream], self.awaited[stream]) + LATENCY_US
        self.awaited[stream] = 0
        self.free[stream] = start + length
        self.events += [
            launch(number + 1, self.now, CALL_US),
            kernel(f"op{number}", start, length, correlation=number + 1, stream=stream),
        ]
        self.now += CALL_US


def simulated(actions: list[Action]) -> tuple[list[Event], int]:
    """The program's trace, and when it ended."""
    program = Program()
    for number, action in enumerate(actions):
        program.run(number, action)
    window = mark("window", 0, program.now)
    return [window, *program.events], max(program.now, *program.free.values())


def path_of_program(events: list[Event]) -> CriticalPath:
    with tempfile.TemporaryDirectory() as folder:
        return path_of(Path(folder), events)


lengths = st.integers(1, 60)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("cpu"), lengths, st.just(0)),
        st.tuples(st.just("launch"), st.integers(0, 1), lengths),
        st.tuples(st.just("wait"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("sync"), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=14,
)


@settings(max_examples=examples(60), deadline=None)
@given(actions)
def test_longer_event_on_the_path_makes_the_program_as_much_longer(program: list[Action]) -> None:
    events, end = simulated(program)
    path = path_of_program(events)
    assert path.length_ns == end * 1000
    assert path.confidence == "recorded"
    running = _running(path)
    for number, (what, first, second) in enumerate(program):
        longer = {"cpu": (what, first + 7, second), "launch": (what, first, second + 7)}.get(what)
        if longer and f"op{number}" in running:
            _, later = simulated([*program[:number], longer, *program[number + 1 :]])
            assert later == end + 7


@settings(max_examples=examples(60), deadline=None)
@given(actions)
def test_shorter_event_off_the_path_changes_nothing(program: list[Action]) -> None:
    events, end = simulated(program)
    running = _running(path_of_program(events))
    for number, (what, first, second) in enumerate(program):
        shorter = {"cpu": (what, first - 1, second), "launch": (what, first, second - 1)}.get(what)
        if shorter and f"op{number}" not in running:
            _, now = simulated([*program[:number], shorter, *program[number + 1 :]])
            assert now == end


def _running(path: CriticalPath) -> set[str]:
    """Names of events that run on the path."""
    rows = path.segments()
    return set(rows.filter(rows["kind"] != "delay")["name"].drop_nulls().to_list())
