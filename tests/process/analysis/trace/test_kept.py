"""Answers that are kept beside a trace, asked for by several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.analysis.trace.test_kept import answers, job


def test_processes_ask_at_once_and_all_hear_the_same(tmp_path: Path) -> None:
    job(tmp_path)
    code = (
        "import sys; from haiprof.trace_analysis.report import standard_report\n"
        "for _ in range(3): print(standard_report(sys.argv[1]).as_json())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE,
                         env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "home")})
        for _ in range(3)
    ]  # fmt: skip
    said = {line for each in running for line in each.communicate(timeout=120)[0].splitlines()}
    assert len(said) == 1
    assert all(each.returncode == 0 for each in running)
    assert {path.suffix for path in answers(tmp_path)} == {".answers"}
