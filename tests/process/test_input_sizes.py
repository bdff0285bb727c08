"""Sizes of inputs: one line where they change, nothing read where that would run the job's code."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
