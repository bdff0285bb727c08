"""Stacks as numbers: what is written of them gives back the lines that ran, and holds no frame."""

from __future__ import annotations

import dis
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import CodeType

import pytest

from haiprof.in_job import frames
from haiprof.in_job.frames import StackTree, find_codes, read_stacks
from haiprof.in_job.stack_sampler import StackSampler


class Tensor:
    """Something large that a frame's variable holds."""


def inner(take: Callable[[], int]) -> tuple[int, int]:
    number = take()
    return number, sys._getframe().f_lineno - 1


def outer(take: Callable[[], int]) -> tuple[int, int]:
    held = Tensor()
    found = inner(take)
    assert held is not None
    return found


def finder(tree: StackTree, *, until: CodeType | None = None) -> Callable[[], int]:
    """Finds the number of the stack from which it is called."""

    def find() -> int:
        own = threading.get_ident()
        stack = read_stacks((own,), until=until, limit=10_000)[own]
        outside = [code for code, _ in stack].index(find.__code__) + 1
        return tree.find(stack[outside : outside + frames.MAX_DEPTH])

    return find


def lines_of(tree: StackTree, number: int) -> list[tuple[str, int]]:
    """(function, line) of a stack, the innermost first, from what the tree gives to be written."""
    told = tree.take_definitions()
    found = []
    while number:
        parent, frame = told["stacks"][number - told["first_stack"]]
        _, line, function, *_ = told["frames"][frame - told["first_frame"]]
        found.append((function, line))
        number = parent
    return found


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no such instruction before Python 3.11")
def test_a_frame_that_was_only_just_entered_is_left_out() -> None:
    """What took the time was before it: `a @ b`, and then a function that takes none."""

    def numbers() -> Iterator[int]:
        yield 1

    tree = StackTree()
    caller = (outer.__code__, 0)
    for code in (inner.__code__, numbers.__code__):
        begins = [each.offset for each in dis.get_instructions(code) if each.opname == "RESUME"]
        assert begins
        for begin in begins:
            assert tree.find([(code, begin), caller]) == tree.find([caller])
            assert tree.find([(code, begin + 2), caller]) != tree.find([caller])
            assert tree.find([(code, begin)])  # nobody else is there


def test_a_stack_that_is_written_gives_its_lines_back() -> None:
    tree = StackTree()
    number, line = outer(finder(tree))
    lines = lines_of(tree, number)
    assert lines[0] == ("inner", line)
    assert lines[1][0] == "outer"


def test_a_stack_seen_again_has_its_number_and_is_not_written_again() -> None:
    tree = StackTree()
    seen = [(outer(finder(tree))[0], bool(tree.take_definitions())) for _ in range(3)]
    assert seen[1:] == [(seen[0][0], False)] * 2
    assert seen[0][1]


def test_frames_outside_a_workers_loop_are_not_written() -> None:
    tree = StackTree()
    number, line = outer(finder(tree, until=outer.__code__))
    assert lines_of(tree, number) == [("inner", line)]


def test_no_frame_outlives_the_sample() -> None:
    tree = StackTree()
    kept: list[weakref.ref[Tensor]] = []

    def call() -> None:
        tensor = Tensor()
        kept.append(weakref.ref(tensor))
        finder(tree)()

    gc.disable()
    try:
        call()
        assert kept[0]() is None
    finally:
        gc.enable()


def test_stacks_that_are_too_many_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_STACKS", 3)
    tree = StackTree()
    assert outer(finder(tree))[0] == -1
    assert len(tree.take_definitions()["stacks"]) == 3


def recurse(depth: int, take: Callable[[], int]) -> int:
    return take() if depth == 0 else recurse(depth - 1, take)


def test_of_a_deep_recursion_the_innermost_frames_count() -> None:
    tree = StackTree()
    number = recurse(frames.MAX_DEPTH + 50, finder(tree))
    assert len(lines_of(tree, number)) == frames.MAX_DEPTH


@pytest.mark.parametrize("compiled", [True, False])
def test_a_thread_is_sampled_at_its_rate_until_it_is_stopped(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another thread that sleeps: its line, and the sampler's own thread is gone afterwards."""
    if not compiled:
        monkeypatch.setattr(frames, "_compiled", None)
    over = threading.Event()
    slept = threading.Thread(target=over.wait, name="sleeper")
    slept.start()
    sampler = StackSampler(
        lambda: slept.ident or 0, hz=200.0, note=lambda line: pytest.fail(str(line))
    )
    sampler.start()
    deadline = time.monotonic() + 20
    count, seen = 0, []
    while count < 20 and time.monotonic() < deadline:
        line = sampler.take_line()
        if line is not None:
            count += len(line["stack"])
            seen += line.get("frames", [])
        time.sleep(0.01)
    sampler.stop()
    over.set()
    slept.join()
    assert count >= 20
    assert any(frame[2].endswith("wait") for frame in seen)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_collection_on_the_sampling_thread_is_no_price_of_samples(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's garbage is collected by whoever makes the next object."""
    if not compiled:
        monkeypatch.setattr(frames, "_compiled", None)
    kept = [[n] for n in range(1_000_000)]  # 50 ms of a collection
    main, collected = threading.get_ident(), list[int]()

    def training_thread() -> int:
        if threading.get_ident() != main and not collected:
            collected.append(gc.collect())
        return main

    hooks = len(gc.callbacks)
    sampler = StackSampler(training_thread, hz=100.0, note=lambda line: pytest.fail(str(line)))
    sampler.begin_steps()
    sampler.start()
    deadline = time.monotonic() + 20
    while sampler.totals[1] < 10 and time.monotonic() < deadline:
        sum(range(1000))
    sampler.stop()
    assert collected
    assert len(kept) == 1_000_000
    assert sampler.totals[2] < 20_000_000
    assert sampler.pause_ns() < 1_000_000_000
    assert len(gc.callbacks) == hooks


def test_the_jump_back_of_a_loop_is_no_line_of_an_import() -> None:
    source = "import os\nfor n in range(3):\n    m = n\n    if n % 2 and m:\n        m = 7\n"
    code = compile(source, "train.py", "exec")
    lines = {
        frames.line_of((code, at))
        for begin, end, line in code.co_lines()
        if line is None
        for at in range(begin, end, 2)
    }
    assert not lines & {1}
    assert frames.line_of((code, -1)) == 1


def test_code_is_found_by_its_address_in_its_module() -> None:
    def nested() -> None: ...

    for code in (inner.__code__, nested.__code__, StackTree.below.__code__):
        home = vars(sys.modules[StackTree.__module__ if code.co_name == "below" else __name__])
        assert find_codes([(1, id(home)), (id(code), id(home))]) == [code]
        assert find_codes([(id(code), id(vars(sys)))]) == []
    assert find_codes([(1, id(globals())), (id(inner.__code__), 1)]) == []
