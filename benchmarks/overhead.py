"""What recording costs a training step: haiprof, torch.profiler and py-spy against the bare loop.

    python benchmarks/overhead.py --rounds 9 --json benchmarks/results/overhead.json
    python benchmarks/overhead.py --loops mlp --rounds 40 --ways haiprof

Every run is a fresh process; the runs of a round are shuffled, and each is compared with the bare
run of its own round: `added` is the median of these differences, with its bootstrap interval. Of a
run its lower quartile step says the least of what else the machine did, its median what most steps
took, and its mean holds the drain thread and the stack sampler, which no median shows. Fresh
processes of one program differ by more than what is measured, so some tens of rounds are needed;
in_process.py compares blocks of steps of one process.
haiprof runs at default settings: hooks, drain thread, and the launcher's samplers beside it.
`haiprof, time over` is measured after `--time` has passed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from compare import against, interleaved, save, table

HERE = Path(__file__).parent
LOOP = HERE / "loop.py"
STEPS = {"mlp": 6000, "transformer": 120}
PYTHON = sys.executable
HAIPROF = [PYTHON, "-m", "haiprof", "run", "--quiet"]
RECORD_S = 1  # of the run that is timed after its recording
SETTLE_S = 4.0  # every run trains so long untimed; by then the hooks of that run are out
PY_SPY = Path(PYTHON).with_name("py-spy")
SPIED = "py-spy record, 100 Hz"
WAYS = ("bare", "haiprof", "haiprof, time over", "torch.profiler, CPU, always on", SPIED)


def run_loop(kind: str, folder: Path, way: str) -> dict[str, float]:
    """One fresh process: quartile, median and mean step in us, bytes written per step."""
    out, logs = folder / "steps.json", folder / "logs"
    loop = [PYTHON, str(LOOP), kind, "--steps", str(STEPS[kind]), "--out", str(out)]
    loop += ["--skip-seconds", str(SETTLE_S)]
    launched = [*HAIPROF, "--log-dir", str(logs)]
    timed_out = [*launched, "--time", str(RECORD_S), "--", *loop]
    spied = [str(PY_SPY), "record", "-r", "100", "-f", "raw", "-o", str(folder / "spy"), "--"]
    command = {
        "bare": loop,
        "haiprof": [*launched, "--", *loop],
        "haiprof, time over": timed_out,
        "torch.profiler, CPU, always on": [*loop, "--profiler"],
        SPIED: [*spied, *loop],
    }[way]
    subprocess.run(command, check=True, capture_output=True, cwd=HERE.parent)
    content = json.loads(out.read_text())
    steps = content["steps_ns"]
    size = sum(path.stat().st_size for path in logs.glob("*/ranks/*/*.rec"))
    shutil.rmtree(logs, ignore_errors=True)
    return {
        "lower quartile_us": statistics.quantiles(steps, n=4)[0] / 1e3,
        "median_us": statistics.median(steps) / 1e3,
        "mean_us": statistics.fmean(steps) / 1e3,
        "bytes_per_step": size / content["step_count"],
    }


def fresh_processes(
    kind: str, rounds: int, *, folder: Path, asked: Sequence[str]
) -> dict[str, object]:
    """Interleaved rounds of one loop in every way; prints the tables."""
    ways: dict[str, Callable[[], object]] = {
        way: lambda way=way: run_loop(kind, folder, way)  # type: ignore[misc]
        for way in WAYS
        if way in ("bare", *asked) and (way != SPIED or PY_SPY.exists())
    }
    results = interleaved(ways, rounds)
    content: dict[str, object] = {"runs": results}
    for measure in ("lower quartile", "median", "mean"):
        runs = {way: [run[f"{measure}_us"] for run in rows] for way, rows in results.items()}
        rows = [against(runs["bare"], values, way) for way, values in runs.items()]
        title = f"{kind}: {measure} step of a run, fresh processes"
        print(table(rows, title=title, unit="us"))
        content[measure] = [asdict(row) for row in rows]
    sizes = [run["bytes_per_step"] for run in results.get("haiprof", ())]
    if sizes:
        print(f"{kind}: haiprof wrote {statistics.median(sizes):.0f} bytes per step\n")
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--loops", nargs="+", default=sorted(STEPS), choices=sorted(STEPS))
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="beside the bare one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    content: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for kind in options.loops:
            content[kind] = fresh_processes(
                kind, options.rounds, folder=Path(temporary), asked=options.ways
            )
    if options.json:
        save(options.json, content)


if __name__ == "__main__":
    main()
