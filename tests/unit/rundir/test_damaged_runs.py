"""A damaged run gives its readable part with a note, or an error that names the file."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof.base.errors import HaiprofError, RunFormatError
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import RecordFile, read_json, read_lines, read_records
from haiprof.run_format.schema import SCHEMA_VERSION
from tests.sampling import first_of, sample
from tests.unit.rundir.small_run import read_all, write_small_run

FILES = (
    "run.json", "ranks/0/rank.json", "ranks/0/phases.rec", "ranks/0/device.rec",
    "ranks/0/events.jsonl", "nodes/node0/agent.json", "nodes/node0/events.jsonl",
    "nodes/node0/host.rec", "nodes/node0/process.rec", "nodes/node0/gpu.rec",
)  # fmt: skip
READERS: dict[str, Callable[[Path], object]] = {
    ".json": read_json,
    ".jsonl": read_lines,
    ".rec": read_records,
}
# The reader is tried on every cut. The slower analysis knows a file by what its reader gives: it
# is tried on each that differs from the last, and on some of the others.
HEADER_STRIDE, REPORT_STRIDE, WIDE_STRIDE, BODY_STRIDE = 97, 17, 29, 7
# One less than there are hostile values: each field meets one of them, the next field another.
SPARSE = 17
HOSTILE_VALUES: tuple[object, ...] = (
    None, True, -1, 1.5, 1e300, 10**30, -(10**30), "", "x", "\ud800", [], [[]], {}, {"a": {}},
    float("nan"), float("inf"), [None] * 5, "9" * 400,
)  # fmt: skip
HARM = (
    b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b'{"version": 1e999}', b"\xff\xfe{",
    b"null", b"[]", b"NaN",
)  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    return write_small_run(tmp_path / "run")


def test_whole_run_has_no_notes_on_damage(run: RunPaths) -> None:
    steps, notes = read_all(run.root)
    assert steps == 2
    assert notes == []


@pytest.mark.sampled
@pytest.mark.parametrize("name", FILES)
def test_run_with_a_file_cut_at_any_byte_is_read_with_a_note(run: RunPaths, name: str) -> None:
    path = run.root / name
    content = path.read_bytes()
    body = content.find(b"\n") + 1 if name.endswith(".rec") else 0
    for length in sample(cuts(path, body), every=SPARSE):
        path.write_bytes(content[:length])
        steps, notes = read_all(run.root)
        assert steps in (0, 1, 2), "the other files are still readable"
        whole = name.endswith(".rec") and (length - body) % read_size(content[:body]) == 0
        whole |= name.endswith(".jsonl") and (length == 0 or b"\n" in content[length - 1 : length])
        whole |= name.endswith(".jsonl") and content[length : length + 1] == b"\n"
        if name != "nodes/node0/agent.json" and not whole:
            assert any(name in note for note in notes), length


def cuts(path: Path, body: int) -> list[int]:
    """Lengths to cut a file to: each where its reader gives something else, and some more.

    The reader itself is tried on every cut: it reads, or its error names the file.
    """
    content = path.read_bytes()
    wide = path.suffix == ".rec" and "nodes" in path.parts  # records of up to 400 bytes
    stride = REPORT_STRIDE if path.suffix == ".json" else WIDE_STRIDE if wide else BODY_STRIDE
    lengths = {*range(0, body, HEADER_STRIDE), *range(body, len(content) - 1, stride)}
    longer, messages = None, []
    for length in reversed(range(len(content))):
        os.truncate(path, length)
        try:
            given = READERS[path.suffix](path)
            outcome = (given.count, bool(given.notes)) if isinstance(given, RecordFile) else given
        except RunFormatError as error:
            messages.append(str(error))
            outcome = None
        if outcome != longer and body <= length < len(content) - 2:
            lengths |= {length + 1}
        longer = outcome
    assert all(str(path) in message for message in messages)
    path.write_bytes(content)
    return sorted(lengths)


def read_size(header: bytes) -> int:
    return int(json.loads(header)["record_bytes"]) if header else 1


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["gone", "empty", "folder", "loop", "pipe", "device", "noise"])
def test_run_with_a_foreign_thing_in_place_of_a_file(run: RunPaths, name: str, how: str) -> None:
    path = run.root / name
    path.unlink()
    noise = random.Random(1).randbytes(5_000)
    if how == "folder":
        path.mkdir()
    elif how in ("loop", "device"):
        path.symlink_to(path if how == "loop" else "/dev/zero")
    elif how == "pipe":
        os.mkfifo(path)
    elif how != "gone":
        path.write_bytes(noise if how == "noise" else b"")
    steps, notes = read_all(run.root)
    if name == "run.json" and how == "gone":
        assert steps == -1
        return
    assert steps == (0 if name.endswith("phases.rec") else 2)
    optional = how in ("gone", "empty") and name.endswith(".jsonl")
    optional |= how == "gone" and name.endswith(".rec") and not name.endswith("phases.rec")
    if not optional and not name.endswith("agent.json"):
        assert any(name in note for note in notes)


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".rec")])
def test_run_with_noise_for_records_is_read(run: RunPaths, name: str) -> None:
    path = run.root / name
    header = path.read_bytes().split(b"\n")[0] + b"\n"
    for seed in sample(range(25), every=SPARSE):
        path.write_bytes(header + random.Random(seed).randbytes(64 * 40 + seed))
        steps, _ = read_all(run.root)
        assert steps >= 0


@pytest.mark.sampled
@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".rec")])
def test_run_with_a_changed_header_is_read_or_refused(run: RunPaths, name: str) -> None:
    path = run.root / name
    line, _, body = path.read_bytes().partition(b"\n")
    header = json.loads(line)
    for key, value in sample(itertools.product(header, HOSTILE_VALUES), every=SPARSE):
        path.write_bytes(json.dumps({**header, key: value}).encode() + b"\n" + body)
        read_all(run.root)
    for clock in ({"wall_ns": 2**63, "mono_ns": 0}, {"wall_ns": "1", "mono_ns": 0}):
        path.write_bytes(json.dumps({**header, "clock": clock}).encode() + b"\n" + body)
        assert any(name in note for note in read_all(run.root)[1])


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["run.json", "ranks/0/rank.json"])
def test_run_with_wrong_types_in_a_report_is_read_or_refused(run: RunPaths, name: str) -> None:
    path = run.root / name
    report = json.loads(path.read_bytes())
    for key, value in sample(itertools.product(report, HOSTILE_VALUES), every=SPARSE):
        path.write_text(json.dumps({**report, key: value}), encoding="utf-8")
        steps, _ = read_all(run.root)
        assert steps in ((-1, 2) if key == "version" else (2,))


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["ranks/0/events.jsonl", "nodes/node0/events.jsonl"])
def test_run_with_wrong_types_in_an_event_is_read(run: RunPaths, name: str) -> None:
    path = run.root / name
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    places = [(place, key) for place, line in enumerate(lines) for key in line]
    for (place, key), value in sample(itertools.product(places, HOSTILE_VALUES), every=SPARSE):
        changed = [*lines[:place], {**lines[place], key: value}, *lines[place + 1 :]]
        path.write_text("\n".join(map(json.dumps, changed)), encoding="utf-8")
        assert read_all(run.root)[0] == 2


@pytest.mark.parametrize("content", first_of(HARM, HARM[0], HARM[-1]))
def test_json_that_means_harm_is_damage(run: RunPaths, content: bytes) -> None:
    for name in FILES:
        path = run.root / name
        before = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert read_all(run.root)[0] in (0, 2)
        path.write_bytes(before)


def test_run_of_another_version_is_refused_with_a_hint(run: RunPaths) -> None:
    manifest = json.loads(run.manifest.read_bytes())
    run.manifest.write_text(
        json.dumps({**manifest, "version": SCHEMA_VERSION + 1}), encoding="utf-8"
    )
    steps, notes = read_all(run.root)
    assert steps == -1
    assert f"version {SCHEMA_VERSION + 1}" in notes[0]


def test_rank_of_another_version_is_a_note(run: RunPaths) -> None:
    path = run.rank(0).phases
    path.write_bytes(
        path.read_bytes().replace(b'"version": %d' % SCHEMA_VERSION, b'"version": 9', 1)
    )
    steps, notes = read_all(run.root)
    assert steps == 0
    assert any("version 9" in note for note in notes)


def test_run_with_odd_folder_names_is_read(run: RunPaths) -> None:
    for name in ("²", "9" * 40, "0.x", "-1", "1.2.3", "x", "7", "8.1"):
        (run.ranks / name).mkdir()
    (run.nodes / "a\udcffb").mkdir()
    (run.ranks / "5").symlink_to(run.ranks / "5")
    assert read_all(run.root)[0] == 2


def test_run_with_nothing_readable_is_an_error(run: RunPaths) -> None:
    shutil.rmtree(run.ranks)
    shutil.rmtree(run.nodes)
    run.manifest.write_bytes(b"")
    steps, notes = read_all(run.root)
    assert steps == -1
    assert "run.json" in notes[0]


@pytest.mark.parametrize("how", ["gone", "loop", "file", "empty folder", "nul"])
def test_path_that_is_no_run_is_an_error(tmp_path: Path, how: str) -> None:
    path = tmp_path / ("a\0b" if how == "nul" else "run")
    if how == "loop":
        path.symlink_to(path)
    elif how == "file":
        path.write_text("x", encoding="utf-8")
    elif how == "empty folder":
        path.mkdir()
    try:
        steps, _ = read_all(path)
    except HaiprofError:
        steps = -1
    assert steps == -1


@pytest.mark.parametrize("first", [0, 3, -3])
def test_pipe_in_place_of_records_does_not_stop_the_reader(run: RunPaths, first: int) -> None:
    path = run.root / "ranks/0/phases.rec"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(RunFormatError, match="not a regular file"):
        read_records(path, first=first)


def test_limit_reads_the_first_records_and_still_tells_of_a_torn_tail(run: RunPaths) -> None:
    path = run.root / "nodes/node0/host.rec"
    with path.open("ab") as file:
        file.write(b"torn")
    whole, part, none = (read_records(path, limit=limit) for limit in (None, 2, 0))
    assert (part.count, none.count) == (2, 0)
    assert whole.data.startswith(part.data)
    assert whole.notes == part.notes == none.notes != ()
