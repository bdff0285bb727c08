"""Runs items one after the other, each in a process with its own limit; keeps what there is.

Whatever an item does (raise, crash, hang, never come back from the driver), its figures up to then
stay, and the next one starts. Nothing here resets the GPU or changes one of its settings.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Item, judge, markdown
from benchmarks.gpu.recording import python_path

RESULT, TABLE, LOG, ARCHIVE = (
    "gpu-check.json", "gpu-check.md", "gpu-check.log", "gpu-check-recordings.tar.gz"
)  # fmt: skip
FILE_LIMIT_BYTES = 3 << 20
ARCHIVE_LIMIT_BYTES = 40 << 20  # before compression, to a third or less; 16 MiB may come back
LEAST_S = 8.0  # with less left no item is begun
FAKE_PATIENCE = 5  # a dry run is about what happens, also on a machine that has much else to do
DEATH_S = 5.0  # a process in an uninterruptible call of the driver may not die at all
_LOG_TAIL_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is run, for how long, and where to."""

    items: Sequence[Item]
    out: Path
    seconds: float
    fake: bool
    machine: Mapping[str, Any]


def run(plan: Plan, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Runs every item for which there is time; the results, also in `plan.out`."""
    plan.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + plan.seconds
    results = [_result(item, "not reached", "the time was up") for item in plan.items]
    ended = threading.Event()
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: ended.set()) for number in numbers]
    # What an item has started may still be dying, and write there.
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        recordings = Path(folder) / "recordings"
        recordings.mkdir()
        try:
            for at, item in enumerate(plan.items):
                left = deadline - time.monotonic()
                if left < LEAST_S or ended.is_set():
                    break
                limit_s = item.limit_s * (FAKE_PATIENCE if plan.fake else 1)
                results[at] = _run_one(item, plan, Path(folder), min(limit_s, left), ended)
                say(_line(results[at]))
                _write(plan, results, recordings)
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)
            _write(plan, results, recordings)
    if ended.is_set():
        say("ended early; what was measured is kept")
    return results


def _result(item: Item, state: str, reason: str, **more: Any) -> dict[str, Any]:
    return {"name": item.name, "question": item.question, "state": state, "reason": reason,
            "seconds": 0.0, "rows": [], "notes": {}, **more}  # fmt: skip


def _run_one(
    item: Item, plan: Plan, folder: Path, seconds: float, ended: threading.Event
) -> dict[str, Any]:
    """One item in a process and a session of its own."""
    figures, scratch = folder / f"{item.name}.jsonl", folder / item.name
    scratch.mkdir()
    began, log = time.monotonic(), scratch / "log"
    words = [item.function, figures, scratch, folder / "recordings", int(plan.fake), seconds]
    environ = {**os.environ, **item.environment, "PYTHONPATH": python_path()}
    with log.open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.bench", *map(str, words)], cwd=scratch,
            env=environ, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
    state, reason = _await(child, began + seconds, ended)
    content = _content(figures)
    with (plan.out / LOG).open("ab") as whole:
        whole.write(f"\n==== {item.name}: {state} {reason}\n".encode() + _tail(log))
    shutil.rmtree(scratch, ignore_errors=True)
    if state == "failed":
        reason = str(content["notes"].pop("error", "")).strip().rpartition("\n")[2]
    rows = judge(item, {**content, "reason": reason}, fake=plan.fake)
    return _result(item, state, reason, seconds=round(time.monotonic() - began, 1), rows=rows,
                   notes=content["notes"])  # fmt: skip


def _await(
    child: subprocess.Popen[bytes], deadline: float, ended: threading.Event
) -> tuple[str, str]:
    """How it ended (`done`, `failed`, `crashed`, `timed out`, `not reached`), and why."""
    while child.poll() is None and time.monotonic() < deadline and not ended.is_set():
        ended.wait(0.05)
    status = child.poll()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)  # and what it has started
    if status is None:
        try:
            child.wait(DEATH_S)
        except subprocess.TimeoutExpired:
            return "timed out", "and it does not even die"
        return ("not reached", "this was ended") if ended.is_set() else ("timed out", "")
    if status < 0:
        return "crashed", signal.Signals(-status).name
    return "failed" if status else "done", ""


def _content(figures: Path) -> dict[str, dict[str, Any]]:
    """What an item has told; a line that it was killed in the middle of is left out."""
    found: dict[str, dict[str, Any]] = {"figures": {}, "skipped": {}, "notes": {}}
    lines = figures.read_text(encoding="utf-8").splitlines() if figures.exists() else []
    for line in lines:
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if "note" in told:
            name = told["note"]
            number = sum(known.partition(" #")[0] == name for known in found["notes"])
            found["notes"][f"{name} #{number + 1}" if number else name] = told["content"]
        elif "skipped" in told:
            found["skipped"][told["figure"]] = told["skipped"]
        else:
            found["figures"][told["figure"]] = told["value"]
    return found


def _tail(log: Path) -> bytes:
    with contextlib.suppress(OSError):
        data = log.read_bytes()
        return data[-_LOG_TAIL_BYTES:]
    return b""


def _line(result: Mapping[str, Any]) -> str:
    counts: dict[str, int] = {}
    for row in result["rows"]:
        counts[row["outcome"]] = counts.get(row["outcome"], 0) + 1
    words = ", ".join(f"{n} {word}" for word, n in counts.items())
    why = f": {result['reason']}" if result["reason"] else ""
    return f"{result['seconds']:6.1f} s  {result['name']}: {result['state']}{why}; {words}"


# -- what is written -------------------------------------------------------------------------------


def _write(plan: Plan, results: Sequence[Mapping[str, Any]], recordings: Path) -> None:
    """Everything so far: a run that is cut off has it."""
    left_out = pack_recordings(recordings, plan.out / ARCHIVE)
    content = {
        "machine": dict(plan.machine), "items": list(results), "recordings_left_out": left_out
    }  # fmt: skip
    _replace(plan.out / RESULT, json.dumps(content, indent=1, default=str) + "\n")
    _replace(plan.out / TABLE, markdown(content))


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)


def pack_recordings(folder: Path, archive: Path) -> list[str]:
    """One archive of all recordings within the limits; the names that were left out.

    It is rewritten only when something has come to it.
    """
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=_when)
    taken, left_out, size = [], [], 0
    for path in files:
        length = path.stat().st_size
        if length > FILE_LIMIT_BYTES or size + length > ARCHIVE_LIMIT_BYTES:
            left_out.append(str(path.relative_to(folder)))
        else:
            taken.append(path)
            size += length
    if not taken or (archive.exists() and _when(taken[-1]) <= _when(archive)):
        return left_out
    draft = archive.with_name(f".{archive.name}")
    with tarfile.open(draft, "w:gz", compresslevel=6) as tar:
        for path in taken:
            tar.add(path, arcname=str(path.relative_to(folder)), recursive=False)
    os.replace(draft, archive)
    return left_out


def _when(path: Path) -> float:
    return path.stat().st_mtime
