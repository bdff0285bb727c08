"""Stacks as ranks tell them: haiprof's own calls are left out, unless the thread is in one."""

from __future__ import annotations

from haiprof.base.code_places import parse_frames

MAIN = ["/home/me/train.py", 12, "main"]
HOOK = [
    "/opt/venv/lib/python3.11/site-packages/haiprof/in_job/collective_calls.py",
    77,
    "collective",
]
BARRIER = [
    "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py",
    9,
    "barrier",
]


def test_a_call_that_goes_through_the_hook_is_the_jobs() -> None:
    assert parse_frames([MAIN, HOOK, BARRIER]) == (tuple(MAIN), tuple(BARRIER))


def test_a_thread_that_is_in_the_hook_itself_is_shown_there() -> None:
    """What haiprof holds up is not hidden."""
    assert parse_frames([MAIN, HOOK]) == (tuple(MAIN), tuple(HOOK))
