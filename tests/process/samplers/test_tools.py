"""Software is named without being loaded."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata

from haiprof.agent.samplers.tools import software


def test_software_names_torch_without_importing_it() -> None:
    code = (
        "import sys; from haiprof.agent.samplers.tools import software; found = software().torch; "
        "assert 'torch' not in sys.modules; print(found)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    try:
        expected: str | None = metadata.version("torch")
    except metadata.PackageNotFoundError:
        expected = None
    assert done.stdout.strip() == str(expected)
    assert software().python == platform.python_version()
