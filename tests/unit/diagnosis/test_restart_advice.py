"""Start again, without a node, or stop: by all deaths of a job, told from what is known of each."""

from __future__ import annotations

import pytest

from haiprof.diagnosis.restart_advice import Attempt, advise

TWO = ("node-1", "node-2")


def death(cause: str, *hosts: str, **more: object) -> Attempt:
    known = {"line": None, "step": 90, "has_trained": True, "is_hardware": False, **more}
    return Attempt(run="job-7", generation=0, cause=cause, hosts=hosts, died_ns=None,
                   headline=f"it died of {cause}", **known)  # type: ignore[arg-type] # fmt: skip


AT = {"line": "train.py:88 in step"}
CASES = {
    "killed once": (TWO, [death("killed", "node-2")], "RESTART"),
    "killed there twice": (TWO, [death("killed", "node-2")] * 2, "RESTART WITHOUT node-2"),
    "killed there and elsewhere": (
        TWO, [death("killed", "node-1"), death("killed", "node-2")], "RESTART"),
    "hung where it had crashed": (
        TWO, [death("crash", "node-2"), death("hang", "node-2")], "RESTART WITHOUT node-2"),
    "no other node": (TWO[:1], [death("killed", "node-1")] * 2, "RESTART"),
    "node lost": (TWO, [death("node_lost", "node-2")], "RESTART WITHOUT node-2"),
    "only node lost": (TWO[:1], [death("node_lost", "node-1")], "RESTART"),
    "two nodes lost": ((*TWO, "node-3"), [death("node_lost", *TWO)],
                       "RESTART WITHOUT node-1,node-2"),
    "broken GPU": (TWO, [death("exception", "node-1", is_hardware=True, **AT)],
                   "RESTART WITHOUT node-1"),
    "same line": (TWO, [death("exception", "node-1", **AT), death("exception", "node-2", **AT)],
                  "STOP"),
    "same line, another death between": (
        TWO, [death("exception", **AT), death("killed"), death("exception", **AT)], "STOP"),
    "other lines": (TWO, [death("exception", line="a.py:1 in f"), death("exception", **AT)],
                    "RESTART"),
    "hung there at the same line": (
        TWO, [death("hang", "node-2", **AT)] * 2, "RESTART WITHOUT node-2"),
    "hung elsewhere at the same line": (
        TWO, [death("hang", "node-1", **AT), death("hang", "node-2", **AT)], "STOP"),
    "no memory at the same step": (TWO, [death("out_of_memory", step=s) for s in (90, 91)],
                                   "STOP"),
    "no memory later": (TWO, [death("out_of_memory", step=s) for s in (90, 200)], "RESTART"),
    "no memory at an unknown step": (TWO, [death("out_of_memory", step=None)] * 2, "RESTART"),
    "early end twice": (TWO, [death("early_exit", "node-1"), death("early_exit", "node-2")],
                        "STOP"),
    "disk full": (TWO, [death("disk_full")], "STOP"),
    "cancelled": (TWO, [death("cancelled")], "STOP"),
    "preempted": (TWO, [death("preempted")] * 9, "RESTART"),
    "time limit": (TWO, [death("time_limit")] * 9, "RESTART"),
    "never a step": (TWO, [death("launcher", has_trained=False)] * 3, "STOP"),
    "twice no step": (TWO, [death("launcher", has_trained=False)] * 2, "RESTART"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_advice_follows_from_all_deaths(case: str) -> None:
    hosts, attempts, expected = CASES[case]
    found = advise(attempts, frozenset(hosts))
    assert found.headline == expected
    status = {"RESTART": 10, "STOP": 12}.get(expected, 11)
    assert (found.exit_status, found.attempts) == (status, tuple(attempts))
