"""Sizes of inputs: one line where they change, nothing read where that would run the job's code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd.profiler import profile
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from haiprof.in_job.object_settings import InputSizes


def look(sizes: InputSizes, *args: Any, tag: int = 1, **kwargs: Any) -> None:
    sizes.look(7, tag, args, kwargs)


def test_a_line_is_written_where_the_size_of_a_modules_inputs_changes() -> None:
    lines: list[dict[str, Any]] = []
    sizes = InputSizes(lines)
    for length in (10, 10, 30):
        look(sizes, torch.zeros(4, length), mask=torch.zeros(length))
        look(sizes, {"x": torch.zeros(5)}, "a word", None, tag=2)
    found = [(line["root"], line["number_count"]) for line in lines]
    assert found == [(1, 50), (2, 5), (1, 150)]
    assert {line["step"] for line in lines} == {7}


def test_padding_of_an_attention_mask_is_counted_and_of_nothing_else() -> None:
    sizes = InputSizes([])
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0]])
    look(sizes, attention_mask=mask, input_ids=torch.zeros(3, 4))
    look(sizes, {"attention_mask": mask.bool(), "input_ids": None})
    look(sizes, input_ids=mask, attention_mask=mask.float())
    look(sizes, mask, attention_mask=mask[None])
    look(sizes, attention_mask=mask.to("meta"))
    assert list(sizes.masks.values()) == [8, 2, 24, 14, 0]
    large = torch.ones(512, 1024, dtype=torch.long)
    large[:, 256:] = 0
    sizes.restart()
    look(sizes, attention_mask=large)
    columns, empty, tokens, zeros, _ = sizes.masks.values()
    assert columns < 70, "a part of its columns"
    assert (empty / columns, zeros / tokens) == pytest.approx((0.75, 0.75), abs=0.02)


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([[7, 8, 5, 0, 0, 0], [7, 0, 0, 0, 0, 0]], [6, 3, 12, 8, 1]),
        ([[1, 1, 1, 7, 8], [1, 1, 1, 1, 8]], [5, 3, 10, 7, 1]),  # the end of all is alike
        ([[3, 4, 5], [6, 7, 8]], [3, 0, 6, 0, 1]),
        ([[3, 4, 9, 9], [6, 7, 9, 9]], [4, 0, 8, 0, 1]),  # a feature or two that all have
    ],
)
def test_padding_is_told_from_tokens_where_there_is_no_mask(
    rows: list[list[int]], found: list[int]
) -> None:
    sizes = InputSizes([])
    look(sizes, torch.zeros(2, 9), torch.tensor(rows), torch.ones(2, 3, dtype=torch.long))
    look(sizes, torch.ones(2, 3, dtype=torch.uint8), torch.ones(3, dtype=torch.long))
    assert list(sizes.masks.values()) == found


def test_nothing_that_follows_the_jobs_operators_sees_how_its_mask_is_read() -> None:
    class Follow(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            raise AssertionError("the job sees an operator of haiprof's")

    sizes, mask = InputSizes([]), torch.ones(2, 3, dtype=torch.long)
    with Follow():  # type: ignore[no-untyped-call]
        look(sizes, attention_mask=mask)
    with profile() as seen:
        look(sizes, attention_mask=mask)
    assert not [event for event in seen.function_events or () if "nonzero" in event.name]
    assert not any(sizes.masks.values())


def test_a_look_is_due_once_and_again_in_the_child_of_a_fork() -> None:
    sizes = InputSizes([])
    assert sizes.becomes_due()
    look(sizes, torch.zeros(3))
    assert not sizes.becomes_due()
    sizes.restart()
    assert sizes.becomes_due()


def test_tensors_of_the_jobs_own_kind_and_modes_are_left_alone() -> None:
    class Own(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise AssertionError("the job's own code ran")

    class Mode(TorchFunctionMode):
        def __torch_function__(self, *_: Any, **__: Any) -> Any:
            raise AssertionError("the job's own code ran")

    lines: list[dict[str, Any]] = []
    plain = torch.zeros(3)
    look(InputSizes(lines), torch.Tensor._make_subclass(Own, plain))
    with Mode():
        look(InputSizes(lines), plain)
    assert [line["number_count"] for line in lines] == [0, 0]
