"""`haiprof node`: the command itself, a job that comes and goes, and what it shows afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from haiprof.__main__ import main as haiprof
from tests.process.live import within

# What `has_mapped` looks for, without the two seconds that torch takes.
_HAS_TORCH = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sys.stdin.read()
"""


def seen(folder: Path) -> list[Mapping[str, Any]]:
    paths = folder.glob("nodes/*/seen.jsonl")
    lines = [line for path in paths for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_node_is_recorded_until_it_is_told_to_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    library = tmp_path / "libtorch_cpu.so"
    library.write_bytes(b"x" * 4096)
    folder = tmp_path / "node"
    # An orphan in a group of its own: what pytest starts is its, once some test imported torch.
    held = tmp_path / "held"
    os.mkfifo(held)
    writer = os.open(held, os.O_RDWR)
    shell = 'setsid "$0" -c "$1" "$2" <"$3" >/dev/null 2>&1 & echo $!'
    start = ["sh", "-c", shell, sys.executable, _HAS_TORCH, str(library), str(held)]
    pid = int(subprocess.run(start, capture_output=True, check=True, text=True).stdout)
    command = [sys.executable, "-m", "haiprof", "node", str(folder)]
    agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        mine = f"{pid}-"
        within(60, lambda: any(str(x.get("job")).startswith(mine) for x in seen(folder)), "the job")
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode == 2
        assert "already records this node" in second.stderr
        os.close(writer)
        within(60, lambda: any(x["type"] == "job_end" for x in seen(folder)), "its end")
        haiprof(["node", str(folder), "--show", "--last", "1m"])
        assert "recording" in capsys.readouterr().out
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        agent.send_signal(signal.SIGTERM)
        _, said = agent.communicate(timeout=60)
    assert agent.returncode == 0
    assert "when full" in said
    assert haiprof(["node", str(folder), "--show", "--last", "1m", "--json"]) == 0
    [node] = json.loads(capsys.readouterr().out)["nodes"]
    assert not node["is_recording"]
    [found] = [each for each in node["jobs"] if each["pid"] == pid]
    assert "import mmap" in found["command"]
    assert found["end_wall_ns"] > found["start_wall_ns"]
    values = {row["metric"]: row for row in node["counters"] if row["source"] == "host"}
    total = values["memory_total_bytes"]
    assert total["min"] <= total["mean"] <= total["max"]
    assert total["mean"] > 1 << 20
    assert values["cpu_idle_cores"]["mean"] >= 0
    haiprof(["node", str(folder), "--show", "--last", "1m"])
    shown = capsys.readouterr().out
    assert "not recorded now" in shown
    assert f"{pid} " in shown
