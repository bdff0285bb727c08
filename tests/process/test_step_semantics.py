"""A step is what the author of the loop would call one, in every kind of loop."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl
import pytest

from tests.process.conftest import RunLoop
from tests.process.loops import LOOPS, OF_TWO_RANKS, marked

pytestmark = pytest.mark.slow

PHASES = ("dataloader", "forward", "backward", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the script does, counted by hand."""

    micro: list[int]
    """Backward passes of each step."""
    optimizer_steps: list[int] | None = None
    """Of each step; one each unless given."""
    skipped: tuple[int, ...] = ()
    """Steps whose optimizer GradScaler held back."""
    eval_batches: int = 0
    """Batches evaluated, in all."""
    forwards: int | None = None
    """Forward passes of the job in training; as many as backward passes unless given."""
    dataloader: bool = True
    """Whether the script has a DataLoader."""
    boundary: str = "dataloader"


EXPECTED = {
    "in_turn": Expected(  # each one's, after those of the one before it
        micro=[1] * (12 + 10) + [3, 3, 1, 3, 3, 1] + [1] * 8 + [2] * 9,
        optimizer_steps=[1] * 28 + [1, 1, 0, 1, 1, 0, 1, 1] + [2] * 9,
        skipped=(28 + 2, 28 + 5),
        eval_batches=12,
        forwards=12 + 10 + 14 + 8 + 9 * 4,
    ),
    "plain": Expected(micro=[1] * 12),
    "evaluation": Expected(micro=[1] * 10, eval_batches=12),
    "accumulation": Expected(micro=[3, 3, 1, 3, 3, 1]),
    "grad_scaler": Expected(
        micro=[1] * 8, skipped=(2, 5), optimizer_steps=[1, 1, 0, 1, 1, 0, 1, 1]
    ),
    "gan": Expected(micro=[2] * 9, optimizer_steps=[2] * 9, forwards=9 * 4),
    "lbfgs": Expected(micro=[3] * 5),
    "no_loader": Expected(micro=[1] * 11, dataloader=False, boundary="optimizer"),
    "ddp": Expected(micro=[1] * 6 + [2] * 2),
    "fsdp2": Expected(micro=[1] * 6),
    "checkpoint_reentrant": Expected(micro=[1] * 7),
    "checkpoint_non_reentrant": Expected(micro=[1] * 7),
    "compiled_eager": Expected(micro=[1] * 7),
    "compiled_inductor": Expected(micro=[1] * 7),
    "compiled_blocks": Expected(micro=[1] * 7),
    "trainer": Expected(micro=[2] * 6, eval_batches=2),
    "lightning": Expected(micro=[1] * 12, eval_batches=2 + 2 * 3),
    "accelerate": Expected(micro=[2] * 4),
}


@pytest.mark.parametrize("name", marked(LOOPS))
def test_steps_of_a_loop_are_those_that_its_author_counts(name: str, run_loop: RunLoop) -> None:
    expected, ranks = EXPECTED[name], 2 if name in OF_TWO_RANKS else 1
    analyzer = run_loop(name, haiprof=True).analyzer()
    found = analyzer.steps().sort("rank", "attempt", "step")
    assert found["rank"].unique().sort().to_list() == list(range(ranks))
    assert found["attempt"].unique().to_list() == [0]
    for rank in range(ranks):
        check_counts(found.filter(rank=rank), expected)
        check_times(found.filter(rank=rank), expected)
    spans = analyzer.phases()
    evaluation = spans.filter(phase="eval")
    assert evaluation.height == expected.eval_batches
    assert evaluation["step"].null_count() == evaluation.height
    assert (analyzer.ranks()["eval_ns"] > 0).all() == bool(expected.eval_batches)
    forwards = spans.filter(pl.col("phase") == "forward", pl.col("step").is_not_null())
    assert forwards.height == ranks * (expected.forwards or sum(expected.micro))


def check_counts(steps: pl.DataFrame, expected: Expected) -> None:
    assert steps["step"].to_list() == list(range(len(expected.micro)))
    assert steps["micro_step_count"].to_list() == expected.micro
    once = [1] * len(expected.micro)
    assert steps["optimizer_step_count"].to_list() == (expected.optimizer_steps or once)
    skipped = steps.filter(pl.col("skipped"))["step"].to_list()
    assert tuple(skipped) == expected.skipped


def check_times(steps: pl.DataFrame, expected: Expected) -> None:
    """They follow each other, and their phases are measured and add up."""
    gaps = steps["start_ns"].diff().drop_nulls() - steps["step_ns"][:-1]
    assert (gaps >= 0).all()
    assert set(steps["boundary"]) == {expected.boundary}
    assert steps["confidence"].is_between(0.0, 1.0).all()
    for phase in PHASES:
        times = steps[f"{phase}_host_ns"]
        if phase == "dataloader" and not expected.dataloader:
            assert times.null_count() == len(times)
        else:
            assert times.null_count() == 0
            assert (times > 0).all() if phase in ("forward", "backward") else (times >= 0).all()
    parts = [pl.col(f"{phase}_host_ns").fill_null(0) for phase in (*PHASES, "other")]
    assert steps.select(pl.sum_horizontal(parts) == pl.col("step_ns")).to_series().all()
    assert steps["forward_device_ns"].null_count() == len(steps)  # no device here
