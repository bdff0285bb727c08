"""How what reads a run grows with its ranks and hours: processor time, peak memory, size on disk.

    python benchmarks/scale_sweep.py --label after
    python benchmarks/scale_sweep.py --label after --cells 64x24,1024x24 --commands verdict,ls
    python benchmarks/scale_sweep.py --label before --whole --cells 64x1,64x10,256x1,1024x1
    python benchmarks/scale_sweep.py --label deaths --deaths --cells 8x0.03,1024x0.03

Steps take 2 s, as those of a large model do: 43,200 in a
day. A node has 8 ranks with a GPU each; each source of counters has a row a second, stacks are
sampled at the hook's own pace, a rank notes the device's times at each step and the progress of one
process group each second. Two nodes are made up (one with a slow rank and one that waits more and
more for data); the others are copies of the second under their own names. They are folded as the
agent does it, unless `--whole`. With `--deaths` one rank raises and NCCL's watchdog ends the
others: each leaves PyTorch's dump of 2,000 collectives with stacks. Each command is a process of
its own, which reads the run for the first time. Results are kept in results/scale.json, from which
results/scale.md is written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from haiprof.in_job.stack_sampler import PACE
from haiprof.in_job.worker_stacks import MAX_HZ, MIN_HZ, SHARE
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import read_manifest, write_manifest
from haiprof.run_format.stack_lines import FILE_LIMIT_BYTES, HEADER, SAMPLES, STACKS_VERSION
from haiprof.run_format.writer import LineWriter, RecordWriter, write_json
from tests.unit.analysis.recorded import CLOCK
from tests.unit.report.many_ranks import SLOW_RANK, START_NS, write_many

STEP_S = 2.0
USUAL_S = 0.1
"""A step of `write_many`."""
EPOCH_S, BEFORE_PACE_S = 600, 0.2
"""New workers come so often; for so long each is sampled at the rate of the training thread."""
PER_NODE = 8
TEMPLATES = 2
HZ = 100
COLLECTIVES, FRAMES = 2_000, 12
LIMIT_S = 400.0
"""A command that takes longer is ended, and has no number."""
CELLS = tuple((ranks, hours) for ranks in (64, 256, 1024) for hours in (1, 10, 24))
COMMANDS = {
    "verdict": ("verdict", "."),
    "report": ("report", "."),
    "goodput": ("goodput", "."),
    "ls": ("ls", "..", "--all"),
    "ls --live": ("ls", "--live", "--once", "--log-dir", ".."),
}
RESULTS = Path(__file__).parent / "results" / "scale.json"
Result = dict[str, Any]


def write_cell(
    root: Path, ranks: int, hours: float, *, whole: bool, workers: int, deaths: bool,
    templates: Path,
) -> None:  # fmt: skip
    """A run of so many ranks and hours: two nodes, and copies of the second."""
    two = templates / f"{hours:g}-{workers}-{'whole' if whole else 'folded'}"
    if not two.exists():
        write_template(two, hours, whole=whole, workers=workers)
    _copy(two, root)
    run = RunPaths(root)
    for first in range(TEMPLATES * PER_NODE, ranks, PER_NODE):
        _copy_node(run, first)
    if deaths:
        write_death(run, ranks, round(hours * 3600e9))
        return
    now = time.time_ns()
    manifest = read_manifest(run)  # of a job that this process is the launcher of
    live = {"host": socket.gethostname(), "launcher_pid": os.getpid(), "start_wall_ns": now}
    write_manifest(run, replace(manifest, **live))


def write_death(run: RunPaths, ranks: int, end_ns: int) -> None:
    """One rank raises, and the others are aborted by NCCL's watchdog, each with its dump."""
    frames = [{"name": f"forward_{n}", "filename": f"/opt/torch/nn/modules/module_{n}.py",
               "line": 100 + n} for n in range(FRAMES)]  # fmt: skip
    head = {"host": f"node{SLOW_RANK // PER_NODE:04d}", "pid": 100 + SLOW_RANK}
    run.flight.mkdir()
    run.uncaught.mkdir()
    for rank in range(ranks):
        raised = rank == SLOW_RANK
        events = LineWriter(run.node(f"node{rank // PER_NODE:04d}").events)
        status = {"status": 1, "signal": None} if raised else {"signal": 6}
        wall_ns = CLOCK.wall_ns + end_ns + (0 if raised else 25 * 10**9)
        events.append({"type": "process_end", "pid": 100 + rank, "rank": rank, "parent": 1,
                       "wall_ns": wall_ns, **status})  # fmt: skip
        events.close()
        entries = [_collective(n, frames) for n in range(1, COLLECTIVES + 1 - raised)]
        dump = {"version": "2.10", "pg_config": {}, "entries": entries}
        (run.flight / f"rank_{rank}").write_bytes(pickle.dumps(dump, protocol=2))
    error = {"type": "RuntimeError", "message": "bad sample 17", "frames": [], "source": ""}
    ended = {"how": "exception", "thread": None, "wall_ns": CLOCK.wall_ns + end_ns - 1,
             "errors": [error]}  # fmt: skip
    write_json(
        run.uncaught_file(head["host"], head["pid"]),
        {**head, "rank": SLOW_RANK, "restart": 0, "ended": [ended]}, below=run.root,
    )  # fmt: skip
    end_wall_ns = CLOCK.wall_ns + end_ns + 30 * 10**9
    write_manifest(run, replace(read_manifest(run), end_wall_ns=end_wall_ns, exit_status=1))


