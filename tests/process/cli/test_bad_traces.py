"""Traces that nobody should have written: what they cost a process that reads them."""

from __future__ import annotations

import gzip
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.test_bad_traces import FORESEEN


@pytest.mark.proof
@pytest.mark.parametrize("filler", [" ", "a"])
def test_gzip_bomb_needs_little_memory(tmp_path: Path, filler: str) -> None:
    """1.5 GB of blanks, or of one name, from 1.5 MB of gzip."""
    path = tmp_path / "rank0.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents":[' + (b"" if filler == " " else b'{"name":"'))
        for _ in range(1500):
            file.write(filler.encode() * 1_000_000)
        file.write(b"]}" if filler == " " else b'"}]}')
    code = (
        "import resource, sys; from haiprof.cli import main; status = main(sys.argv[1:]);"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr);"
        "sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "trace-report", str(path)],
        capture_output=True, text=True, timeout=200,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)),
    )  # fmt: skip
    assert done.returncode in FORESEEN, done.stderr
    assert int(done.stderr.splitlines()[-1]) < 1 << 20  # KiB
