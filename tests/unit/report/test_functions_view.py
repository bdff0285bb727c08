"""Labels of call stacks: short, without torch's own frames, and different where stacks are."""

from __future__ import annotations

from haiprof.show.views.functions import stack_labels

ROOT = "train.py(9): <module>|train.py(5): main"


def test_label_has_the_last_calls_without_folders_and_call_impl() -> None:
    stack = f"{ROOT}|torch/nn/modules/module.py(1): _call_impl|a/model.py(7): forward|aten::mm"
    label = "aten::mm < model.py(7): forward < train.py(5): main < ..."
    assert stack_labels([stack]) == {stack: label}
    assert stack_labels(["aten::mm"]) == {"aten::mm": "aten::mm"}


def test_stacks_that_end_alike_differ_in_their_labels() -> None:
    end = "loader.py(3): next|loader.py(4): fetch|<built-in function sleep>"
    stacks = [f"{ROOT}|train.py({line}): {name}|x.py(1): same|{end}"
              for line, name in ((30, "first"), (40, "rest"))]  # fmt: skip
    labels = stack_labels(stacks)
    start = "<built-in function sleep> < loader.py(4): fetch < loader.py(3): next < ... < "
    assert labels[stacks[0]] == f"{start}train.py(30): first < ..."
    assert labels[stacks[1]] == f"{start}train.py(40): rest < ..."


def test_stack_that_is_the_end_of_another_has_a_label_of_its_own() -> None:
    short = "a|b|c"
    labels = stack_labels([short, f"root|{short}", f"other|root|{short}"])
    assert len(set(labels.values())) >= 2
    assert labels[short] == "c < b < a"
