"""Device time by events on a fake stream that, like CUDA's, is asynchronous to the host."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from haiprof.in_job import device
from haiprof.in_job.device import MAX_PENDING, MAX_SPANS, DeviceTimer
from haiprof.run_format.schema import BACKWARD, DATA, DEVICE, EVAL, FORWARD, OPTIMIZER, SCALER


class FakeStream:
    """A stream: marks get their time when the device reaches them, not when they are recorded."""

    def __init__(self) -> None:
        self.host_ms = 0.0
        self.queued_ms = 0.0
        self.reached_ms = 0.0
        self.capturing = False
        self.created = 0
        stream = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                stream.created += 1
                self.at_ms: float | None = None

            def record(self) -> None:
                assert not stream.capturing, "an event inside a graph capture"
                self.at_ms = stream.queued_ms = max(stream.queued_ms, stream.host_ms)

            def query(self) -> bool:
                assert not stream.capturing, "a query inside a graph capture"
                assert self.at_ms is not None
                return self.at_ms <= stream.reached_ms

            def elapsed_time(self, end: Event) -> float:
                if not (self.query() and end.query()):
                    raise RuntimeError("device not ready")
                assert self.at_ms is not None
                assert end.at_ms is not None
                return end.at_ms - self.at_ms

        self.torch = SimpleNamespace(
            cuda=SimpleNamespace(Event=Event, is_current_stream_capturing=lambda: self.capturing)
        )

    def run(self, ms: float) -> None:
        """Queues work, which begins when what was queued before is done."""
        self.queued_ms = max(self.queued_ms, self.host_ms) + ms

    def catch_up(self) -> None:
        """The device does all that is queued."""
        self.reached_ms = self.queued_ms

    def synchronize(self) -> None:
        """The host waits for that."""
        self.catch_up()
        self.host_ms = max(self.host_ms, self.queued_ms)


class Timer:
    """A DeviceTimer on a fake stream."""

    def __init__(self) -> None:
        self.stream = FakeStream()
        self.records: list[bytes] = []
        self.device = DeviceTimer(self.stream.torch, self.records)
        self.end_ns = 0

    def span(self, kind: int, ms: float) -> None:
        end = self.device.begin(kind)
        self.stream.run(ms)
        if end is not None:
            end()

    def close(self) -> None:
        self.end_ns += 1
        self.device.close(self.end_ns)

    def step(self) -> None:
        for kind, ms in ((DATA, 1.0), (FORWARD, 2.0), (BACKWARD, 4.0)):
            self.span(kind, ms)
            self.stream.run(0.5)
        self.span(OPTIMIZER, 0.25)
        self.close()

    def rows(self) -> list[tuple[Any, ...]]:
        return [DEVICE.struct.unpack(record) for record in self.records]


MS = 1e6


def test_interval_holds_every_phase_and_their_gaps() -> None:
    timer = Timer()
    timer.step()
    timer.step()
    timer.stream.catch_up()
    timer.step()
    first, second = timer.rows()
    assert first[:7] == (1, 1 * MS, 2 * MS, 4 * MS, 0.25 * MS, 8.75 * MS, 0)
    assert second[:7] == (2, 1 * MS, 2 * MS, 4 * MS, 0.25 * MS, 8.75 * MS, 0)


def test_nothing_is_written_before_the_device_is_done() -> None:
    timer = Timer()
    timer.step()
    assert timer.records == []


def test_nested_spans_count_once_for_the_inner() -> None:
    timer = Timer()
    scaler = timer.device.begin(SCALER)
    timer.stream.run(1.0)
    optimizer = timer.device.begin(OPTIMIZER)
    timer.span(FORWARD, 2.0)
    timer.span(BACKWARD, 3.0)
    timer.stream.run(0.5)
    assert optimizer is not None
    assert scaler is not None
    optimizer()
    scaler()
    timer.close()
    timer.stream.catch_up()
    timer.close()
    assert timer.rows()[0][1:5] == (0, 2 * MS, 3 * MS, 1.5 * MS)


def test_capture_is_left_alone_and_counted_as_missing() -> None:
    timer = Timer()
    timer.stream.capturing = True
    timer.span(FORWARD, 2.0)
    timer.stream.capturing = False
    timer.span(BACKWARD, 1.0)
    timer.close()
    timer.stream.catch_up()
    timer.close()
    assert timer.rows()[0][6] == 1


def test_evaluation_does_not_lengthen_the_interval() -> None:
    timer = Timer()
    timer.step()
    timer.span(EVAL, 100.0)
    timer.step()
    timer.stream.catch_up()
    timer.step()
    assert timer.rows()[1][5] == 8.75 * MS


def test_device_that_never_answers_gives_missing_and_bounded_memory() -> None:
    timer = Timer()
    for _ in range(MAX_PENDING + 10):
        timer.step()
    rows = timer.rows()
    assert rows
    assert all(row[6] > 0 and math.isnan(row[5]) for row in rows)


def test_events_are_pooled() -> None:
    timer = Timer()
    for _ in range(100):
        timer.step()
        timer.stream.catch_up()
    assert timer.stream.created < 40


def test_step_that_raised_leaves_no_mark_behind() -> None:
    timer = Timer()
    assert timer.device.begin(OPTIMIZER) is not None  # never ended: the step ran out of memory
    for _ in range(3):
        timer.step()
    timer.stream.catch_up()
    timer.step()
    assert all(row[1:5] == (1 * MS, 2 * MS, 4 * MS, 0.25 * MS) for row in timer.rows())


def test_spans_that_never_end_take_bounded_memory() -> None:
    timer = Timer()
    for _ in range(3 * MAX_SPANS):
        timer.device.begin(FORWARD)  # each raises, and the job goes on without an optimizer
    timer.close()
    timer.stream.catch_up()
    timer.step()
    assert len(timer.device._pool) <= 2 * MAX_SPANS


def test_end_of_an_interval_alone_tells_no_time() -> None:
    timer = Timer()
    timer.step()
    timer.device.begin(EVAL)
    timer.close()
    timer.stream.catch_up()
    timer.close()
    assert all(math.isnan(value) for value in (timer.rows()[1][5], *timer.rows()[1][7:]))


def test_device_is_asked_nothing_while_a_graph_is_captured() -> None:
    timer = Timer()
    timer.step()
    timer.stream.catch_up()
    timer.stream.capturing = True
    timer.step()
    assert timer.records == []
    timer.stream.capturing = False
    timer.step()
    timer.stream.catch_up()
    timer.step()
    assert [row[6] > 0 for row in timer.rows()] == [False, True, False]


class AsynchronousJob:
    """A training loop whose host and device take times of their own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, drift_ratio: float = 0.0) -> None:
        self.timer = Timer()
        self.stream = self.timer.stream
        self.busy_ms: list[float] = []
        monkeypatch.setattr(
            device, "monotonic_ns", lambda: int(self.stream.host_ms * (1 + drift_ratio) * 1e6)
        )

    def step(self, host_ms: float, device_ms: float, *, waits: bool, after_ms: float = 0.0) -> None:
        """Ten calls in forward and ten in backward, the optimizer, perhaps `.item()`."""
        for kind in (FORWARD, BACKWARD):
            end = self.timer.device.begin(kind)
            for _ in range(10):
                self.stream.host_ms += host_ms / 20
                self.stream.run(device_ms / 20)
            assert end is not None
            end()
        self.timer.span(OPTIMIZER, 0.0)
        self.timer.close()
        if waits:
            self.stream.synchronize()
        self.stream.host_ms += after_ms
        self.stream.reached_ms = max(self.stream.reached_ms, self.stream.host_ms)

    def idle_ms(self) -> list[float]:
        self.stream.catch_up()
        self.timer.close()
        return [row[7] / 1e6 for row in self.timer.rows()[2:-1]]


