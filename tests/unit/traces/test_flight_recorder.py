"""Dumps that PyTorch itself wrote (tests/data/flight_recorder), and what they say of a hang."""

from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.run_analysis.run_frames import RunFrames
from haiprof.trace_format.flight_recorder import read_torch_dump
from tests.unit.analysis.test_deaths import Job

DUMPS = Path(__file__).parents[2] / "data/flight_recorder"
STEP = ["all_reduce", "broadcast", "all_gather", "scatter", "gather", "reduce", "barrier"]


@pytest.mark.parametrize("suffix", ["pickle", "json"])
def test_dump_of_torch_is_read_as_it_was_issued(suffix: str) -> None:
    entries = read_torch_dump(DUMPS / f"gloo_0.{suffix}").entries
    assert entries["group_name"].to_list() == ["default_pg"] * 7 + ["pair", "default_pg"]
    assert entries["kind"].to_list() == [*STEP, "all_reduce", "all_reduce"]
    assert entries["sequence"].to_list() == [*range(1, 8), 1, 8]
    assert entries["element_count"].to_list() == [12, 12, 12, 24, 12, 12, 0, 5, 7]
    assert entries["dtype"].to_list() == ["Float"] * 6 + [None, "Double", "Float"]
    assert entries["created_ns"].is_sorted()
    assert entries["completed_ns"].null_count() == 9, "gloo does not tell"


def test_both_forms_of_a_dump_say_the_same() -> None:
    for rank in range(2):
        pickled = read_torch_dump(DUMPS / f"gloo_{rank}.pickle").entries
        assert pickled.equals(read_torch_dump(DUMPS / f"gloo_{rank}.json").entries)


def test_scatter_without_inputs_on_all_but_one_rank_is_no_contradiction(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", ranks=2)
    job.run.flight.mkdir()
    for rank in range(2):
        dump = (DUMPS / f"gloo_{rank}.pickle").read_bytes()
        (job.run.flight / f"rank_{rank}").write_bytes(dump)
        job.over(rank, 1, number=6)
    (death,) = RunFrames(job.run.root).deaths()
    assert (death.cause, death.ranks) == ("hang", (1,))
    assert "it never came to all_reduce 8" in death.headline
