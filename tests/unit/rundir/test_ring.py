"""The ring: both recorders write the same one, and whatever bytes it holds are read with care."""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from haiprof.in_job import spans
from haiprof.run_format import ring
from haiprof.run_format.schema import (
    BACKWARD,
    DATA,
    DATA_END,
    FORWARD,
    GC,
    KIND_NAMES,
    OPTIMIZER,
    TAG_BITS,
)

MakeSpans = Callable[[], Any]
KINDS = {"plain": spans.SpanBuffer, "made": spans.make_spans}


class Memory:
    """Bytes that a ring is written to, with the header that `RingMemory` gives it."""

    def __init__(self) -> None:
        self.bytes = ctypes.create_string_buffer(ring.RING_BYTES)
        self.words = memoryview(self.bytes).cast("B").cast("q")
        self.words[ring.MAGIC], self.words[ring.VERSION] = ring.RING_MAGIC, ring.RING_VERSION
        self.words[ring.CAPACITY], self.words[ring.STATE] = ring.RING_CAPACITY, ring.RECORDING
        self.words[ring.CLOSES_NS] = ring.NEVER

    @property
    def address(self) -> int:
        return ctypes.addressof(self.bytes)

    def read(self) -> ring.Ring:
        found = ring.read_ring(self.bytes.raw)
        assert found is not None
        return found


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest) -> MakeSpans:
    return KINDS[request.param]


def words_of(data: bytes) -> list[tuple[int, int]]:
    words = array("q", data)
    return list(zip(words[::2], words[1::2], strict=True))


def step(buffer: Any, at: int) -> None:
    for place, kind in enumerate((DATA, FORWARD, BACKWARD, OPTIMIZER)):
        buffer.put(at + 10 * place, at + 10 * place + 5, kind | 3 << TAG_BITS)


def test_what_was_put_in_before_and_after_the_ring_is_in_it(make: MakeSpans) -> None:
    buffer, memory = make(), Memory()
    step(buffer, 1000)
    buffer.begin(FORWARD)
    buffer.attach(memory.address)
    step(buffer, 2000)
    found = memory.read()
    assert list(found.records) == words_of(buffer.take())
    assert (len(found.records), found.count, found.step_count) == (8, 8, 2)
    assert list(found.open_ns) == ["forward"]


def test_both_take_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = random.Random(1)
    rows = [
        (numbers.randrange(1 << 50), numbers.randrange(1 << 50), numbers.randrange(1 << 12))
        for _ in range(3000)
    ]
    taken = []
    for make in KINDS.values():
        buffer, memory = make(), Memory()
        buffer.attach(memory.address)
        for row in rows:
            buffer.put(*row)
        assert len(buffer) == 3000
        taken.append((buffer.take(), memory.bytes.raw))
        assert (len(buffer), buffer.take()) == (0, b"")
    assert taken[0] == taken[1]


def test_spans_that_are_open_are_told_with_their_start(make: MakeSpans) -> None:
    buffer, memory = make(), Memory()
    buffer.attach(memory.address)
    outer, inner = buffer.begin(OPTIMIZER), buffer.begin(BACKWARD)
    assert memory.read().open_ns == {"backward": inner, "optimizer": outer}
    end = buffer.end(inner, BACKWARD)
    assert memory.read().open_ns == {"optimizer": outer}
    assert memory.read().records == ((inner << TAG_BITS | BACKWARD, end << TAG_BITS),)
    buffer.end(outer, OPTIMIZER)
    start = buffer.begin(DATA)
    buffer.end(start, DATA_END)
    assert memory.read().open_ns == {}


def test_the_oldest_are_overwritten_and_counted(make: MakeSpans) -> None:
    buffer, memory = make(), Memory()
    buffer.attach(memory.address)
    for number in range(1, ring.RING_CAPACITY + 101):
        buffer.put(number, number, FORWARD)
    memory.words[ring.SETTLED] = 40
    found = memory.read()
    assert found.overwritten == 60
    assert found.records[0] == (101 << TAG_BITS | FORWARD, 101 << TAG_BITS)
    assert len(found.records) == ring.RING_CAPACITY
    assert len(buffer) == ring.RING_CAPACITY + 100


def test_a_forked_child_writes_no_more_into_it(make: MakeSpans) -> None:
    buffer, memory = make(), Memory()
    buffer.attach(memory.address)
    step(buffer, 1000)
    before = memory.bytes.raw
    buffer.detach()
    step(buffer, 2000)
    buffer.end(buffer.begin(FORWARD), FORWARD)
    assert memory.bytes.raw == before


def test_what_the_file_has_is_not_lacking(make: MakeSpans) -> None:
    buffer, memory = make(), Memory()
    buffer.attach(memory.address)
    for number in range(5):
        step(buffer, 1000 * (number + 1))
    data = buffer.take()
    assert memory.read().lacking(data[: 16 * 13]) == words_of(data)[13:]
    assert memory.read().lacking(data) == []
    assert memory.read().lacking(b"") == words_of(data)
    # What the disk refused in between stays away: it would come in the wrong order.
    assert memory.read().lacking(data[: 16 * 4] + data[16 * 8 :]) == []


def test_only_the_recording_is_kept(make: MakeSpans) -> None:
    buffer, memory = make(), Memory()
    buffer.attach(memory.address)
    for number in range(5):
        step(buffer, 1000 * (number + 1))
    words = words_of(buffer.take())
    memory.words[ring.OPENS_NS] = 2000
    assert memory.read().lacking(b"") == words[4:]
    memory.words[ring.CLOSES_NS] = 3010  # in the third step, whose end is at 3035
    assert memory.read().lacking(b"") == words[4:12]
    memory.words[ring.OPENS_NS] = ring.NEVER
    assert memory.read().lacking(b"") == []


def test_a_record_that_was_being_written_is_left_out() -> None:
    buffer, memory = spans.make_spans(), Memory()
    buffer.attach(memory.address)
    step(buffer, 1000)
    memory.words[ring.HEADER_WORDS + 8] = 5000 << TAG_BITS | GC  # its end is not there yet
    assert memory.read().records == tuple(words_of(buffer.take()))


def test_bytes_that_are_no_ring_are_refused() -> None:
    good = Memory().bytes.raw
    assert ring.read_ring(good) is not None
    assert ring.read_ring(good[:-1]) is None
    assert ring.read_ring(b"") is None
    assert ring.read_ring(bytes(ring.RING_BYTES)) is None
    for place in (ring.MAGIC, ring.VERSION, ring.CAPACITY, ring.STATE, ring.COUNT, ring.SETTLED):
        memory = Memory()
        memory.words[place] = -5
        assert ring.read_ring(memory.bytes.raw) is None


def test_any_bytes_give_sound_spans_or_none() -> None:
    numbers = random.Random(2)
    memory = Memory()
    for place in range(ring.COUNT, ring.RING_BYTES // 8):
        memory.words[place] = numbers.getrandbits(64) - (1 << 63)
    for place in range(ring.COUNT, ring.STEPS + 1):
        memory.words[place] = numbers.getrandbits(63)
    memory.words[ring.STATE] = ring.RECORDING
    found = memory.read()
    assert all(start >> TAG_BITS <= end >> TAG_BITS for start, end in found.records)
    assert {start & 63 for start, _ in found.records} <= KIND_NAMES.keys()
    assert found.lacking(numbers.randbytes(1600)) is not None


def test_kinds_have_room_for_their_open_spans() -> None:
    assert max(KIND_NAMES) < ring.OPEN_COUNT
