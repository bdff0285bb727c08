"""What the DCGM sampler loads where nobody asks for it."""

from __future__ import annotations

import subprocess
import sys


def test_launcher_loads_no_http_client_for_it() -> None:
    words = (
        "import sys, haiprof.agent.samplers; print(sorted({'http', 'email'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