@pytest.mark.parametrize("waits", [True, False])
def test_device_that_has_work_queued_was_not_idle(
    monkeypatch: pytest.MonkeyPatch, *, waits: bool
) -> None:
    job = AsynchronousJob(monkeypatch)
    for _ in range(30):
        job.step(10.0, 50.0, waits=waits, after_ms=1.0)
    idle = job.idle_ms()
    lags = [row[8] / 1e6 for row in job.timer.rows()]
    assert len(idle) >= 27
    if waits:  # 1.5 ms between two steps, and 5 ms in which forward gets ahead
        assert lags[5] == pytest.approx(40.5, abs=0.6)
        assert all(1.5 <= each <= 7.0 for each in idle)
    else:
        assert set(idle) == {0.0}


def test_device_that_waits_for_the_host_was_idle_at_least_as_long_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = AsynchronousJob(monkeypatch)
    for _ in range(30):
        job.step(50.0, 10.0, waits=True, after_ms=20.0)
    assert all(60.0 <= each <= 70.001 for each in job.idle_ms())


@pytest.mark.parametrize("drift_ratio", [3e-5, -3e-5])
def test_clocks_that_go_apart_make_no_device_busy(
    monkeypatch: pytest.MonkeyPatch, drift_ratio: float
) -> None:
    job = AsynchronousJob(monkeypatch, drift_ratio=drift_ratio)
    for _ in range(2000):
        job.step(50.0, 10.0, waits=True)
    assert all(each >= 40.0 for each in job.idle_ms())


def test_scaler_around_an_optimizer_belongs_to_the_interval_that_the_optimizer_ends() -> None:
    timer = Timer()
    scaler = timer.device.begin(SCALER)
    timer.stream.run(1.0)
    timer.span(OPTIMIZER, 2.0)
    timer.close()
    assert scaler is not None
    scaler()
    timer.step()
    timer.stream.catch_up()
    timer.close()
    assert [row[4] for row in timer.rows()[:2]] == [3 * MS, 0.25 * MS]
