"""Traces that nobody should have written, at every command: an answer, or one clear error."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from haiprof.cli import main
from tests.commands import Run
from tests.sampling import SHARE, sample
from tests.unit.analysis.trace.shared import Event, event, kernel, launch, rank_file, step

ESCAPES = "\x1b[31m\x00\x07\u202e[red]<script>alert(1)</script>"
COMMANDS = (
    ("trace-report", "{}"),
    ("trace-report", "{}", "--steps", "1"),
    ("critical-path", "{}"),
    ("critical-path", "{}", "--steps", "1"),
    ("memory-timeline", "{}"),
    ("what-if", "{}"),
    ("what-if", "{}", "--faster", "kernel=gemm:2x"),
    ("query", "{}", "select name, dur_ns from ops"),
    ("trace-diff", "{}", "{}"),
)
FORESEEN = {0, 2, 4, 5}


def good() -> list[Event]:
    return [
        step(1, 0, 100), step(2, 100, 100), event("aten::mm", "cpu_op", 3, 10), launch(5, 5),
        kernel("gemm", 10, 20, correlation=5), launch(6, 105),
        kernel("gemm", 110, 20, correlation=6),
    ]  # fmt: skip


def text(events: object, **top: object) -> str:
    return json.dumps({"distributedInfo": {"rank": 0, "world_size": 1}, **top,
                       "traceEvents": events})  # fmt: skip


def every(**values: object) -> str:
    return text([{**each, **values} for each in good()])


def with_args(**args: object) -> str:
    return text([{**each, "args": {**each.get("args", {}), **args}} for each in good()])


def memory(**args: object) -> str:
    said: dict[str, object] = {"Bytes": 8, "Addr": 1, "Device Type": 1, "Device Id": 0,
                               "Total Allocated": 8, "Total Reserved": 8}  # fmt: skip
    return text([*good(), event("[memory]", "cpu_instant_event", 5, 0, **{**said, **args})])


YEAR_US = 365 * 86400 * 1e6
DAMAGED: dict[str, Callable[[], str]] = {
    "truncated": lambda: text(good())[:-150],
    "duplicate keys": lambda: text(good()).replace('"dur": 20', '"dur": 20, "dur": 30'),
    "nan": lambda: text(good()).replace('"dur": 20', '"dur": NaN'),
    "infinite": lambda: text(good()).replace('"ts": 110', '"ts": Infinity'),
    "negative": lambda: text([*good(), kernel("gemm", 50, -20, correlation=5)]),
    "all negative": lambda: every(dur=-5),
    "no time": lambda: text([step(1, 0, 0), launch(5, 0, 0), kernel("gemm", 0, 0, correlation=5)]),
    "236 years": lambda: text([*good(), kernel("long", 50, 236 * YEAR_US, correlation=5)]),
    "100 years twice": lambda: text([
        *good(), *(kernel("long", 50, 100 * YEAR_US, stream=at) for at in (1, 2)),
    ]),
    "escapes": lambda: text([*good(), kernel(ESCAPES, 50, 1, correlation=5),
                             event(ESCAPES, "cpu_op", 60, 5)]),
    "long names": lambda: text([*good(), kernel("k" * 1_000_000, 50, 1, correlation=5),
                                event("<a" * 300_000, "cpu_op", 60, 5)]),
    "deep": lambda: text(good()).replace(
        '"dur": 20', '"dur": 20, "x": ' + "[" * 100_000 + "]" * 100_000
    ),
    "nothing but depth": lambda: "[" * 200_000,
    "empty": lambda: "",
    "no object": lambda: "null",
    "no events": lambda: text([]),
    "events are null": lambda: text(None),
    "events are numbers": lambda: text([1, 2, 3]),
    "CPU alone": lambda: text([step(1, 0, 100), event("aten::mm", "cpu_op", 3, 10)]),
    "GPU alone": lambda: text([kernel("gemm", 10, 20, correlation=5)]),
    "huge pids": lambda: every(pid=2**70, tid=2**65),
    "pids and tids are words": lambda: every(pid="python", tid="stream 7"),
    "arguments are words": lambda: with_args(correlation="a", stream="b", device="c"),
    "arguments are below zero": lambda: with_args(correlation=-5, stream=-1, device=-1),
    "arguments are a list": lambda: every(args=[1]),
    "names are numbers": lambda: every(name=5),
    "arrows to a thread without events": lambda: text([
        *good(),
        {"ph": "s", "id": 3, "pid": 1, "tid": 1, "ts": 5, "cat": "fwdbwd", "name": "fwdbwd"},
        {"ph": "f", "id": 3, "pid": 1, "tid": 9, "ts": 15, "cat": "fwdbwd", "name": "fwdbwd"},
    ]),
    "huge step": lambda: text([step(10**30, 0, 100), *good()]),
    "steps of one number": lambda: text([step(1, 0, 100), step(1, 0, 100), *good()]),
    "huge rank": lambda: text(good(), distributedInfo={"rank": 2**80, "world_size": 2**80}),
    "rank below zero": lambda: text(good(), distributedInfo={"rank": -1, "world_size": -5}),
    "memory in words": lambda: memory(Bytes="x", Addr="y", **{"Device Type": "z"}),
    "huge memory": lambda: memory(Bytes=-5, Addr=2**64 + 5, **{"Total Allocated": -3}),
}  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_trace_gives_an_answer_or_one_error(
    tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(DAMAGED[damage]())
    first = list(DAMAGED).index(damage) % SHARE  # each damage at others of the commands
    for words in sample([*COMMANDS[first:], *COMMANDS[:first]]):
        said = " ".join(words)
        status = main([word.replace("{}", str(path)) for word in words])
        out, err = capsys.readouterr()
        assert status in FORESEEN, (said, err)
        assert not {"\x1b", "\x00", "\x07", "\u202e"} & set(out + err), said
        assert max(map(len, [*out.splitlines(), ""])) <= 220, said
        assert max(map(len, [*err.splitlines(), ""])) <= 2100, said
        if status:
            assert err.splitlines()[0].startswith("haiprof: error: "), said
            assert str(path) in err or words[0] in err, said


def test_what_is_no_trace_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "binary.json").write_bytes(os.urandom(10_000))
    (tmp_path / "broken.json.gz").write_bytes(gzip.compress(text(good()).encode())[:-60])
    (tmp_path / "link.json").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "pipe.json")
    for path in (*tmp_path.iterdir(), Path("/nowhere.json"), Path("/dev/zero")):
        if path.name == "cache":
            continue
        for words in COMMANDS:
            status = main([word.replace("{}", str(path)) for word in words])
            err = capsys.readouterr().err
            named = [line for line in err.splitlines() if str(path) in line]
            if path.name != "broken.json.gz":  # of which a part can be read, which is said
                assert (status in (3, 4), len(named)) == (True, 1), (words, err)


class Hostile:
    """Runs a command in whoever reads its pickle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("name", ["snapshot.pickle", "snapshot.json"])
