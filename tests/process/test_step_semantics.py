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


@pytest.fixture(params=marked(LOOPS))
def loop_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def rank_steps(name: str, run_loop: RunLoop) -> list[pl.DataFrame]:
    """Steps of each rank, by step."""
    steps = run_loop(name, haiprof=True).analyzer().steps().sort("rank", "attempt", "step")
    ranks = list(range(2 if name in OF_TWO_RANKS else 1))
    assert steps["rank"].unique().sort().to_list() == ranks
    assert steps["attempt"].unique().to_list() == [0]
    return [steps.filter(rank=rank) for rank in ranks]


def test_steps_are_counted_exactly(loop_name: str, run_loop: RunLoop) -> None:
    expected = EXPECTED[loop_name]
    for steps in rank_steps(loop_name, run_loop):
        assert steps["step"].to_list() == list(range(len(expected.micro)))
        assert steps["micro_step_count"].to_list() == expected.micro
        once = [1] * len(expected.micro)
        assert steps["optimizer_step_count"].to_list() == (expected.optimizer_steps or once)
        skipped = steps.filter(pl.col("skipped"))["step"].to_list()
        assert tuple(skipped) == expected.skipped


def test_steps_follow_each_other(loop_name: str, run_loop: RunLoop) -> None:
    for steps in rank_steps(loop_name, run_loop):
        gaps = steps["start_ns"].diff().drop_nulls() - steps["step_ns"][:-1]
        assert gaps.min() >= 0 if len(gaps) else True  # type: ignore[operator]
        assert set(steps["boundary"]) == {EXPECTED[loop_name].boundary}
        assert steps["confidence"].is_between(0.0, 1.0).all()


def test_phases_are_measured_and_add_up(loop_name: str, run_loop: RunLoop) -> None:
    expected = EXPECTED[loop_name]
    for steps in rank_steps(loop_name, run_loop):
        for phase in PHASES:
            times = steps[f"{phase}_host_ns"]
            if phase == "dataloader" and not expected.dataloader:
                assert times.null_count() == len(times)
            else:
                assert times.null_count() == 0
                assert (times >= 0).all()
        for phase in ("forward", "backward"):
            assert (steps[f"{phase}_host_ns"] > 0).all()
        parts = [pl.col(f"{phase}_host_ns").fill_null(0) for phase in (*PHASES, "other")]
        assert steps.select(pl.sum_horizontal(parts) == pl.col("step_ns")).to_series().all()
        assert steps["forward_device_ns"].null_count() == len(steps)  # no device here


def test_evaluation_is_kept_apart(loop_name: str, run_loop: RunLoop) -> None:
    expected = EXPECTED[loop_name]
    analyzer = run_loop(loop_name, haiprof=True).analyzer()
    spans = analyzer.phases()
    evaluation = spans.filter(phase="eval")
    assert evaluation.height == expected.eval_batches
    assert evaluation["step"].null_count() == evaluation.height
    assert (analyzer.ranks()["eval_ns"] > 0).all() == bool(expected.eval_batches)
    forwards = spans.filter(pl.col("phase") == "forward", pl.col("step").is_not_null())
    ranks = 2 if loop_name in OF_TWO_RANKS else 1
    assert forwards.height == ranks * (expected.forwards or sum(expected.micro))