def _collective(number: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    """An entry as NCCL's Flight Recorder writes it; stacks that are the same are one object."""
    at_ns = CLOCK.wall_ns + number * 10**6
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"), "is_p2p": False,
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "frames": list(frames),
        "profiling_name": "nccl:all_reduce", "input_sizes": [[4096, 4096]],
        "input_dtypes": ["BFloat16"], "output_sizes": [[4096, 4096]], "retired": True,
        "output_dtypes": ["BFloat16"], "state": "completed", "timeout_ms": 600_000,
        "time_created_ns": at_ns, "duration_ms": 1.0, "time_discovered_started_ns": at_ns + 10,
        "time_discovered_completed_ns": at_ns + 90,
    }  # fmt: skip


def write_template(root: Path, hours: float, *, whole: bool, workers: int = 0) -> None:
    """Two nodes that recorded for so many hours."""
    seconds = round(hours * 3600)
    steps = round(seconds / STEP_S)
    count = TEMPLATES * PER_NODE
    write_many(root, ranks=count, steps=steps, samples=seconds, longer=STEP_S / USUAL_S)
    run = RunPaths(root)
    stacks = "".join(stack_lines(seconds)).encode()
    for rank in range(count):
        paths = run.rank(rank)
        paths.stacks.write_bytes(stacks)
        for worker in range(workers):
            lines = "".join(worker_lines(worker, workers, seconds)).encode()
            paths.worker_stacks(worker).write_bytes(lines[:FILE_LIMIT_BYTES])
        ends = np.arange(1, steps + 1) * round(STEP_S * 1e9) + START_NS
        _write(paths.device, schema.DEVICE, ends, interval_ns=STEP_S * 1e9, idle_ns=1e8, lag_ns=0)
        times = np.arange(seconds) * 10**9 + START_NS
        _write(paths.heartbeat, schema.HEARTBEAT, times, group=0, enqueued=np.arange(seconds))
    if not whole:
        fold(run)


def fold(run: RunPaths) -> None:
    """Folds what is old of all nodes."""
    try:
        from haiprof.run_analysis.folding import fold_node
    except ImportError:  # of a haiprof that does not fold
        return
    for host, _ in run.node_folders():
        fold_node(run, host)


