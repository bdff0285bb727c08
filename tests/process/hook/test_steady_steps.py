"""Steps that are all alike: followed quickly, they are counted as when each span is looked at."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from haiprof.in_job.patches import State
from haiprof.in_job.recorder import Recorder
from haiprof.in_job.windows.beside_profiler import PhaseTimes
from haiprof.in_job.windows.driver import Tracer
from haiprof.in_job.windows.step_counter import StepCounter
from haiprof.run_format import schema as s
from haiprof.run_format.layout import RunPaths


class Edges:
    """Takes the place of the windows: every edge of a step, once each."""

    over = holds_profiler = False
    asleep_until = 0

    def __init__(self) -> None:
        self.seen: list[tuple[int, bool]] = []

    def boundary(self, number: int, begins: bool) -> None:
        if self.seen[-1:] != [(number, begins)]:
            self.seen.append((number, begins))

    def finish(self) -> None:
        pass

    @property
    def phases(self) -> PhaseTimes | None:
        """Two steps in twenty-three are recorded: each of their spans is looked at."""
        recorded = bool(self.seen) and self.seen[-1][0] % 23 in (20, 21)
        return PhaseTimes() if recorded else None


class Loader:
    """An iterator over a dataset, as torch's are seen from outside."""

    def __init__(self, dataset: object, batches: int) -> None:
        self._dataset, self._index_sampler, self._num_yielded = dataset, range(batches), 0


class Module:
    """What a forward span is of."""

    training = True


class Told:
    """The spans of a job, told to something that counts its steps."""

    def begin(self, kind: int, target: Any = None) -> Any:
        """A span begins; without an end where it is left."""
        raise NotImplementedError

    def end(self, kind: int, begun: Any) -> None:
        raise NotImplementedError

    def span(self, kind: int, target: Any = None, inside: Callable[[], None] | None = None) -> None:
        begun = self.begin(kind, target)
        if inside is not None:
            inside()
        if kind == s.DATA and isinstance(target, Loader):
            target._num_yielded += 1
        self.end(kind, begun)


class Counted(Told):
    """A counter alone: the tracer is held to it."""

    def __init__(self) -> None:
        self.edges = Edges()
        self._counter = StepCounter(self.edges.boundary, torch.is_grad_enabled)

    def begin(self, kind: int, target: Any = None) -> Any:
        self._counter.begin(kind, target)

    def end(self, kind: int, begun: Any) -> None:
        self._counter.ends.get(kind, self._counter.pop)()

    def count(self) -> int:
        return self._counter.count


