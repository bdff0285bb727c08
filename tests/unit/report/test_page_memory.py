"""Memory on the page: over time, where it was highest, what it held, and what is not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from haiprof.base.units import BYTES_PER_GIB, MISSING, NS_PER_S
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show.figures.style import PHASES
from haiprof.show.page.content import page_content
from haiprof.show.page.memory_part import MemoryPart
from tests.unit.report.many_ranks import START_NS, write_many


def read(run: Path) -> MemoryPart:
    return page_content(RunFrames(run), read_traces=False).memory


def titles(part: MemoryPart) -> list[str]:
    return [panel["title"] for panel in part.data["panels"]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_many(tmp_path / "run", ranks=2, steps=60)


def test_host_memory_is_marked_where_it_was_highest(run: Path) -> None:
    part = read(run)
    assert titles(part)[:2] == ["Memory of ranks", "Memory of nodes"]
    marks = part.data["panels"][0]["marks"]
    assert [mark["text"].split()[:2] for mark in marks] == [["rank", "0"], ["rank", "1"]]
    for mark, row in zip(marks, part.peaks.rows, strict=True):
        cells = dict(zip(part.peaks.head, row, strict=True))
        assert cells["highest at"] == f"{mark['seconds']:.1f} s"
        assert cells["highest"] == cells["last"] == "20.0 GiB"  # it only grows
        assert cells["step"] == MISSING or 50 <= int(cells["step"]) < 60
        assert cells["phase"] in (*PHASES, MISSING)
    missing = dict(read(run).missing)
    assert missing["GPU memory"] == "no step was read of its allocator"
    assert "--trace-memory" in missing["by operator and module"]
    assert "none did" in missing["parameters, gradients and optimizer state"]


def test_gpu_memory_is_told_apart_by_what_stays_and_what_a_step_adds(run: Path) -> None:
    lines = [
        {"type": "gpu_memory", "time_ns": START_NS + step * NS_PER_S // 10, "step": step,
         "allocated_bytes": (3 if step else 1) * BYTES_PER_GIB,
         "peak_bytes": (10 if step > 4 else 8) * BYTES_PER_GIB,
         "reserved_bytes": 12 * BYTES_PER_GIB, "limit_bytes": 80 * BYTES_PER_GIB}
        for step in range(40)
    ]  # fmt: skip
    with (run / "ranks" / "0" / "events.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    part = read(run)
    (row,) = part.gpu.rows
    cells = dict(zip(part.gpu.head, row, strict=True))
    assert cells["kept between steps"] == "3.00 GiB"
    assert cells["added within a step"] == "7.00 GiB"
    assert (cells["highest"], cells["before step"]) == ("10.0 GiB", "5")
    assert (cells["reserved"], cells["limit"]) == ("12.0 GiB", "80.0 GiB")
    assert "Highest allocated so far" in titles(part)
    assert "GPU memory" not in dict(part.missing)
