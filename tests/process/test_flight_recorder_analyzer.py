"""Collectives that contradict each other: haiprof beside the analyzer of torch, on NCCL's form."""

from __future__ import annotations

import json
import pickle
import subprocess
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof.run_analysis.collectives import find_mismatches
from haiprof.trace_format.flight_recorder import read_torch_dump
from tests.process.jobs import PYTHON

pytestmark = pytest.mark.slow
Entries = list[dict[str, Any]]

ANALYZER = """
import json, pickle, sys
from pathlib import Path
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig

answers = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    details = {path.name: pickle.loads(path.read_bytes()) for path in sorted(folder.iterdir())}
    for rank, dump in enumerate(details.values()):
        dump["rank"] = rank
    args = JobConfig().parse_args([str(folder)])
    found = build_db(details, args, "2.10").collectives
    answers[folder.name] = sorted({
        other.type_of_mismatch.state.name
        for each in found if not each.pass_check
        for other in (each.mismatch_collectives or {}).values()
    })
print("answers", json.dumps(answers))
"""
"""In a process of its own: tests import no torch."""


class Ring:
    """What one rank's Flight Recorder writes; sequence numbers as ProcessGroupNCCL counts them."""

    def __init__(self) -> None:
        self.entries: Entries = []
        self._sequence = 0

    def one(self, name: str, size: Sequence[int] = (4, 4), **more: Any) -> Ring:
        """A collective by itself."""
        self._sequence += 1
        return self._add(name, size, **more)

    def coalesced(self, *sizes: Sequence[int], member: str, name: str = "coalesced") -> Ring:
        """Collectives that are run as one: they share a number with the entry that ends them."""
        self._sequence += 1
        for size in sizes:
            self._add(member, size)
        return self._add(name, (0,))

    def _add(self, name: str, size: Sequence[int], *, dtype: str = "Float") -> Ring:
        number = len(self.entries)
        grown = [prod(size) * 2] if "all_gather" in name else list(size)
        self.entries.append({
            "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"),
            "collective_seq_id": self._sequence, "p2p_seq_id": 0, "op_id": number + 1,
            "profiling_name": f"nccl:{name}", "time_created_ns": 1_000 + number, "frames": [],
            "input_sizes": [list(size)], "input_dtypes": [dtype], "output_sizes": [grown],
            "output_dtypes": [dtype], "state": "completed", "time_discovered_started_ns": 2_000,
            "time_discovered_completed_ns": 3_000, "retired": True, "timeout_ms": 600_000,
            "is_p2p": False,
        })  # fmt: skip
        return self


def step(ring: Ring) -> Ring:
    ring.one("all_reduce").coalesced((4, 4), (3, 4), member="broadcast")
    uneven = ((4, 4), (5, 4))
    return ring.coalesced(*uneven, member="_broadcast_oop", name="ALLGATHER_coalesced")


def usual() -> Ring:
    return step(step(Ring().one("broadcast")))


STORIES = {
    "alike": (usual().one("all_reduce"), usual().one("all_reduce")),
    "behind": (usual().one("all_reduce"), usual()),
    "kind": (usual().one("all_reduce"), usual().one("all_gather")),
    "size": (usual().one("all_reduce"), usual().one("all_reduce", (5, 4))),
    "dtype": (usual().one("all_reduce"), usual().one("all_reduce", dtype="Half")),
}
CONTRADICTIONS = {
    "COLLECTIVE_TYPE_MISMATCH": "kind",
    "SIZE_OR_SYNTAX_MISMATCH": "element_count",
    "COLLECTIVE_DTYPE_MISMATCH": "dtype",
}


def write(folder: Path) -> None:
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    for name, rings in STORIES.items():
        (folder / name).mkdir(parents=True)
        for rank, ring in enumerate(rings):
            dump = {"version": "2.10", "pg_config": groups, "entries": ring.entries}
            (folder / name / f"rank_{rank}").write_bytes(pickle.dumps(dump))


def test_ranks_contradict_each_other_where_the_analyzer_of_torch_says_so(tmp_path: Path) -> None:
    write(tmp_path / "dumps")
    command = [PYTHON, "-c", ANALYZER, str(tmp_path / "dumps")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith("answers "))
    theirs = {
        name: [CONTRADICTIONS[state] for state in states if state in CONTRADICTIONS]
        for name, states in json.loads(line.removeprefix("answers ")).items()
    }
    ours = {}
    for name in STORIES:
        frames = [
            read_torch_dump(tmp_path / "dumps" / name / f"rank_{rank}").entries.with_columns(
                rank=pl.lit(rank, pl.Int64)
            )
            for rank in range(2)
        ]
        ours[name] = [found.what for found in find_mismatches(pl.concat(frames))]
    assert ours == theirs
    assert [name for name, found in ours.items() if found] == ["kind", "size", "dtype"]
