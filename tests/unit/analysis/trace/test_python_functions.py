from __future__ import annotations

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof import TraceAnalysis
from haiprof.base.errors import MissingDataError
from haiprof.trace_analysis.python_code import python_functions, python_stacks
from haiprof.trace_format.kineto.rank_trace import Trace
from tests.sampling import examples
from tests.unit.analysis.trace.shared import (
    Event,
    event,
    kernel,
    rank_file,
    step,
    trace_of,
    trace_path,
)


class Node(NamedTuple):
    """One call of a random tree: what it does before, its calls, what it does after."""

    name: str
    before: int
    calls: list[Any]
    after: int


def nodes(least: int) -> st.SearchStrategy[Node]:
    """Trees of calls; each takes at least so many ns of its own at both ends."""
    gap = st.integers(least, 3)
    return st.recursive(
        st.builds(Node, st.sampled_from("abc"), gap, st.just([]), gap),
        lambda deeper: st.builds(
            Node, st.sampled_from("abc"), gap, st.lists(deeper, max_size=3), gap
        ),
        max_leaves=8,
    )


GPU = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=4)


class Laid(NamedTuple):
    """A tree on the time line: a call with its stack and its caller's number."""

    stack: tuple[str, ...]
    start: int
    end: int
    number: int
    caller: int | None


def laid_out(roots: list[Node]) -> list[Laid]:
    found: list[Laid] = []

    def place(node: Node, at: int, stack: tuple[str, ...], caller: int | None) -> int:
        number = len(found)
        found.append(Laid((*stack, node.name), at, at, number, caller))
        end = at + node.before
        for called in node.calls:
            end = place(called, end, (*stack, node.name), number)
        found[number] = found[number]._replace(end=end + node.after)
        return end + node.after

    at = 0
    for root in roots:
        at = place(root, at, (), None)
    return found


def python_event(call: Laid, *, with_ids: bool) -> Event:
    ids = {"Python id": call.number + 5, "Python parent id": None} if with_ids else {}
    if with_ids and call.caller is not None:
        ids["Python parent id"] = call.caller + 5
    length = call.end - call.start
    return event(call.stack[-1], "python_function", call.start / 1000, length / 1000, **ids)


def ask(calls: list[Laid], gpu: list[tuple[int, int]], *, with_ids: bool) -> tuple[Any, Any]:
    events = [python_event(call, with_ids=with_ids) for call in calls]
    events += [kernel("k", start / 1000, length / 1000) for start, length in gpu]
    with TemporaryDirectory() as folder:
        trace = trace_of(Path(folder), events)
        return python_stacks(trace), python_functions(trace)


def check_against_cells(calls: list[Laid], gpu: list[tuple[int, int]], *, with_ids: bool) -> None:
    """The oracle looks at every ns on its own: which calls are open, is the GPU at work."""
    busy = {ns for start, length in gpu for ns in range(start, start + length)}
    own, whole, inside, alone = Counter[Any](), Counter[Any](), Counter[Any](), Counter[Any]()
    for ns in range(max((call.end for call in calls), default=0)):
        open_calls = [call.stack for call in calls if call.start <= ns < call.end]
        if not open_calls:
            continue
        deepest = max(open_calls, key=len)
        own[deepest] += 1
        whole.update(open_calls)
        inside.update(set(deepest))
        if ns not in busy:
            alone.update([("own", deepest), *(("whole", s) for s in open_calls)])
            alone.update(("function", name) for name in set(deepest))
    stacks, functions = ask(calls, gpu, with_ids=with_ids)
    counts = Counter(call.stack for call in calls)
    found = {tuple(row["stack"].split(";")): row for row in stacks.iter_rows(named=True)}
    assert {stack: row["calls"] for stack, row in found.items()} == dict(counts)
    for stack, row in found.items():
        assert row["name"] == stack[-1]
        assert row["depth"] == len(stack) - 1
        assert (row["total_ns"], row["self_ns"]) == (whole[stack], own[stack])
        expected = (alone["whole", stack], alone["own", stack]) if gpu else (None, None)
        assert (row["non_overlapped_ns"], row["self_non_overlapped_ns"]) == expected
    for row in functions.iter_rows(named=True):
        assert row["total_ns"] == inside[row["name"]]
        assert row["self_ns"] == sum(n for s, n in own.items() if s[-1] == row["name"])
        assert row["calls"] == sum(n for s, n in counts.items() if s[-1] == row["name"])
        assert row["non_overlapped_ns"] == (alone["function", row["name"]] if gpu else None)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(nodes(1), min_size=1, max_size=3), GPU)
def test_nesting_of_times_agrees_with_every_ns_on_its_own(
    roots: list[Node], gpu: list[tuple[int, int]]
) -> None:
    check_against_cells(laid_out(roots), gpu, with_ids=False)


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(nodes(0), min_size=1, max_size=3), GPU)
def test_recorded_callers_agree_with_every_ns_on_its_own(
    roots: list[Node], gpu: list[tuple[int, int]]
) -> None:
    check_against_cells(laid_out(roots), gpu, with_ids=True)