class Job(Told):
    """A tracer, told as the hooks' wrappers do."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        recorder = Recorder(RunPaths(folder), time_s=0.0, warmup_s=0.0)
        recorder.armed = True
        self.state = State(recorder, lambda: False)
        self.tracer = Tracer({"steps": [10**9, 10**9 + 1]}, recorder=recorder, state=self.state)
        self.edges = Edges()
        self.tracer._windows = self.edges  # type: ignore[assignment]
        self.tracer.active = True
        self.state.watch = self.tracer
        self.quick_spans = 0

    def begin(self, kind: int, target: Any = None) -> Any:
        begun = self.state.begin(kind, target)
        self.quick_spans += self.tracer._steady.follows
        return begun

    def end(self, kind: int, begun: Any) -> None:
        self.state.end(begun)

    def count(self) -> int:
        self.tracer._steady.leave()
        return self.tracer._counter.count


Act = Callable[["Counted | Job"], None]


def programme(seed: int) -> Iterator[Act]:
    """A job: mostly steps that are alike, and what interrupts them."""
    chosen = random.Random(seed)
    dataset, other = object(), object()
    module, frozen = Module(), Module()
    optimizers = [object() for _ in range(chosen.choice([1, 1, 2]))]
    accumulate, by_loader = chosen.choice([1, 1, 1, 2, 3]), chosen.random() < 0.8
    batches = chosen.choice([8, 20, 40]) * accumulate
    for _ in range(chosen.choice([2, 4, 6])):
        loader = Loader(dataset, batches)
        yield lambda job: job.span(s.DATA_ITER, SimpleNamespace(dataset=dataset))
        for number in range(batches // accumulate):
            yield from step(loader if by_loader else None, module, optimizers, accumulate)
            event = chosen.random() * 25
            if event < 1:
                yield from interruption(chosen, loader, module, frozen, other, optimizers)
            if number > 30 and event < 2:
                break
        else:
            if by_loader:
                yield partial(spans, kind=s.DATA, target=loader)


def spans(job: Counted | Job, *, kind: int, target: Any) -> None:
    job.span(kind, target)


def step(
    loader: Loader | None, module: Any, optimizers: list[Any], accumulate: int
) -> Iterator[Act]:
    for optimizer in optimizers:
        for _ in range(accumulate):
            if loader is not None and optimizer is optimizers[0]:
                yield lambda job: job.span(s.DATA, loader)
            yield lambda job: job.span(s.FORWARD, module)
            yield lambda job: job.span(s.BACKWARD)
        yield partial(spans, kind=s.OPTIMIZER, target=optimizer)


def interruption(
    chosen: random.Random, loader: Loader, module: Any, frozen: Any, other: Any, optimizers: Any
) -> Iterator[Act]:
    first = optimizers[0]
    kind = chosen.randrange(8)
    if kind == 0:  # an evaluation
        own = Loader(other, 3)
        yield lambda job: setattr(module, "training", False)
        for _ in range(3):
            yield lambda job: job.span(s.DATA, own)
            yield lambda job: job.span(s.EVAL, module)
        yield lambda job: job.span(s.DATA, own)
        yield lambda job: setattr(module, "training", True)
    elif kind == 1:  # a closure
        yield lambda job: job.span(s.DATA, loader)
        yield lambda job: job.span(s.OPTIMIZER, first, lambda: closure(job, module))
    elif kind == 2:  # an optimizer inside backward
        yield lambda job: job.span(s.FORWARD, module)
        yield lambda job: job.span(s.BACKWARD, None, lambda: job.span(s.OPTIMIZER, first))
    elif kind == 3:  # one that raises: its end never comes
        yield lambda job: job.span(s.FORWARD, module)
        yield lambda job: job.begin(s.OPTIMIZER, first)
    elif kind == 4:
        yield lambda job: job.span(s.SAVE)
    elif kind == 5:  # a scaler, which skips its step
        yield lambda job: job.span(s.FORWARD, module)
        yield lambda job: job.span(s.BACKWARD)
        yield lambda job: job.span(s.SCALER)
    elif kind == 6:  # a step of another module
        yield lambda job: job.span(s.FORWARD, frozen)
        yield lambda job: job.span(s.BACKWARD)
        yield lambda job: job.span(s.OPTIMIZER, object())
    else:  # a batch that is left out
        yield lambda job: job.span(s.DATA, loader)
        yield lambda job: job.span(s.DATA, loader)


def closure(job: Counted | Job, module: Any) -> None:
    job.span(s.FORWARD, module)
    job.span(s.BACKWARD)


@pytest.mark.parametrize("seeds", [range(start, start + 25) for start in range(0, 200, 25)])
def test_steps_are_those_of_a_counter_that_looks_at_each_span(seeds: range, tmp_path: Path) -> None:
    quick_spans = 0
    for seed in seeds:
        plain, quick = Counted(), Job(tmp_path / str(seed))
        for job in (plain, quick):
            for act in programme(seed):
                act(job)
        assert quick.edges.seen == plain.edges.seen, f"seed {seed}"
        assert quick.count() == plain.count() > 0, f"seed {seed}"
        quick_spans += quick.quick_spans
    assert quick_spans > 500


def test_a_fetch_without_gradients_is_none_of_the_training(tmp_path: Path) -> None:
    plain, quick = Counted(), Job(tmp_path / "run")
    for job in (plain, quick):
        loader, module, optimizers = Loader(object(), 10**6), Module(), [1]
        for _ in range(20):
            for act in step(loader, module, optimizers, 1):
                act(job)
        with torch.no_grad():
            job.span(s.DATA, loader)
            job.span(s.NOGRAD, module)
    assert plain.edges.seen == quick.edges.seen
    assert plain.edges.seen[-1] == (20, False)
    assert quick.quick_spans > 10


def test_another_threads_wish_is_seen_at_the_next_span(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    loader, module = Loader(object(), 10**6), Module()
    for _ in range(20):
        for act in step(loader, module, [1], 1):
            act(job)
    assert job.tracer._steady.follows
    job.state.owner = 0  # the wish comes from another thread than the job's
    job.edges.holds_profiler = True
    assert job.tracer._puts_off()
    job.span(s.DATA, loader)
    assert not job.tracer.active
