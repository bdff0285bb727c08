"""`haiprof compare` whose output nobody reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.analysis.test_compare import write


def test_reader_that_has_gone_is_neither_a_verdict_nor_a_defect(tmp_path: Path) -> None:
    before = write(tmp_path, "before", seed=1, second=1)
    after = write(tmp_path, "after", seed=2, data_ms=7.0)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "haiprof", "compare", str(before), str(after)]
    with os.fdopen(writing, "w") as gone:
        ended = subprocess.run(
            command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert ended.returncode == 141
    assert ended.stderr == ""
