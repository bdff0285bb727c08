"""`haiprof ls --live` in narrow terminals: every number is whole, whatever a job is called."""

from __future__ import annotations

import pytest

from haiprof.live.follow import JobNow, RankNow
from haiprof.show.card import view_text
from haiprof.show.views.jobs import JOBS, RANK, RANKS, Selection, top_view

SPLIT: dict[str, float | None] = {
    "dataloader": 0.55, "forward": 0.12, "backward": 0.23, "optimizer": 0.05, "other": 0.05,
}  # fmt: skip
JOB_ID = "finetune-llama-20261123-020521-99747797a9be4abb"
VERDICT = "dataloader-bound: training waits for batches 55 % of a step, and the cores are full"


def rank(number: int) -> RankNow:
    return RankNow(
        rank=number, attempt=0, host="node-0012", pid=4_194_300, step=1_234_567, step_is_exact=True,
        step_ns=123.4e6, split=SPLIT, times_ns=tuple(range(100, 140)),
        slowest=((1234, 300_000_000, "dataloader"),), idle_ns=5, recording=True,
        counters={"cpu_cores": 112.3, "utilization_ratio": 0.97, "memory_rss_bytes": 2e10},
    )  # fmt: skip


@pytest.mark.parametrize("level", [JOBS, RANKS, RANK])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_nothing_is_truncated(level: str, width: int) -> None:
    ranks = tuple(rank(number) for number in (0, 1, 127))
    job = JobNow(
        id=JOB_ID, name="finetune-llama", path="/x", host="node-0012", pid=1,
        elapsed_ns=3_000 * 10**9, running=True, world_size=128, ranks=ranks, verdict=VERDICT,
    )  # fmt: skip
    view = top_view([job], Selection(level=level), height=24, width=width, colored=False)
    text = view_text(view, width=width)
    lines = text.splitlines()
    assert "…" not in text
    assert max(map(len, lines)) <= width
    assert len(lines) <= 24
    whole = "".join(line.split("  ")[0].strip() for line in lines)
    assert JOB_ID in whole
    for known in (
        ("1234567", "123 ms", "97 %") if level != RANK else ("55 %", "67.9 ms", "18.6 GiB")
    ):
        assert known in text
    if level != JOBS:
        assert VERDICT in " ".join(text.split())


def test_long_list_says_which_part_of_it_is_shown() -> None:
    jobs = [
        JobNow(
            id=f"{JOB_ID}-{number}", name="finetune-llama", path="/x", host="node-0012", pid=1,
            elapsed_ns=10**9, running=True, world_size=1, ranks=(rank(0),), verdict=None,
        )
        for number in range(9)
    ]  # fmt: skip
    for width in (60, 80):
        view = top_view(jobs, Selection(job=8), height=24, width=width, colored=False)
        lines = view_text(view, width=width).splitlines()
        assert len(lines) <= 24
        assert lines[-1].rstrip().endswith("of 9")
        assert "jobs" in lines[-1]
