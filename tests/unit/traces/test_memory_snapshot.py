"""Snapshots of the CUDA allocator and plain pickles: read as written, and never executed."""

from __future__ import annotations

import io
import os
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.base.errors import TraceFormatError
from haiprof.trace_format import memory_snapshot as plain_pickle
from haiprof.trace_format.memory_snapshot import (
    MemorySnapshot,
    memory_history,
    read_memory_snapshot,
    read_plain_pickle,
    sum_by_line,
)
from tests.commands import Run
from tests.simulated.allocator import MIB, Allocator, Block


def take(allocator: Allocator, size: int) -> Block:
    block = allocator.malloc(size)
    assert block is not None
    return block


@pytest.fixture
def allocator() -> Allocator:
    """Something from before its history; then blocks of two lines, a free one, and a refusal."""
    found = Allocator(64 * MIB)
    take(found, 4 * MIB)
    found.record_history(max_entries=100)
    for _ in range(3):
        take(found, 2 * MIB)
    gone = take(found, 12 * MIB)
    take(found, 300)
    found.free(gone)
    assert found.malloc(60 * MIB) is None
    return found


def write(path: Path, content: object, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    return path


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_snapshot_is_read_in_every_protocol(
    tmp_path: Path, allocator: Allocator, protocol: int
) -> None:
    content = allocator.snapshot()
    found = read_memory_snapshot(write(tmp_path / "s.pickle", content, protocol))
    assert found.segments["size_bytes"].sum() == allocator.reserved
    assert found.segments["allocated_bytes"].sum() == allocator.allocated
    blocks = [block for segment in content["segments"] for block in segment["blocks"]]
    assert found.blocks["address"].to_list() == [block["address"] for block in blocks]
    assert found.blocks["state"].to_list() == [block["state"] for block in blocks]
    assert found.events["action"].to_list()[-1] == "oom"
    assert found.events["device_free_bytes"].drop_nulls().to_list() == [allocator.device_free]
    innermost = found.stacks[found.blocks["stack"].drop_nulls()[0]][-1]
    assert (innermost[0], innermost[2]) == (__file__, "take")


def test_segments_alone_are_a_snapshot_too(tmp_path: Path, allocator: Allocator) -> None:
    found = read_memory_snapshot(write(tmp_path / "s.pickle", allocator.segment_list()))
    assert found.segments.height == len(allocator.segments)
    assert found.events.is_empty()
    content = pickle.dumps(allocator.snapshot())
    assert read_plain_pickle(content) == pickle.load(io.BytesIO(content))


def test_memory_is_told_by_line_and_what_is_older_apart(
    tmp_path: Path, allocator: Allocator
) -> None:
    held = sum_by_line(read_memory_snapshot(write(tmp_path / "s.pickle", allocator.snapshot())))
    assert held["size_bytes"].sum() == allocator.allocated
    assert held.filter(held["line"].is_null())["size_bytes"].to_list() == [4 * MIB]
    (line,) = held["line"].drop_nulls()
    assert line.startswith("test_memory_snapshot.py:")


def test_command_shows_lines_pieces_and_the_refusal(
    tmp_path: Path, allocator: Allocator, run: Run
) -> None:
    path = write(tmp_path / "s.pickle", allocator.snapshot())
    said = run("memory-timeline", path).said
    assert "test_memory_snapshot.py" in said
    assert "(before the history began)" in said
    assert "60.0 MiB" in said
    assert "Held at the peak, by line of your code" in said
    assert "at most 22.0 MiB after event" in said
    assert "no history" in run("memory-timeline", write(path, allocator.segment_list())).out


# -- its history -----------------------------------------------------------------------------------


def history(tmp_path: Path, allocator: Allocator) -> MemorySnapshot:
    return read_memory_snapshot(write(tmp_path / "s.pickle", allocator.snapshot()))


def test_history_gives_peak_and_who_held_it(tmp_path: Path, allocator: Allocator) -> None:
    found = memory_history(history(tmp_path, allocator))
    held = found.levels["allocated_bytes"].to_list()
    assert max(held) == (4 + 3 * 2 + 12) * MIB + 512
    assert held[-1] == allocator.allocated
    assert found.levels["reserved_bytes"].to_list()[-1] == allocator.reserved
    lines = {is_older: row for is_older, *row in found.by_line.drop("device", "line").rows()}
    assert lines[True] == [4 * MIB, 4 * MIB, 4 * MIB, 1, 0], "from before the history"
    assert lines[False] == [0, 18 * MIB + 512, 6 * MIB + 512, 5, 6 * MIB + 512]


def test_ring_that_lost_its_beginning_gives_the_same_levels(tmp_path: Path) -> None:
    ring = {}
    for size in (1000, 12):
        allocator = Allocator(64 * MIB)
        allocator.record_history(max_entries=size)
        blocks = [take(allocator, MIB) for _ in range(8)]
        for block in blocks[:6]:
            allocator.free(block)
        take(allocator, 3 * MIB)
        ring[size] = memory_history(history(tmp_path, allocator)).levels["allocated_bytes"]
    assert len(ring[12]) == 12
    assert ring[12].to_list() == ring[1000].to_list()[-12:]


def test_history_without_times_and_with_odd_entries_is_shown(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    odd = [
        {"action": "alloc", "addr": 8, "size": 5}, {"action": "alloc", "addr": 8, "size": 7},
        {"action": 3, "size": 1}, {"action": "free_completed", "size": 2}, {},
    ]  # fmt: skip
    path = write(tmp_path / "s.pickle", {"segments": [], "device_traces": [odd, [], 4]})
    found = memory_history(read_memory_snapshot(path))
    assert found.levels["allocated_bytes"].to_list() == [7, 9, 9, 7, 7]
    said = run("memory-timeline", path).said
    assert "the lowest level in each quarter of the events: 7 B, 9 B, 7 B, 7 B" in said
    assert "(no line of your code)" in said


# -- what is no snapshot ---------------------------------------------------------------------------


class Runs:
    """Makes a folder in whoever reads its pickle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_nothing_in_a_pickle_is_executed(tmp_path: Path, protocol: int) -> None:
    for content in (Runs(tmp_path / "ran"), {"segments": [Runs(tmp_path / "ran")]}, OSError, 1j):
        path = write(tmp_path / "s.pickle", content, protocol)
        with pytest.raises(TraceFormatError, match=r"not one of plain values|no segments"):
            read_memory_snapshot(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [
    b"\x80\x04Nr\xff\xff\xff\xff",  # a place in the memo: 32 GiB, were that an array
    b"\x80\x04\x8a\xff",
    b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",  # bytearray of 1 TiB
    b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b".",
    b"\x80\x04(((((",
    b"\x80\x04]]a",
    b"\x80\x04\x82\x01.",  # the extension registry
    b"\x80\x04P1\n.",
    b"",
])  # fmt: skip
def test_hostile_bytes_are_an_error_and_take_no_memory(content: bytes) -> None:
    with pytest.raises(TraceFormatError):
        read_plain_pickle(content)


def test_lists_that_hold_each_other_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("haiprof.trace_format.memory_snapshot._ITEM_LIMIT", 100_000)
    deep: list[Any] = []
    for _ in range(60):  # 2 to the power of 60 leaves, a hundred objects
        deep = [deep, deep]
    itself: list[Any] = []
    itself.append(itself)
    blocks: list[Any] = [{"size": 1, "state": "inactive", "frames": deep}] * 6000
    wide = [{"device": 0, "total_size": 1, "blocks": blocks}] * 6000
    for content in ({"segments": deep}, {"segments": itself}, {"segments": wide}):
        with pytest.raises(TraceFormatError):
            read_memory_snapshot(write(tmp_path / "s.pickle", content))


@pytest.mark.parametrize("segment", [
    {"total_size": -1}, {"total_size": 1 << 60}, {"total_size": "1"},
    {"blocks": [{"size": None}]}, {"blocks": [7]},
])  # fmt: skip
def test_sizes_that_are_none_are_an_error(tmp_path: Path, segment: dict[str, object]) -> None:
    with pytest.raises(TraceFormatError):
        read_memory_snapshot(write(tmp_path / "s.pickle", {"segments": [segment]}))


def test_odd_fields_are_missing_and_no_error(tmp_path: Path) -> None:
    segment = {"device": "x", "address": 1 << 70, "segment_pool_id": [None], "stream": 1.5,
               "blocks": [{"size": 8, "frames": [{"line": "x"}, 3], "state": 5}, {}]}  # fmt: skip
    found = read_memory_snapshot(write(tmp_path / "s.pickle", {"segments": [segment]}))
    assert found.segments["address"].to_list() == [None]
    assert found.stacks == ((),)
    assert sum_by_line(found).is_empty()


KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none())
VALUES = st.recursive(
    st.one_of(KEYS, st.floats(allow_nan=False), st.binary(max_size=300)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.tuples(inner, inner), st.dictionaries(KEYS, inner)
    ),
    max_leaves=30,
)
READERS = [
    "Python",
    pytest.param(
        "compiled",
        marks=pytest.mark.skipif(plain_pickle._compiled is None, reason="not compiled here"),
    ),
]


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(plain_pickle, "_compiled", None)
    return str(request.param)


def compiled_takes(content: bytes) -> bool:
    assert plain_pickle._compiled is not None
    return bool(plain_pickle._compiled.is_plain(content))


def outcome(content: bytes) -> Any:
    try:
        return repr(read_plain_pickle(content))
    except TraceFormatError:
        return "refused"


@pytest.mark.skipif(plain_pickle._compiled is None, reason="not compiled here")
@given(VALUES, st.sampled_from([3, 4, 5]))
def test_what_pickle_writes_the_compiled_reader_takes(value: object, protocol: int) -> None:
    content = pickle.dumps([value, value], protocol)
    assert compiled_takes(content)
    assert repr(read_plain_pickle(content)) == repr([value, value])


@pytest.mark.skipif(plain_pickle._compiled is None, reason="not compiled here")
@given(VALUES, st.sampled_from([3, 4]), st.randoms(use_true_random=False))
def test_damaged_ones_are_read_alike_or_by_python_alone(
    value: object, protocol: int, chance: random.Random
) -> None:
    content = bytearray(pickle.dumps([value, value], protocol))
    for _ in range(chance.randint(1, 3)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    if not compiled_takes(bytes(content)):
        return
    native = outcome(bytes(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_pickle, "_compiled", None)
        assert outcome(bytes(content)) == native


@pytest.mark.parametrize("depth", [1, 500_000])
def test_tuples_as_keys_are_refused_and_never_overflow_the_stack(reader: str, depth: int) -> None:
    nested = b"\x80\x02})" + b"\x85" * depth + b"K\x01s."
    in_one = b"\x80\x02}()" + b"\x85" * depth + b"K\x01u."
    for content in (nested, in_one):
        with pytest.raises(TraceFormatError, match="a tuple is the key"):
            read_plain_pickle(content)


def test_a_place_of_the_memo_out_of_order_takes_no_memory(reader: str) -> None:
    assert read_plain_pickle(b"\x80\x02]r\xff\xff\xff\x7fj\xff\xff\xff\x7f0.") == []
