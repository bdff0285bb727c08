"""FLOPs and MFU of a step, as cards and overviews write them."""

from __future__ import annotations

import pytest

from haiprof.diagnosis.traced_window import StepWork
from haiprof.show.card import flops_text, work_text


@pytest.mark.parametrize(
    ("flops", "text"),
    [
        (14.68e6, "14.7 MFLOP"),
        (999.4e6, "999 MFLOP"),
        (999.7e6, "1 GFLOP"),
        (3.217e12, "3.22 TFLOP"),
        (12.0, "12 FLOP"),
    ],
)
def test_flops_have_three_digits_and_the_largest_unit(flops: float, text: str) -> None:
    assert flops_text(flops) == text


def test_mfu_is_left_out_where_it_is_not_known_and_a_bound_is_called_one() -> None:
    work = StepWork(
        model_flops=3.2e12, flops_per_s=2.1e14, mfu_ratio=None, is_lower_bound=False,
        kernel_known_ratio=0.8, device="NVIDIA H100 80GB HBM3", peak=None, reason="no peak",
    )  # fmt: skip
    assert work_text(work) == "3.2 TFLOP a step, 210 TFLOP/s"