def test_real_stacks_share_out_all_time_of_the_roots() -> None:
    trace = Trace(trace_path("tl_b200_r0of8_nccl"))
    found = python_stacks(trace)
    whole = found.filter(depth=0)
    for own, total in (("self_ns", "total_ns"), ("self_non_overlapped_ns", "non_overlapped_ns")):
        assert found[own].sum() == whole[total].sum()
    assert found["calls"].sum() == len(trace.python)
    assert python_functions(trace)["self_ns"].sum() == whole["total_ns"].sum()


def hand_made() -> list[Event]:
    return [
        event("main", "python_function", 0, 100),
        event("work; now", "python_function", 10, 40),
        event("copy of Tensor object at 0x7f12", "python_function", 20, 5),
        event("copy of Tensor object at 0xAA", "python_function", 30, 5),
        event("wait", "python_function", 0, 50, tid=2),
        kernel("k", 22, 60),
        step(3, 15, 20),
    ]


def test_stacks_by_hand_with_threads_and_addresses(tmp_path: Path) -> None:
    found = python_stacks(trace_of(tmp_path, hand_made()))
    rows = {(row["tid"], row["stack"]): row for row in found.iter_rows(named=True)}
    assert set(rows) == {
        (1, "main"), (1, "main;work, now"), (2, "wait"),
        (1, "main;work, now;copy of Tensor object"),
    }  # fmt: skip
    copies = rows[1, "main;work, now;copy of Tensor object"]
    assert (copies["calls"], copies["self_ns"], copies["self_non_overlapped_ns"]) == (
        2, 10_000, 2_000,
    )  # fmt: skip
    main = rows[1, "main"]
    assert (main["total_ns"], main["self_ns"]) == (100_000, 60_000)
    assert main["non_overlapped_ratio"] == 0.4
    assert rows[2, "wait"]["self_non_overlapped_ns"] == 22_000


def test_steps_cut_calls_at_their_window(tmp_path: Path) -> None:
    found = python_stacks(trace_of(tmp_path, hand_made()), steps=(3, 4))
    rows = {row["name"]: row for row in found.iter_rows(named=True)}
    assert (rows["main"]["calls"], rows["main"]["total_ns"]) == (0, 20_000)
    assert (rows["copy of Tensor object"]["calls"]) == 2
    assert rows["main"]["non_overlapped_ns"] == 7_000
    assert rows["main"]["self_ns"] == 0


def test_contradicting_ids_fall_back_to_times(tmp_path: Path) -> None:
    ids = [(1, 2), (2, 1), (3, 1)]  # the first two are each other's caller
    spans = [("a", 0, 10), ("b", 0, 10), ("c", 2, 3)]
    events = [
        event(name, "python_function", start, length, **{"Python id": own, "Python parent id": up})
        for (name, start, length), (own, up) in zip(spans, ids, strict=True)
    ]
    found = python_stacks(trace_of(tmp_path, events))
    assert set(found["stack"]) == {"a", "a;b", "a;b;c"}


def test_without_gpu_events_the_shares_are_unknown(tmp_path: Path) -> None:
    found = python_stacks(trace_of(tmp_path, hand_made()[:2]))
    assert found["non_overlapped_ratio"].null_count() == len(found)
    with pytest.raises(MissingDataError, match="no Python functions") as error:
        python_stacks(trace_of(tmp_path, [kernel("k", 0, 1)]))
    assert "with_stack" in error.value.hint


@pytest.mark.parametrize("with_ids", [True, False])
def test_own_frames_and_threads_are_left_out(tmp_path: Path, with_ids: bool) -> None:
    """A wrapper between train() and step(), and a thread of haiprof's beside the job's own.

    What ran before any call had ended ran when the profiler began: its line is not known.
    """

    def call(number: int, parent: int, name: str, ts: int, dur: int, tid: int = 1) -> Event:
        ids = {"Python id": number, "Python parent id": parent} if with_ids else {}
        return event(name, "python_function", ts, dur, tid=tid, **ids)

    rank_file(tmp_path, 0, [
        call(1, 0, "train.py(3): train", 0, 100),
        call(2, 1, "haiprof/in_job/patches.py(303): __call__", 10, 60),
        call(3, 2, "haiprof/in_job/patches.py(40): original", 15, 50),
        call(4, 3, "torch/optim/sgd.py(9): step", 20, 40),
        call(5, 0, "threading.py(1002): _bootstrap", 0, 100, tid=2),
        call(6, 5, "haiprof/in_job/recorder.py(264): _loop", 0, 100, tid=2),
        call(7, 0, "threading.py(1002): _bootstrap", 0, 100, tid=3),
        call(8, 7, "loader.py(5): fill", 0, 90, tid=3),
    ])  # fmt: skip
    found = TraceAnalysis(tmp_path).python_stacks().sort("tid", "depth")
    rows = found.select("stack", "total_ns", "self_ns").rows()
    assert rows == [
        ("train.py(?): train", 100_000, 60_000),
        ("train.py(?): train;torch/optim/sgd.py(9): step", 40_000, 40_000),
        ("threading.py(?): _bootstrap", 100_000, 10_000),
        ("threading.py(?): _bootstrap;loader.py(?): fill", 90_000, 90_000),
    ]
