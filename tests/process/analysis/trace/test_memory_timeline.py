"""What torch writes here, read back."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from haiprof.trace_analysis.memory_timeline import CATEGORIES, memory_by_category


def test_category_file_agrees_with_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        profile_memory=True, record_shapes=True, with_stack=True,
    ) as profiler:  # fmt: skip
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            model(torch.ones(32, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    raw, sizes = tmp_path / "memory.raw.json.gz", tmp_path / "memory.json"
    for path in (raw, sizes):
        with pytest.warns(FutureWarning):
            profiler.export_memory_timeline(str(path), device="cpu")
    coalesced = memory_by_category(sizes)
    times, by_time = json.loads(sizes.read_text())
    theirs = {time: row[1:] for time, row in zip(times, by_time, strict=True)}  # us, last wins
    found = memory_by_category(raw)
    times_us = [int(time / 1000) for time in found["ts_ns"]]  # as torch does: in floats
    found = found.with_columns(us=pl.Series(times_us))
    ours = found.group_by("us", maintain_order=True).last()
    columns = [f"{name}_bytes" for name in CATEGORIES]
    assert ours.select("us", *columns).rows() == [(us, *row) for us, row in theirs.items()]
    assert coalesced.select(pl.col("ts_ns") // 1000, *columns).rows() == [
        (us, *row) for us, row in sorted(theirs.items())
    ]
    assert found["parameter_bytes"][-1] == 4 * (64 * 64 + 64)
    assert (found["total_bytes"] == found.select(pl.sum_horizontal(columns)).to_series()).all()
