"""What sampling costs beside a job: CPU time of the agent's thread, by source, against psutil.

    python benchmarks/sampler_cost.py --json benchmarks/results/sampler_cost.json

Ranks are idle processes with worker children. The same node and processes are sampled by haiprof's
own loop, whose cost is the one that it records in a run, and in the same seconds by a thread that
asks psutil for the quantities that psutil knows (CPU, memory, disks, network; per process CPU,
memory, bytes, switches, threads, children).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
from compare import save

from haiprof.agent.samplers.loop import SamplingLoop
from haiprof.base.options import RECORDERS, Options
from haiprof.base.units import NS_PER_S
from haiprof.linux.procfs import read_process
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import read_lines

HOST = "bench"
RANK = """
import os, sys, threading, time
for _ in range(int(sys.argv[1])):
    threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        time.sleep(3600)
time.sleep(3600)
"""


def start_rank(run: RunPaths, rank: int, threads: int, workers: int) -> subprocess.Popen[bytes]:
    """An idle process that has reported in."""
    command = [sys.executable, "-c", RANK, str(threads), str(workers)]
    process = subprocess.Popen(command, start_new_session=True)
    time.sleep(0.3)
    reading = read_process(Path("/"), process.pid)
    assert reading is not None
    paths = run.rank(rank)
    paths.root.mkdir(parents=True)
    content = {
        "version": 1, "rank": rank, "pid": process.pid, "start_ticks": reading.start_ticks,
        "host": HOST,
    }  # fmt: skip
    paths.report.write_text(json.dumps(content))
    return process


def psutil_sample(ranks: list[psutil.Process]) -> None:
    """The same questions, as far as psutil can be asked them."""
    psutil.cpu_times()
    psutil.virtual_memory()
    psutil.swap_memory()
    psutil.disk_io_counters()
    psutil.net_io_counters()
    for rank in ranks:
        for process in [rank, *rank.children(recursive=True)]:
            with process.oneshot():
                process.cpu_times()
                process.memory_info()
                process.io_counters()
                process.num_ctx_switches()
                process.num_threads()
                process.cpu_affinity()


def psutil_loop(ranks: list[psutil.Process], interval_s: float, stop: threading.Event) -> float:
    """Share of one core that psutil takes at this interval."""
    psutil_sample(ranks)
    start, began = time.perf_counter(), time.thread_time()
    while not stop.wait(interval_s - (time.perf_counter() - start) % interval_s):
        psutil_sample(ranks)
    return (time.thread_time() - began) / (time.perf_counter() - start)


def measure(interval_s: float, seconds: float, ranks: int, folder: Path) -> dict[str, object]:
    """Both side by side for some seconds."""
    run = RunPaths(folder / f"run-{interval_s}")
    processes = [start_rank(run, rank, threads=20, workers=4) for rank in range(ranks)]
    options = Options(interval_s=dict.fromkeys(RECORDERS, interval_s))
    stop, shares = threading.Event(), []
    seen = [psutil.Process(process.pid) for process in processes]
    beside = threading.Thread(target=lambda: shares.append(psutil_loop(seen, interval_s, stop)))
    loop = SamplingLoop(run, HOST, options)
    sampling = threading.Thread(target=loop.run, args=(stop,))
    sampling.start()
    beside.start()
    time.sleep(seconds)
    stop.set()
    sampling.join()
    beside.join()
    for process in processes:
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
        process.wait()
    lines, _ = read_lines(run.node(HOST).events)
    cost = [line for line in lines if line["type"] == "cost"][-1]
    return {"interval_s": interval_s, "ranks": ranks, "psutil_share": shares[0], "cost": cost}


def report(result: dict[str, object]) -> str:
    """The table of one interval."""
    cost = result["cost"]
    assert isinstance(cost, dict)
    elapsed_ns = cost["elapsed_ns"]
    share = cost["cpu_ns"] / elapsed_ns
    psutil_share = result["psutil_share"]
    assert isinstance(psutil_share, float)
    lines = [
        f"**every {result['interval_s']} s, {result['ranks']} ranks of 20 threads, 4 workers**",
        "",
        "| source | samples | per s | us per sample | of one core |",
        "|---|---|---|---|---|",
    ]
    for name, own in cost["sources"].items():
        count, cpu_ns = own["sample_count"], own["cpu_ns"]
        lines.append(
            f"| {name} | {count} | {count / elapsed_ns * NS_PER_S:.2f} | "
            f"{cpu_ns / max(1, count) / 1e3:.0f} | {cpu_ns / elapsed_ns:.3%} |"
        )
    lines += [
        f"| haiprof, all of it | | | | {share:.3%} |",
        f"| psutil, what it knows of this | | | | {psutil_share:.3%} |",
        "",
        f"haiprof / psutil: x{share / psutil_share:.2f}; ticks missed: {cost['missed_tick_count']}",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measures at the default rate and at ten times that."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for interval_s in (1.0, 0.1):
            results.append(measure(interval_s, options.seconds, options.ranks, Path(folder)))
            print(report(results[-1]), flush=True)
    if options.json:
        save(options.json, {"results": results})


if __name__ == "__main__":
    main()
