"""Slowdowns, M_W and M_S of two published jobs, ours beside the published ones.

Run: python benchmarks/whatif_table.py [FOLDER], by default ../shared/traces/straggler_whatif.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from haiprof.trace_analysis.what_if.operations import OperationWhatIf, operation_table

FOLDER = Path(__file__).parents[2] / "shared" / "traces" / "straggler_whatif"
Row = tuple[str, float, float]


def compared(folder: Path, job: str) -> Iterator[Row]:
    """Name, published value, ours."""
    said = json.loads((folder / f"result-{job}.json").read_text())
    what_if = OperationWhatIf(operation_table(folder / f"trace-{job}.parquet"))
    means = {
        "measured step, s": ("step_t_base", what_if.measured_ns),
        "replayed step, s": ("step_t_nodelay", what_if.reproduced_ns),
        "ideal step, s": ("step_t_noblk", what_if.ideal_ns),
    }
    for name, (key, ours) in means.items():
        yield name, sum(said[key].values()) / len(said[key]), float(ours.mean()) / 1e9
    yield "S", said["blocking_slowdown"], what_if.slowdown_ratio
    yield "M_W", _published(folder, "mw", job, "Mw"), what_if.slowest_workers_ratio() or math.nan
    yield "M_S", _published(folder, "ms", job, "Ms"), what_if.last_stage_ratio() or math.nan
    for column in ("dp_rank", "stage", "optype"):
        ours_by = dict(what_if.by(column).rows())
        for group, value in said[f"blocking_decompose_by_{column}"].items():
            yield (
                f"S of {column} {group}",
                value,
                ours_by[group if column == "optype" else int(group)],
            )


def _published(folder: Path, file: str, job: str, key: str) -> float:
    return float(json.loads((folder / f"{file}-{job}.json").read_text())[key])


def main(folder: Path) -> None:
    """Prints one table per job."""
    for job in ("AR", "ST"):
        begin = time.perf_counter()
        rows = list(compared(folder, job))
        took = time.perf_counter() - begin
        print(
            f"\n{job}: {took:.2f} s\n{'':44} {'published':>12} {'haiprof':>12} {'difference':>11}"
        )
        for name, published, ours in rows:
            print(f"{name:44} {published:12.6f} {ours:12.6f} {ours - published:+11.2e}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
