"""CPU seconds of every command that reads a run or traces, beside those of another haiprof.

    python benchmarks/commands.py --before /path/to/other/checkout > benchmarks/results/commands.md

Records a small run with a trace first, or takes one with --run. Each command runs twice: the second
time haiprof may print what it kept of the first. `list` is also asked for many copies of the run:
`many` with the verdict that the launcher saved at the end, `unjudged` as --quiet leaves a run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parent.parent
COMMANDS = (
    "verdict {untraced}", "overview {untraced}", "rank {untraced} 0", "lines {untraced}",
    "verdict {run}", "overview {run}", "rank {run} 0", "lines {run}", "list {logs}", "list {many}",
    "list {unjudged}",
    "ps --log-dir {logs}", "diagnose {run}", "report {run} -o {out}/r.html", "export {run} "
    "--format csv -o {out}/c.csv --force", "query {run} --schema", "trace-report {run}",
    "trace-check {run}", "efficiency {run}", "functions {run}", "critical-path {run}",
    "what-if {run}", "memory-timeline {run}", "compare {run} {run}", "trace-diff {run} {run}",
    "merge {run} -o {out}/m.json.gz --force", "snapshot", "doctor", "verdict --help", "--help", "",
)  # fmt: skip
PROGRAM = (
    "import sys; sys.path[:] = [p for p in sys.path if p]; sys.path.insert(0, {root!r}); "
    "from haiprof.__main__ import run; run()"
)


def environment() -> dict[str, str]:
    """The environment of a user: Python keeps bytecode, as pip did when it installed haiprof."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def compile_bytecode(root: Path) -> None:
    """Compiles a checkout, as an installation does."""
    command = [sys.executable, "-m", "compileall", "-q", str(root / "haiprof")]
    subprocess.run(command, check=True, env=environment())


def cpu_s(root: Path, words: list[str], folder: Path) -> float:
    """User and system time of one command and its children."""
    return python_s(PROGRAM.format(root=str(root)), *words, folder=folder)


def python_s(code: str, *words: str, folder: Path | None = None) -> float:
    """User and system time of a Python process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", code, *words]
    subprocess.run(command, capture_output=True, cwd=folder, env=environment())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def record(folder: Path, name: str, tracing: Sequence[str] = ()) -> Path:
    """A small run of a few seconds, into a log directory of that name."""
    script = REPOSITORY / "examples" / "cpu_bound_forward.py"
    options = ["--log-dir", str(folder / name), *tracing]
    program = PROGRAM.format(root=str(REPOSITORY))
    words = [sys.executable, "-c", program, *options, str(script), "--seconds", "6"]
    subprocess.run(words, check=True, capture_output=True, cwd=folder)
    return next((folder / name).iterdir())


def copies(run: Path, folder: Path, count: int, *, without: Sequence[str] = ()) -> Path:
    """A log directory with so many copies of the run."""
    left_out = shutil.ignore_patterns("answers", "traces", *without)
    for number in range(count):
        target = folder / f"train-{number:05d}"
        shutil.copytree(run, target, ignore=left_out)
        manifest = json.loads((target / "run.json").read_text())
        manifest["start_wall_ns"] += number * 10**9
        (target / "run.json").write_text(json.dumps(manifest))
    return folder


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout, to compare with")
    parser.add_argument("--run", type=Path, help="a run directory; left out: one is recorded")
    parser.add_argument("--many", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        run = folder / "logs" / "run"
        if options.run:
            shutil.copytree(options.run, run)
            cpu_s(REPOSITORY, ["verdict", str(run), "--save"], folder)  # as its launcher did
        else:
            run = record(folder, "logs", ["--steps", "3:6"])
        if not any(run.glob("traces/rank*")):
            parser.error("the run has no trace: the machine is too busy, or name one with --run")
        untraced = record(folder, "untraced")
        many = copies(run, folder / "many", options.many)
        unjudged = copies(run, folder / "unjudged", options.many, without=["verdict.*"])
        names = {"run": run, "untraced": untraced, "logs": run.parent, "many": many,
                 "unjudged": unjudged, "out": folder}  # fmt: skip
        for root in filter(None, (REPOSITORY, options.before)):
            compile_bytecode(root)
        print(f"""CPU seconds of each command on a small run; `many` and `unjudged` hold
{options.many} runs. `run` has one trace window, `untraced` none. First and second: the second time
an answer may have been kept. Last line: numpy and polars alone, which nearly all load.

Made by `benchmarks/commands.py` on a machine with {os.cpu_count()} cores, shared with other work.
""")
        print("| command | before | first | second |\n|---|---:|---:|---:|")
        for command in COMMANDS:
            words = command.format(**names).split()
            before = f"{cpu_s(options.before, words, folder):.2f}" if options.before else "-"
            first, second = (cpu_s(REPOSITORY, words, folder) for _ in range(2))
            shown = command.replace("{", "").replace("}", "")
            print(f"| `haiprof {shown}`".rstrip() + f" | {before} | {first:.2f} | {second:.2f} |",
                  flush=True)  # fmt: skip
        floor = [f"{python_s('import numpy, polars'):.2f}" for _ in range(3)]
        print("| `import numpy, polars` | " + " | ".join(floor) + " |")


if __name__ == "__main__":
    main()
