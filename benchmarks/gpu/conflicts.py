"""Other tools on the same GPU: the job's own profiler, Kineto's daemon, nsys."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.findings import rank_lines
from benchmarks.gpu.recording import run_job


def own_profiler(bench: Bench) -> None:
    """The job's profiler warms up and records over the steps of our window: it loses nothing."""
    words = ("--steps", bench.scale("40", "18"), "--size", bench.scale("1024", "32"))
    job = run_job(bench, "profiled", *words, options=("--steps", "9:14"))
    bench.tell("exit_status", job.returncode)
    bench.tell("own_kernels", sum(job.facts.get("own_kernels", [])))
    window = next(iter(rank_lines(job, "trace_window")), {})
    bench.tell("our_window", str(window.get("state", "no window")))
    bench.note("why", window.get("reason"))


def kineto_daemon(bench: Bench) -> None:
    """KINETO_USE_DAEMON is set: the job runs as ever, and our window is refused in words."""
    words = ("--steps", bench.scale("40", "16"), "--size", bench.scale("1024", "32"))
    quiet = {"KINETO_USE_DAEMON": "1", "KINETO_LOG_LEVEL": "99",
             "KINETO_IPC_SOCKET_DIR": str(bench.scratch)}  # fmt: skip
    job = run_job(bench, "plain", *words, options=("--steps", "8:11"), environment=quiet)
    bench.tell("exit_status", job.returncode)
    window = next(iter(rank_lines(job, "trace_window")), {})
    bench.tell("our_window", str(window.get("state", "no window")))
    bench.tell("reason_names_it", "KINETO_USE_DAEMON" in str(window.get("reason")))


def nsys_records(bench: Bench) -> None:
    """Haiprof inside a job that nsys records: the job runs as ever, our window is refused."""
    path, reason = nsys_here()
    if path is None:
        for figure in ("exit_status", "our_window"):
            bench.skip(figure, reason)
        return
    words = ("--steps", bench.scale("40", "16"), "--size", bench.scale("1024", "32"))
    record = [path, "profile", "--trace=cuda", "--force-overwrite=true",
              f"--output={bench.scratch / 'beside'}"]  # fmt: skip
    job = run_job(bench, "plain", *words, options=("--steps", "8:11"), in_front=record)
    bench.note("nsys", path)
    bench.note("reports", [p.name for p in bench.scratch.glob("beside*")])
    if "importer" in job.stderr.lower() or (job.returncode and job.facts):
        bench.skip("exit_status", f"nsys itself failed: {job.stderr[-300:]}")
    else:
        bench.tell("exit_status", job.returncode)
    window = next(iter(rank_lines(job, "trace_window")), {})
    bench.tell("our_window", str(window.get("state", "no window")))
    bench.note("why", window.get("reason"))


def nsys_here() -> tuple[str | None, str]:
    """Nsys as haiprof finds it, or the one that comes with Nsight Compute; else why none."""
    from haiprof.agent.burst import Refusal, find_nsys

    found = find_nsys(os.environ)
    bundled = sorted(Path("/").glob("opt/nvidia/nsight-compute/*/host/*/nsys"))
    if not isinstance(found, Refusal):
        return found, ""
    return (str(bundled[-1]), "") if bundled else (None, found.reason)


def burst(bench: Bench) -> None:
    """Counters each 100 us by nsys, beside a job; or why not."""
    seconds, (path, _) = bench.scale("14", "7"), nsys_here()
    job = run_job(
        bench, "plain", "--seconds", seconds, "--size", bench.scale("4096", "32"),
        options=("--burst", "--burst-time", bench.scale("3", "0.3")),
        environment={} if path is None else {"HAIPROF_NSYS": path},
    )  # fmt: skip
    bench.tell("exit_status", job.returncode)
    lines = job.node_lines("burst")
    last = lines[-1] if lines else {}
    bench.note("burst", lines)
    status = str(last.get("status", "no line"))
    bench.tell("told", status in ("recorded", "failed", "unavailable", "stopped"))
    if status != "recorded":
        bench.skip("samples_per_s", f"{status}: {last.get('reason')}")
        return
    from haiprof import Analyzer

    frame = Analyzer(job.paths.root).bursts()
    first = frame.row(0, named=True)
    one = frame.filter((frame["metric"] == first["metric"]) & (frame["entity"] == first["entity"]))
    apart = (one["time_ns"].max() - one["time_ns"].min()) / max(one.height - 1, 1)
    bench.tell("samples_per_s", 1e9 / apart if apart else None)
