"""Runs items one after the other, each in a forked process with its own limit; keeps what there is.

Whatever an item does (raise, crash, hang, never come back from the driver), its figures up to then
stay, and the next one starts. Nothing here resets the GPU or changes one of its settings.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench import Bench, Item, judge, markdown

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


class Ended(BaseException):
    """Somebody wants this to end: what there is is written."""


def run(plan: Plan, say: Callable[[str], None] = print) -> list[dict[str, Any]]:
    """Runs every item for which there is time; the results, also in `plan.out`."""
    plan.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + plan.seconds
    results = [_untouched(item, "the time was up") for item in plan.items]
    before = signal.signal(signal.SIGTERM, _end)
    # What an item has started may still be dying, and write there.
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as folder:
        recordings = Path(folder) / "recordings"
        recordings.mkdir()
        try:
            for at, item in enumerate(plan.items):
                left = deadline - time.monotonic()
                if left < LEAST_S:
                    break
                limit_s = item.limit_s * (FAKE_PATIENCE if plan.fake else 1)
                results[at] = _run_one(item, plan, Path(folder), min(limit_s, left))
                say(_line(results[at]))
                _write(plan, results, recordings)
        except (Ended, KeyboardInterrupt):
            say("ended early; what was measured is kept")
        finally:
            signal.signal(signal.SIGTERM, before)
            _write(plan, results, recordings)
    return results


def _end(*_: object) -> None:
    raise Ended


def _untouched(item: Item, reason: str) -> dict[str, Any]:
    return {"name": item.name, "question": item.question, "state": "not reached", "reason": reason,
            "seconds": 0.0, "cpu_seconds": 0.0, "rows": [], "notes": {}}  # fmt: skip


def _run_one(item: Item, plan: Plan, folder: Path, seconds: float) -> dict[str, Any]:
    """One item in a process of its own."""
    figures, scratch = folder / f"{item.name}.jsonl", folder / item.name
    scratch.mkdir()
    bench = Bench(figures, scratch=scratch, recordings=folder / "recordings", fake=plan.fake,
                  seconds=seconds)  # fmt: skip
    began = time.monotonic()
    log = scratch / "log"
    # No signal between the start of the item and the `try` that ends it.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    child = _fork(item, bench, log, blocked)
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        state, reason, cpu_s = _await(child, began + seconds)
    except (Ended, KeyboardInterrupt):
        os.kill(child, signal.SIGKILL)  # it may not have come to its session yet
        raise
    finally:
        _kill_group(child)
    content = _content(figures)
    with (plan.out / LOG).open("ab") as whole:
        whole.write(f"\n==== {item.name}: {state} {reason}\n".encode() + _tail(log))
    shutil.rmtree(scratch, ignore_errors=True)
    if state == "failed" and not reason:
        reason = str(content["notes"].pop("error", "")).strip().rpartition("\n")[2]
    result = {"figures": content["figures"], "skipped": content["skipped"], "reason": reason}
    return {
        "name": item.name, "question": item.question, "state": state, "reason": reason,
        "seconds": round(time.monotonic() - began, 1), "cpu_seconds": round(cpu_s, 1),
        "notes": content["notes"], "rows": judge(item, result, fake=plan.fake),
    }  # fmt: skip


def _fork(item: Item, bench: Bench, log: Path, mask: set[int]) -> int:
    """Starts the item in a session of its own, with this mask of signals; its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: this process has none
        child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _redirect(log)
        os.environ.update(item.environment)
        os.chdir(bench.scratch)
        module, _, name = item.function.partition(":")
        getattr(importlib.import_module(module), name)(bench)
        status = 0
    except BaseException:  # noqa: BLE001  it is told, and the process ends here in any case
        text = traceback.format_exc()
        with contextlib.suppress(Exception):
            bench.note("error", text)
            sys.stderr.write(text)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _redirect(log: Path) -> None:
    null, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
    for target, source in ((0, null), (1, file), (2, file)):
        os.dup2(source, target)


def _await(child: int, deadline: float) -> tuple[str, str, float]:
    """How it ended: `done`, `failed`, `crashed`, `timed out`; why; and its seconds of CPU time."""
    ended = _wait_until(child, deadline)
    if ended is None:
        _kill_group(child)
        ended = _wait_until(child, time.monotonic() + DEATH_S)
        cpu_s = ended[1] if ended else 0.0
        return "timed out", "" if ended else "and it does not even die", cpu_s
    status, cpu_s = ended
    if os.WIFSIGNALED(status):
        return "crashed", signal.Signals(os.WTERMSIG(status)).name, cpu_s
    return "done" if os.WEXITSTATUS(status) == 0 else "failed", "", cpu_s


def _wait_until(child: int, deadline: float) -> tuple[int, float] | None:
    """Status and CPU time with which a child ends by then; None if it does not."""
    pause = 0.005
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage.ru_utime + usage.ru_stime
        if time.monotonic() > deadline:
            return None
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)


def _kill_group(leader: int) -> None:
    """Ends what an item has started in its session, and the item itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


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
