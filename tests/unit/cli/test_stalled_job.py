"""`haiprof verdict` of a job that runs and makes no steps."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, write_manifest
from tests.commands import Run
from tests.unit.diagnosis.stories import write_story


@pytest.mark.parametrize("ended", [False, True])
def test_verdict_says_that_no_step_ends_while_the_job_runs(
    tmp_path: Path, run: Run, ended: bool
) -> None:
    root = write_story(tmp_path / "train-1", lambda *_: (0.2, 5.0, 10.0, 2.0))
    manifest = Manifest(
        haiprof_version="0", name="train", command=["python", "a.py"], host=socket.gethostname(),
        launcher_pid=os.getpid(), start_wall_ns=1, end_wall_ns=2 if ended else None,
        exit_status=0 if ended else None,
    )  # fmt: skip
    write_manifest(RunPaths(root), manifest)
    found = run("verdict", root, "--json").data
    assert found["headline"].startswith("no step has ended for") is not ended
    assert (found["findings"][:1] == [] or found["findings"][0]["slug"] != "standstill") is ended
    if not ended:
        assert f"haiprof snapshot {root} --hang" in found["findings"][0]["remedy"]