def test_pickle_that_runs_code_is_refused_and_never_run(
    tmp_path: Path, name: str, run: Run
) -> None:
    path = tmp_path / name
    path.write_bytes(pickle.dumps({"segments": [Hostile(tmp_path / "ran")]}))
    err = run("memory-timeline", path, status=4).err
    assert "no pickle of plain values" in err
    assert not (tmp_path / "ran").exists()


def test_two_files_of_one_rank_are_both_named(tmp_path: Path, run: Run) -> None:
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(text(good()))
    for words in COMMANDS:
        err = run(*(word.replace("{}", str(tmp_path)) for word in words), status=4).err
        assert "a.json" in err
        assert "b.json" in err


class _Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("words", [
    ("query", "{}", "--csv", "select name, dur_ns from gpu"),
    ("trace-table", "kernels", "{}", "--csv"),
], ids=lambda words: words[0])  # fmt: skip
@pytest.mark.parametrize("stream", [io.BytesIO, _Terminal])
def test_csv_steers_no_terminal_and_is_untouched_in_a_pipe(
    stream: type[io.BytesIO],
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    rank_file(folder, 0, [step(1, 0, 100), launch(5, 5), kernel(ESCAPES, 10, 20, correlation=5)])
    printed = stream()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="utf-8"))
    assert main([word.format(folder) for word in words]) == 0
    text = printed.getvalue().decode()
    assert "name" in text.split("\n", maxsplit=1)[0].split(",")
    if stream is _Terminal:
        assert not {"\x1b", "\x00", "\x07", "\u202e"} & set(text)
        assert text.count("\n") == 2
    else:
        assert ESCAPES in text
