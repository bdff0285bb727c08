from __future__ import annotations

import os
import time
from pathlib import Path

from haiprof.base.units import NS_PER_S
from haiprof.show.run_header import manifest_or_none, run_header
from tests.unit.report.fake_run import empty_run


def header(folder: Path, **manifest: object):  # type: ignore[no-untyped-def]
    run = empty_run(folder, **manifest).run
    return run_header(run, manifest_or_none(run))


def test_header_ended_run_has_duration_and_exit(tmp_path: Path) -> None:
    found = header(tmp_path)
    assert (found.state, found.outcome) == ("ended", "ended, exit 0")
    assert found.duration_ns == 63 * NS_PER_S


def test_header_run_ended_by_a_signal_names_it(tmp_path: Path) -> None:
    found = header(tmp_path, exit_status=None, signal="SIGTERM")
    assert found.outcome == "ended by SIGTERM"


def test_header_run_with_living_launcher_is_running(tmp_path: Path) -> None:
    found = header(tmp_path, end_wall_ns=None, exit_status=None, start_wall_ns=time.time_ns())
    assert found.state == "running"
    assert found.duration_ns is not None


def test_header_pid_reused_by_a_younger_process_is_killed(tmp_path: Path) -> None:
    found = header(tmp_path, end_wall_ns=None, exit_status=None, start_wall_ns=NS_PER_S)
    assert found.state == "killed"


def test_header_run_without_launcher_is_killed(tmp_path: Path) -> None:
    found = header(tmp_path, end_wall_ns=None, exit_status=None, launcher_pid=2**22 + 1)
    assert (found.state, found.duration_ns) == ("killed", None)


def test_header_run_of_another_host_lives_while_its_files_grow(tmp_path: Path) -> None:
    folder = tmp_path / "nodes" / "far"
    folder.mkdir(parents=True)
    record = folder / "host.rec"
    record.write_bytes(b"")
    here = {"end_wall_ns": None, "exit_status": None, "host": "far"}
    assert header(tmp_path, **here).state == "running"
    os.utime(record, (time.time() - 3600, time.time() - 3600))
    assert header(tmp_path, **here).state == "killed"


def test_header_damaged_manifest_still_names_the_run(tmp_path: Path) -> None:
    run = empty_run(tmp_path / "train-1").run
    run.manifest.write_text("{")
    found = run_header(run, manifest_or_none(run))
    assert (found.name, found.start_wall_ns) == ("train-1", None)
    assert found.state == found.outcome == "damaged"
