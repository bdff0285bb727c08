"""A real Python that haiprof's hook cannot reach is found."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from haiprof.agent.node_agent import (
    find_unreported,
)


def test_unreported_live_isolated_python_is_found(tmp_path: Path) -> None:
    library = tmp_path / "libtorch_stub.so"
    library.write_bytes(b"\0" * 4096)
    code = (
        "import mmap, sys; f = open(sys.argv[1], 'rb');"
        "m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print('ready', flush=True); input()"
    )
    command = [sys.executable, "-uI", "-c", code, str(library)]
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
    ) as job:
        assert job.stdout is not None
        job.stdout.readline()
        (one,) = find_unreported(job.pid, (), tmp_path)
        assert one.pid == job.pid
        assert "-I" in one.reason
        assert find_unreported(job.pid, (job.pid,), tmp_path) == []
        job.kill()
