"""What haiprof adds to the start of a command, and to every further Python process of the job.

    python benchmarks/startup.py --rounds 15 --json benchmarks/results/startup.json

Every run is a fresh process; runs are interleaved, and each is compared with its bare partner.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from compare import Row, against, interleaved, save, table

REPOSITORY = Path(__file__).parent.parent
PYTHON = sys.executable
NOTHING = [PYTHON, "-c", "pass"]
IMPORT_TORCH = [PYTHON, "-c", "import torch"]


def milliseconds(command: list[str], environ: dict[str, str]) -> float:
    """Wall time of one command."""
    begin = time.perf_counter_ns()
    subprocess.run(command, check=True, capture_output=True, env=environ, cwd=REPOSITORY)
    return (time.perf_counter_ns() - begin) / 1e6


def launched(log_dir: Path, *options: str) -> list[str]:
    """The launcher and its options, up to the command."""
    return [PYTHON, "-m", "haiprof", "run", "--log-dir", str(log_dir), *options, "--"]


def job_environment(log_dir: Path) -> dict[str, str]:
    """The variables that haiprof gives to a job."""
    show = [PYTHON, "-c", "import json, os; print(json.dumps(dict(os.environ)))"]
    command = [*launched(log_dir, "--quiet"), *show]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=REPOSITORY)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plain = dict(os.environ)
    with tempfile.TemporaryDirectory() as temporary:
        logs = Path(temporary)
        inside = job_environment(logs)
        start = [PYTHON, "-S", "-c", "import os; os.execvp('true', ['true'])"]
        ways: dict[str, Callable[[], object]] = {
            "command: bare": lambda: milliseconds(["true"], plain),
            "command: haiprof --quiet": lambda: milliseconds(
                [*launched(logs, "--quiet"), "true"], plain
            ),
            "command: haiprof, with verdict": lambda: milliseconds(
                [*launched(logs), "true"], plain
            ),
            "command: smallest Python launcher": lambda: milliseconds(start, plain),
            "python -c pass: bare": lambda: milliseconds(NOTHING, plain),
            "python -c pass: in a job": lambda: milliseconds(NOTHING, inside),
            "import torch: bare": lambda: milliseconds(IMPORT_TORCH, plain),
            "import torch: in a job": lambda: milliseconds(IMPORT_TORCH, inside),
        }
        results = interleaved(ways, options.rounds)
    rows: list[Row] = []
    for name, values in results.items():
        group = name.partition(":")[0]
        rows.append(against(results[f"{group}: bare"], values, name))
    print(table(rows, title="start-up", unit="ms"))
    if options.json:
        save(options.json, {"rows": [asdict(row) for row in rows], "runs": results})


if __name__ == "__main__":
    main()
