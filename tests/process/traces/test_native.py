"""The compiled scanner is left out where nothing can compile it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from haiprof.trace_format.kineto import load as native

pytestmark = pytest.mark.skipif(not native.is_compiled(), reason="the scanner was not built")


ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_without_a_compiler_the_build_leaves_it_out(tmp_path: Path) -> None:
    nowhere = {"CC": "/nowhere/cc", "CXX": "/nowhere/c++", "PATH": "/usr/bin"}
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path,
         "--build-temp", tmp_path], cwd=ROOT, env=nowhere, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("*.so"))
