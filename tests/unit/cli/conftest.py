"""What tests of commands share."""

from __future__ import annotations

import pytest

from haiprof.cli import main
from tests.unit.cli import Ran, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process, which says nothing of work that takes long."""
    monkeypatch.setattr("haiprof.cli.shared._QUIET_S", 3600.0)

    def ran(*words: object) -> Ran:
        status = main([str(word) for word in words])
        return Ran(status, *capsys.readouterr())

    return ran
