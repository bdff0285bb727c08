"""Whether `haiprof compare` claims what is there: equal runs, and runs 3 % and 10 % apart.

    python benchmarks/compare_runs.py --rounds 20 --json benchmarks/results/compare_runs.json

Each round records four short runs of one loop under haiprof, in shuffled order: two equal ones, one
3 % slower and one 10 % slower. Of `sleep` the step mostly sleeps and the difference is a longer
sleep of the data set; of `compute` it computes and the difference is more of the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from compare import save

REPOSITORY = Path(__file__).parent.parent
sys.path.insert(0, str(REPOSITORY))

from haiprof.diagnosis.compare.compared_run import open_compared_run  # noqa: E402
from haiprof.diagnosis.compare.comparison import Comparison, compare_runs  # noqa: E402

RUNS = {"first": 1.0, "second": 1.0, "3 %": 1.03, "10 %": 1.10}
PAIRS = {"equal": ("first", "second"), "3 % apart": ("first", "3 %"),
         "10 % apart": ("second", "10 %")}  # fmt: skip
STEP_S = 0.012
JOB = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
kind, ratio, steps = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1); torch.manual_seed(0)
STEP_S = {step_s}
class Data(Dataset):
    def __len__(self): return steps
    def __getitem__(self, place):
        if kind == "sleep":
            time.sleep(0.2 * STEP_S + (ratio - 1) * STEP_S)
        return torch.randn(32, 64)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
work = torch.randn(96, 96)
for batch in DataLoader(Data(), batch_size=None):
    if kind == "sleep":
        time.sleep(0.7 * STEP_S)
    else:
        for _ in range(round(300 * ratio)):
            work @ work
    loss = (model(batch) - batch).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


@contextlib.contextmanager
def place(keep: Path | None, number: int) -> Iterator[Path]:
    """A folder for one round."""
    if keep is None:
        with tempfile.TemporaryDirectory() as temporary:
            yield Path(temporary)
    else:
        folder = keep / f"{number:02d}"
        folder.mkdir(parents=True)
        yield folder


def record(folder: Path, kind: str, name: str, steps: int) -> None:
    """One run under haiprof."""
    logs = folder / "logs"
    script = folder / "job.py"
    script.write_text(JOB.replace("{step_s}", str(STEP_S)))
    identity = f"{time.time_ns()}"
    command = [sys.executable, "-m", "haiprof", "run", "--quiet", "--log-dir", str(logs), "--name",
               "run", "--run-id", identity, "--", sys.executable, str(script), kind,
               str(RUNS[name]), str(steps)]  # fmt: skip
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environ, cwd=folder)
    (logs / f"run-{identity}").rename(logs / name.replace(" %", "_percent"))


def judged(folder: Path) -> list[dict[str, object]]:
    """The pairs of one round."""
    runs = {
        name: open_compared_run(folder / "logs" / name.replace(" %", "_percent")) for name in RUNS
    }
    return [
        row(pair, compare_runs(runs[before], runs[after]))
        for pair, (before, after) in PAIRS.items()
    ]


def row(pair: str, found: Comparison) -> dict[str, object]:
    """One pair's outcome."""
    change = found.change
    others = [load.other_ratio for load in found.loads]
    return {"pair": pair, "state": found.state, "ratio": change.ratio, "low": change.low_ratio,
            "high": change.high_ratio, "unjudged": found.unjudged,
            "other_load": others}  # fmt: skip


def table(rows: list[dict[str, object]]) -> str:
    """How often each pair was claimed to differ."""
    lines = [
        "| pair | slower | faster | not claimed | cannot be judged | pairs |",
        "|---|" + "---|" * 5,
    ]
    for pair in PAIRS:
        states = Counter(str(one["state"]) for one in rows if one["pair"] == pair)
        counts = [states[state] for state in ("slower", "faster", "same", "undecided")]
        lines.append(f"| {pair} | " + " | ".join(map(str, counts)) + f" | {sum(counts)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--kind", choices=["sleep", "compute"], default="sleep")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="keep the run directories here")
    parser.add_argument("--first", type=int, default=0, help="number of the first round to keep")
    parser.add_argument("--rejudge", type=Path, help="judge what --keep kept here, and run nothing")
    options = parser.parse_args()
    began, rows = os.getloadavg(), []
    if options.rejudge is not None:
        rows = [one for kept in sorted(options.rejudge.iterdir()) for one in judged(kept)]
        if options.json:
            save(options.json, {"kind": options.kind, "rows": rows})
        print(table(rows))
        return
    for number in range(options.rounds):
        with place(options.keep, options.first + number) as folder:
            for name in random.sample(list(RUNS), len(RUNS)):
                record(folder, options.kind, name, options.steps)
            rows += judged(folder)
        print(f"round {number + 1} of {options.rounds}", flush=True)
        if options.json:
            loads = {"before": began, "after": os.getloadavg()}
            save(options.json, {"kind": options.kind, "load_average": loads, "rows": rows})
    print(table(rows))
    print(f"load average {began[0]:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
