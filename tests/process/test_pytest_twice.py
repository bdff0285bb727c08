"""scripts/pytest-twice in a folder of its own: what fails beside others runs once more, alone."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = Path(__file__).parents[2] / "scripts" / "pytest-twice"
_FAILS_ONCE = """
from pathlib import Path
def test_it():
    seen = Path(__file__).with_name("seen")
    first = not seen.exists()
    seen.touch()
    assert not first
"""


@pytest.mark.parametrize(
    ("source", "status", "printed"),
    [
        ("def test_it(): pass", 0, "1 passed"),
        (_FAILS_ONCE, 0, "failed beside others, passed alone: test_it.py::test_it"),
        ("def test_it(): assert False", 1, "1 failed: once more, alone"),
        ("import nothing_of_this_name", 2, "1 error"),
    ],
    ids=["clean", "flaky", "failing", "uncollected"],
)
def test_status_is_that_of_what_failed_twice(
    tmp_path: Path, source: str, status: int, printed: str
) -> None:
    scripts, python = tmp_path / "scripts", tmp_path / ".venv/bin/python"
    scripts.mkdir()
    shutil.copy(_SCRIPT, scripts)
    (scripts / "env").write_text('set -euo pipefail\ncd "$(dirname "${BASH_SOURCE[0]}")/.."\n')
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (tmp_path / "test_it.py").write_text(source)
    ran = subprocess.run(
        [scripts / "pytest-twice", "test_it.py", "-c", "/dev/null", "--rootdir", "."],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == status, ran.stderr
    assert printed in ran.stdout + ran.stderr
