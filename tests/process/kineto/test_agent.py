"""The stand-in for dynolog is killed: what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from haiprof.agent.kineto_daemon import NAME, is_alive


def test_path_that_a_job_was_told_dies_with_a_killed_launcher(tmp_path: Path) -> None:
    """A socket that stands there while nobody listens holds `import torch` up for ten seconds."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from haiprof.agent.kineto_daemon import PrivateFolder\n"
        "from haiprof.agent.kineto_daemon import KinetoAgent\n"
        "f = PrivateFolder.create(Path(sys.argv[1])); a = KinetoAgent(f.as_seen + '/dynolog')\n"
        "a.bind(); a.start(); print(f.as_seen, flush=True); time.sleep(60)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "k")], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    told = launcher.stdout.readline().strip()
    assert is_alive(f"{told}/{NAME}")
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    assert not os.path.lexists(f"{told}/{NAME}")
