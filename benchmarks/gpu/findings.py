"""Jobs with one fault each, under haiprof: does the verdict on a GPU name it."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.recording import Job, lines_of, run_job

TRACED = ("--steps", "12:17", "--trace-sync")
FP32 = "fp32_products"


def launch_bound(bench: Bench) -> None:
    """Kernels shorter than their launches."""
    words = ("--steps", bench.scale("400", "24"), "--size", bench.scale("8", "1"))
    judge(bench, run_job(bench, "tiny", *words, options=TRACED), "launch_bound")


def waits_and_copies(bench: Bench) -> None:
    """`.item()` in every step, and batches from memory that is not pinned."""
    words = ("--steps", bench.scale("200", "24"), "--size", bench.scale("2048", "64"))
    job = run_job(bench, "waits", *words, options=TRACED)
    judge(bench, job, "synchronising_call", "pageable_copy")


def full_precision(bench: Bench) -> None:
    """fp32 products on a GPU with tensor cores."""
    words = ("--steps", bench.scale("60", "24"), "--size", bench.scale("4096", "256"))
    judge(bench, run_job(bench, "matrix", *words, options=TRACED), FP32)


def healthy(bench: Bench) -> None:
    """TF32 products: no such finding; the window's own start is no slow step, and no hang."""
    words = ("--steps", bench.scale("400", "60"), "--size", bench.scale("4096", "256"))
    job = run_job(
        bench, "matrix", *words, "--precision", "high",
        options=("--steps", "30:35", "--react", "both"),
    )  # fmt: skip
    from haiprof import Analyzer

    rules = named(job)
    bench.tell("fp32_named", FP32 in rules)
    blamed = {"jitter", "step_time_drift", "standstill"} & rules
    bench.tell("slow_step_blamed", ", ".join(sorted(blamed)) or "none")
    bench.tell("reactions", Analyzer(job.paths.root).reactions().height)
    window = next(iter(rank_lines(job, "trace_window")), {})
    bench.tell("window_state", str(window.get("state", "no window")))
    bench.tell("window_stall_s", (window.get("stall_ns") or 0) / 1e9)
    bench.note("window", window)
    bench.keep(job.paths.root, "run-healthy")


def loader_bound(bench: Bench) -> None:
    """A dataset that is slower than the GPU."""
    job = run_job(bench, "loader", "--steps", bench.scale("200", "40"))
    judge(bench, job, "dataloader_bound")


def left_on_cpu(bench: Bench) -> None:
    """The published case."""
    words = ("--steps", bench.scale("0", "12"), "--seconds", bench.scale("12", "60"))
    job = run_job(bench, "left_on_cpu", *words)
    judge(bench, job, "forward_bound")
    headline = job.verdict()["headline"]
    bench.tell("headline_names_it", str(headline).startswith("operators left on the CPU"))


def judge(bench: Bench, job: Job, *rules: str) -> None:
    """Which of the rules fired; the verdict and the run are kept."""
    bench.tell("exit_status", job.returncode)
    found = named(job)
    for rule in rules:
        bench.tell(rule, rule in found)
    verdict = job.verdict()
    bench.note("headline", verdict["headline"])
    bench.note("findings", [{k: f[k] for k in ("slug", "title", "evidence")}
                            for f in as_plain(verdict["findings"])])  # fmt: skip
    wanted = [a for a in as_plain(verdict["abstained"]) if a["slug"] in rules]
    bench.note("abstained", wanted)
    bench.keep(job.paths.root, f"run-{rules[0]}")


def named(job: Job) -> set[str]:
    """What the verdict names: findings, explanations of the device's time, products in fp32."""
    from haiprof.base.errors import HaiprofError
    from haiprof.trace_analysis.device_verdict import device_ledger

    found = {str(finding["slug"]) for finding in as_plain(job.verdict()["findings"])}
    try:
        device = device_ledger(job.paths.root)
    except HaiprofError:  # no window was asked for
        return found
    if any(each.kind == "gemm" and each.precision == "fp32" for each in device.operators):
        found.add(FP32)
    accounts = device.ledger.accounts
    return found | {str(accounts[row].explanation) for row in device.ledger.opportunities}


def as_plain(found: Any) -> list[dict[str, Any]]:
    """Findings as dictionaries."""
    from dataclasses import asdict, is_dataclass

    return [asdict(each) if is_dataclass(each) else dict(each) for each in found]  # type: ignore[call-overload]


def rank_lines(job: Job, kind: str) -> list[dict[str, Any]]:
    """Lines of a type that the ranks wrote."""
    return lines_of(job.paths, kind)
