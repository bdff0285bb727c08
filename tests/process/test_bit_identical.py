"""What a job computes, prints and returns is the same with haiprof as without, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.process.conftest import RunLoop
from tests.process.jobs import EXAMPLES, TORCHRUN, Job
from tests.process.loops import LOOPS, marked

pytestmark = pytest.mark.slow

EXAMPLE_COMMANDS = {
    "train_char_transformer": ("--steps", "12", "--eval-every", "5"),
    "cpu_bound_forward": ("--steps", "12"),
    "cpu_bound_forward --fixed": ("--steps", "12", "--fixed"),
    "two_ranks_slow_one": ("--steps", "20", "--slow-ms", "2"),
    "two_ranks_slow_one forward": ("--steps", "20", "--slow-ms", "2", "--slow-phase", "forward"),
    "trainer_loop": ("--steps", "6", "--eval-every", "3"),
    "lightning_loop": ("--steps", "20", "--eval-every", "10"),
}


def example_command(name: str) -> tuple[str, ...]:
    script = name.partition(" ")[0]
    start = TORCHRUN if script.startswith("two_ranks") else ("python",)
    return (*start, str(EXAMPLES / f"{script}.py"), *EXAMPLE_COMMANDS[name], "--save", "saved.pt")


def saved_files(job: Job) -> dict[str, Any]:
    return {path.name: torch.load(path) for path in sorted(job.folder.glob("saved.pt*"))}


def assert_same(first: Any, second: Any) -> None:
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(first, second)
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same(first[key], second[key])
    else:
        assert first == second


@pytest.mark.parametrize("name", marked(EXAMPLE_COMMANDS, but=("train_char_transformer",)))
def test_example_is_bit_identical(name: str, job_cache: Callable[..., Job]) -> None:
    command = example_command(name)
    bare = job_cache(*command, haiprof=False)
    recorded = job_cache(*command, haiprof=True)
    files = saved_files(bare)
    assert len(files) == (2 if name.startswith("two_ranks") else 1)
    assert all(len(content["losses"]) > 5 for content in files.values())
    assert_same(files, saved_files(recorded))
    assert recorded.stdout == bare.stdout
    assert recorded.analyzer().steps().height > 0


@pytest.mark.parametrize("name", marked(LOOPS, but=("in_turn", "ddp")))
def test_loop_is_bit_identical(name: str, run_loop: RunLoop) -> None:
    bare, recorded = run_loop(name, haiprof=False), run_loop(name, haiprof=True)
    assert len(bare.stdout.split()[-1]) == 64  # the digest of losses and weights
    assert recorded.stdout == bare.stdout
