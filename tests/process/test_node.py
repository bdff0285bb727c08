"""`haiprof node`: the command itself, and what it shows afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from haiprof.__main__ import main as haiprof
from tests.process.live import within


def rows(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("nodes/*/**/*") if path.is_file())


def test_node_is_recorded_until_it_is_told_to_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "node"
    command = [sys.executable, "-m", "haiprof", "node", str(folder)]
    agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        within(60, lambda: rows(folder) > 4096, "rows of counters")
        time.sleep(3)
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode == 2
        assert "already records this node" in second.stderr
        haiprof(["node", str(folder), "--show", "--last", "1m"])
        assert "recording" in capsys.readouterr().out
    finally:
        agent.send_signal(signal.SIGTERM)
        _, said = agent.communicate(timeout=60)
    assert agent.returncode == 0
    assert "when full" in said
    assert haiprof(["node", str(folder), "--show", "--last", "1m", "--json"]) == 0
    [node] = json.loads(capsys.readouterr().out)["nodes"]
    assert not node["is_recording"]
    values = {row["metric"]: row for row in node["counters"] if row["source"] == "host"}
    total = values["memory_total_bytes"]
    assert total["min"] <= total["mean"] <= total["max"]
    assert total["mean"] > 1 << 20
    assert values["cpu_idle_cores"]["mean"] >= 0
    haiprof(["node", str(folder), "--show", "--last", "1m"])
    shown = capsys.readouterr().out
    assert "not recorded now" in shown