def stack_lines(seconds: int) -> Iterator[str]:
    """A line of samples each second, at the pace of the hook."""
    random = np.random.default_rng(5)
    files = ["/job/train.py", "/job/model.py", "/env/site-packages/torch/nn/modules/linear.py"]
    frames = [[files[n % 3], 10 + n, f"function_{n}", 9, ""] for n in range(60)]
    stacks = [[n if n % 6 else 0, n] for n in range(60)]
    head = {"type": HEADER, "version": STACKS_VERSION, "pid": 100, "worker": None, "hz": HZ,
            "time_ns": START_NS, "libraries": ["/env/site-packages"]}  # fmt: skip
    yield json.dumps(head) + "\n"
    known: dict[str, Any] = {"first_frame": 0, "frames": frames, "first_stack": 1, "stacks": stacks}
    for second in range(seconds):
        count = max(round(HZ * next(share for age, share, _ in PACE if second < age)), 1)
        line = {
            "type": SAMPLES, "pid": 100, "time_ns": START_NS + second * 10**9, **known,
            "offset_us": (np.arange(count) * (10**6 // count)).tolist(),
            "late_us": random.integers(0, 90, count).tolist(),
            "stack": random.integers(1, 60, count).tolist(),
            "lock_wait": "0" * count, "wait": "0" * count,
            "run_us": random.integers(0, 10**6 // count, count).tolist(),
            "cpu_ns": second * 10**5, "held_ns": second * 10**4,
        }  # fmt: skip
        known = {"first_frame": 60, "frames": [], "first_stack": 61, "stacks": []}
        yield json.dumps(line) + "\n"


def worker_lines(worker: int, workers: int, seconds: int) -> Iterator[str]:
    """Lines of one of so many workers, new ones each EPOCH_S, at the pace of the hook."""
    hz = min(max(SHARE * HZ / workers, MIN_HZ), MAX_HZ)
    random = np.random.default_rng(worker)
    files = ["/job/data.py", "/job/augment.py", "/env/site-packages/PIL/Image.py"]
    frames = [[files[n % 3], 10 + n, f"function_{n}", 9, "image.resize(size)"] for n in range(30)]
    stacks = [[n if n % 5 else 0, n] for n in range(30)]
    due = 0.0
    for second in range(0, seconds, 2):
        time_ns, pid = START_NS + second * 10**9, 1000 + second // EPOCH_S * workers + worker
        known: dict[str, Any] = {}
        if second % EPOCH_S == 0:
            head = {"type": HEADER, "version": STACKS_VERSION, "pid": pid, "worker": worker,
                    "time_ns": time_ns, "hz": hz, "libraries": ["/env/site-packages"]}  # fmt: skip
            yield json.dumps(head) + "\n"
            known = {"first_frame": 0, "frames": frames, "first_stack": 1, "stacks": stacks}
            due += HZ * BEFORE_PACE_S
        due += 2 * hz * next(share for age, share, _ in PACE if second < age)
        count, due = int(due), due % 1
        if count or known:
            line = {
                "type": SAMPLES, "pid": pid, "time_ns": time_ns, **known,
                "offset_us": (np.arange(count) * (2 * 10**6 // max(count, 1))).tolist(),
                "late_us": random.integers(0, 300, count).tolist(),
                "stack": random.integers(1, 30, count).tolist(),
                "lock_wait": "0" * count, "wait": "0" * count,
                "run_us": random.integers(0, 10**6, count).tolist(),
                "queue_us": random.integers(0, 10**4, count).tolist(),
                "cpu_ns": second * 10**5, "held_ns": second * 10**4,
            }  # fmt: skip
            yield json.dumps(line) + "\n"


def _write(path: Path, table: schema.Table, times: np.ndarray, **values: Any) -> None:
    codes = {"i64": "<i8", "f64": "<f8", "f32": "<f4", "u32": "<u4"}
    rows = np.zeros(len(times), dtype=[(c.name, codes[c.type]) for c in table.columns])
    rows[table.columns[0].name] = times
    for name, value in values.items():
        rows[name] = value
    writer = RecordWriter(path, table, clock=CLOCK, extra={})
    writer.append(rows.tobytes())
    writer.close()


def _copy_node(run: RunPaths, first: int) -> None:
    """The second node again, with ranks from `first` on."""
    host = f"node{first // PER_NODE:04d}"
    _copy(run.node("node0001").root, run.node(host).root)
    for place in range(PER_NODE):
        rank, source = first + place, run.rank(PER_NODE + place)
        copy = run.rank(rank)
        _copy(source.root, copy.root)
        report = json.loads(copy.report.read_text())
        copy.report.write_text(json.dumps({**report, "rank": rank, "host": host}))


def _copy(source: Path, target: Path) -> None:
    """A folder with its holes."""
    subprocess.run(["cp", "-r", "--sparse=always", str(source), str(target)], check=True)


def disk_bytes(root: Path) -> int:
    """What a run takes of the disk; holes take nothing."""
    return sum(path.stat().st_blocks * 512 for path in root.rglob("*") if path.is_file())


def measure(root: Path, words: Iterable[str]) -> Result:
    """A command, in a process of its own: seconds of CPU and peak memory, or why there are none."""
    line = [sys.executable, "-m", "haiprof", *words]
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(line, cwd=root, stdout=subprocess.DEVNULL, stderr=said)
        ends = time.monotonic() + LIMIT_S
        while time.monotonic() < ends:
            pid, status, used = os.wait4(child.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.02)
        else:
            child.kill()
            os.wait4(child.pid, 0)
            return {"why": f"more than {LIMIT_S:g} s"}
        if os.waitstatus_to_exitcode(status) not in (0, 1):
            said.seek(0)
            return {"why": said.read().decode(errors="replace").strip()[-200:]}
    return {"cpu_s": round(used.ru_utime + used.ru_stime, 3),
            "peak_mb": round(used.ru_maxrss * 1024 / 1e6)}  # fmt: skip


def sweep(
    label: str, cells: Iterable[tuple[int, float]], commands: Sequence[str], **how: Any
) -> None:
    """Measures all cells, and writes each down as it comes."""
    for ranks, hours in cells:
        with tempfile.TemporaryDirectory(dir=how["templates"]) as folder:
            root = Path(folder) / "runs" / "run"
            root.parent.mkdir()
            write_cell(root, ranks, hours, **how)
            found: Result = {"disk_bytes": disk_bytes(root)}
            for name in commands:
                found[name] = measure(root, COMMANDS[name])
                print(f"{label} {ranks} ranks, {hours:g} h, {name}: {found[name]}", flush=True)
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        mine = known.setdefault(label, {}).setdefault(f"{ranks}x{hours:g}", {})
        mine.update(found)
        RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")


def exponent(points: Mapping[float, float]) -> float | None:
    """The slope of the logarithms (least squares); None of fewer than two points."""
    if len(points) < 2:
        return None
    x, y = (np.log(np.array(list(side))) for side in (points.keys(), points.values()))
    return float(np.polyfit(x, y, 1)[0])


def write_table() -> None:
    """benchmarks/results/scale.md."""
    known: dict[str, dict[str, Result]] = json.loads(RESULTS.read_text())
    note = RESULTS.with_suffix(".txt")
    lines = ["# What reads a run, by ranks and hours", ""]
    lines += [note.read_text().strip(), ""] if note.exists() else []
    for label, cells in sorted(known.items(), reverse=True):
        lines += [f"## {label.capitalize()}", "", "Seconds of CPU / peak memory in MB.", ""]
        lines += ["| ranks | hours | on disk | " + " | ".join(COMMANDS) + " |"]
        lines += ["|---|---|---|" + "---|" * len(COMMANDS)]
        order = sorted(cells, key=lambda cell: tuple(map(float, cell.split("x"))))
        for cell in order:
            ranks, hours = cell.split("x")
            size = f"{cells[cell]['disk_bytes'] / 1e9:.2f} GB"
            row = [_shown(cells[cell].get(name)) for name in COMMANDS]
            lines += [f"| {ranks} | {hours} | {size} | " + " | ".join(row) + " |"]
        lines += ["", f"Fitted exponents, CPU / memory{_fits(cells)}", ""]
    RESULTS.with_suffix(".md").write_text("\n".join(lines).strip() + "\n")


def _shown(found: Result | None) -> str:
    if found is None:
        return ""
    return found.get("why") or f"{found['cpu_s']:.1f} / {found['peak_mb']:,}"


def _fits(cells: Mapping[str, Result]) -> str:
    """Of each command, in ranks at the shortest time and at the longest, and in time."""
    table = {tuple(map(float, cell.split("x"))): found for cell, found in cells.items()}
    rows = []
    for name in COMMANDS:
        words = []
        for axis, word in enumerate(("ranks", "hours")):
            for fixed in sorted({key[1 - axis] for key in table}):
                own = {key[axis]: table[key].get(name, {}) for key in sorted(table)
                       if key[1 - axis] == fixed}  # fmt: skip
                fits = [
                    exponent({at: one[what] for at, one in own.items() if one.get(what)})
                    for what in ("cpu_s", "peak_mb")
                ]
                if None not in fits and len(own) > 1:
                    at = f"{fixed:g} h" if axis == 0 else f"{fixed:g} ranks"
                    cpu, memory = (math.nan if fit is None else fit for fit in fits)
                    words.append(f"in {word} at {at} {cpu:.2f} / {memory:.2f}")
        rows.append(f"- {name}: " + ("; ".join(words) or "too few cells"))
    return ":\n\n" + "\n".join(rows)


def main() -> None:
    """Measures, and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--label", default="after", help="under which results are kept")
    parser.add_argument("--cells", help="RANKSxHOURS, with commas; left out: all nine")
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--whole", action="store_true", help="do not fold what is old")
    parser.add_argument("--deaths", action="store_true", help="all ranks end, one of itself")
    parser.add_argument("--workers", type=int, default=0, help="DataLoader workers of each rank")
    parser.add_argument("--templates", type=Path, help="where two nodes of each time are kept")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args()
    if not options.table:
        pairs = [cell.split("x") for cell in (options.cells or "").split(",") if cell]
        cells = [(int(ranks), float(hours)) for ranks, hours in pairs] or list(CELLS)
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            templates = options.templates or Path(folder)
            templates.mkdir(exist_ok=True)
            words = options.commands.split(",")
            sweep(options.label, cells, words, whole=options.whole, workers=options.workers,
                  deaths=options.deaths, templates=templates)  # fmt: skip
    write_table()


if __name__ == "__main__":
    main()
