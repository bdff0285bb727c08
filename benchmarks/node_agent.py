"""What `haiprof node` costs: processor time and memory of its process, bytes per row and when full.

    python benchmarks/node_agent.py --seconds 120
    python benchmarks/node_agent.py --seconds 120 --processes 500

`--processes` starts so many sleeping interpreters beside it, which its search for jobs reads, too.
The processor time of the first ten seconds (imports, first look at every process) stands apart. The
clock's own cost stands beside it: a loop that does nothing but wake up four times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START_S = 10.0
IDLE = "import time\nwhile True: time.sleep(0.25)"
SLEEPER = "import time; time.sleep(1e6)"


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def status_mb(pid: int, name: str) -> float:
    """A value of /proc/PID/status in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(name))


def measure(folder: Path, seconds: float) -> None:
    """Runs the agent and the idle loop beside each other."""
    command = [sys.executable, "-m", "haiprof", "node", str(folder)]
    agent = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    idle = subprocess.Popen([sys.executable, "-c", IDLE])
    try:
        time.sleep(START_S)
        started, began = cpu_s(agent.pid), time.monotonic()
        idled = cpu_s(idle.pid)
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        share = (cpu_s(agent.pid) - started) / elapsed
        beside = (cpu_s(idle.pid) - idled) / elapsed
        now, peak = status_mb(agent.pid, "VmRSS:"), status_mb(agent.pid, "VmHWM:")
    finally:
        idle.kill()
        idle.wait()
        agent.send_signal(signal.SIGTERM)
        _, said = agent.communicate(timeout=60)
    sizes = next(line for line in said.splitlines() if "when full" in line)
    print(
        f"{share:.2%} of a core over {elapsed:.0f} s (idle loop {beside:.2%}), {started:.2f} s at"
    )
    print(f"its start; {now:.1f} MB resident, {peak:.1f} MB at most; load {os.getloadavg()[0]:.1f}")
    print(sizes)
    events = next(folder.glob("nodes/*/events.jsonl"))
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    cost = [line for line in lines if line["type"] == "cost"][-1]
    for source, each in sorted(cost["sources"].items()):
        per_s = each["cpu_ns"] / cost["elapsed_ns"]
        print(f"  {source}: {each['cpu_ns'] / each['sample_count'] / 1e3:.0f} us, {per_s:.3%}")


def main() -> None:
    """Measures once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--processes", type=int, default=0)
    options = parser.parse_args()
    sleepers = [
        subprocess.Popen([sys.executable, "-S", "-c", SLEEPER]) for _ in range(options.processes)
    ]
    try:
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder), options.seconds)
    finally:
        for sleeper in sleepers:
            sleeper.kill()
        for sleeper in sleepers:
            sleeper.wait()


if __name__ == "__main__":
    main()
