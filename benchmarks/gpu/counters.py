"""Counters of the GPU beside nvidia-smi, and against work whose amount is known."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.driver import ALL_LINKS, machine, row_of, sampler
from benchmarks.gpu.load import load

MIB = 1 << 20

SMI = (
    ("gpu", "utilization_ratio", "utilization.gpu", 0.01, 0.15),
    ("gpu", "memory_used_bytes", "memory.used", MIB, 4 * MIB),
    ("gpu", "memory_total_bytes", "memory.total", MIB, MIB),
    ("gpu", "power_watts", "power.draw.average", 1.0, 20.0),
    ("gpu", "power_instant_watts", "power.draw.instant", 1.0, 40.0),
    ("gpu", "sm_clock_hz", "clocks.sm", 1e6, 60e6),
    ("gpu", "memory_clock_hz", "clocks.mem", 1e6, 10e6),
    ("gpu", "temperature_celsius", "temperature.gpu", 1.0, 3.0),
    ("gpu", "memory_temperature_celsius", "temperature.memory", 1.0, 3.0),
    ("gpu_health", "pcie_generation", "pcie.link.gen.current", 1.0, 0.01),
    ("gpu_health", "pcie_lane_count", "pcie.link.width.current", 1.0, 0.01),
    ("gpu_health", "power_limit_watts", "enforced.power.limit", 1.0, 0.6),
    ("gpu_health", "sm_clock_max_hz", "clocks.max.sm", 1e6, 1e6),
    ("gpu_health", "ecc_volatile_uncorrected_count", "ecc.errors.uncorrected.volatile.total", 1.0,
     0.01),
)  # fmt: skip
"""Sampler, column, nvidia-smi's name, its unit in ours, and how far apart two reads may be."""
REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")


def smi(name: str) -> str | None:
    """One figure of the first GPU as nvidia-smi prints it; None where it has none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    words = [tool, f"--query-gpu={name}", "--format=csv,noheader,nounits", "--id=0"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    told = done.stdout.strip()
    return None if done.returncode or told.strip("[]") in ("N/A", "Not Supported") else told


def beside_smi(bench: Bench) -> None:
    """Every figure that nvidia-smi has too, between two reads of ours; idle and under load."""
    if shutil.which("nvidia-smi") is None:
        bench.skip("differing", "no nvidia-smi here")
        return
    answers = {"idle": smi_rows()}
    with load(seconds=60):
        time.sleep(bench.scale(2.5, 0.1))  # the driver's average of power is of the last second
        answers["loaded"] = smi_rows()
    rows = [row for part in answers.values() for row in part]
    bench.tell("compared", sum(row["agrees"] is not None for row in rows))
    bench.tell("differing", sum(row["agrees"] is False for row in rows))
    bench.note("differing", [row for row in rows if row["agrees"] is False])
    bench.keep_json("nvidia-smi.json", answers)


def smi_rows() -> list[dict[str, Any]]:
    """One row per figure: ours before, theirs, ours after, and whether they agree."""
    found = []
    for name in ("gpu", "gpu_health"):
        with sampler(name) as ours:
            for source, column, theirs_name, unit, slack in SMI:
                if source == name:
                    found.append(smi_row(ours, column, theirs_name, unit, slack))
            if name == "gpu":
                found.append(reasons_row(ours))
    return found


def smi_row(ours: Any, column: str, name: str, unit: float, slack: float) -> dict[str, Any]:
    """Whether nvidia-smi's figure lies between ours before and after it, or as far off as slack."""
    before, told, after = row_of(ours).get(column), smi(name), row_of(ours).get(column)
    row = {"column": column, "before": before, "smi": told, "after": after, "agrees": None}
    if before is None or after is None or told is None:
        why = ours.told.get(column)
        return {**row, "reason": why.reason if why else "nvidia-smi has none"}
    low, high = sorted((before, after))
    return {**row, "agrees": low - slack <= float(told) * unit <= high + slack}


def reasons_row(ours: Any) -> dict[str, Any]:
    """Throttle reasons are bits, the same in both."""
    before = row_of(ours)["throttle_reasons"]
    told = next((t for name in REASONS if (t := smi(name)) is not None), None)
    after = row_of(ours)["throttle_reasons"]
    agrees = None if told is None or before is None else int(told, 16) in (before, after)
    return {"column": "throttle_reasons", "before": before, "smi": told, "after": after,
            "agrees": agrees}  # fmt: skip


def energy(bench: Bench) -> None:
    """Energy grows by the power; throttle times by no more than the time that passes."""
    with sampler() as found, load(seconds=60):
        time.sleep(bench.scale(2.5, 0.1))
        rows = [row_of(found)]
        for _ in range(bench.scale(10, 3)):
            time.sleep(bench.scale(0.5, 0.12))
            rows.append(row_of(found))
    seconds = (rows[-1]["time_ns"] - rows[0]["time_ns"]) / 1e9
    power = [row["power_instant_watts"] or row["power_watts"] for row in rows]
    if None in power or rows[0]["energy_joules"] is None:
        bench.skip("energy_by_power_ratio", "the driver gives no power or no energy")
    else:
        joules = rows[-1]["energy_joules"] - rows[0]["energy_joules"]
        bench.tell("energy_by_power_ratio", joules / seconds / statistics.fmean(power))
    shares = {name: (rows[-1][name] - rows[0][name]) / 1e9 / seconds for name in rows[0]
              if name.startswith("throttle_") and name.endswith("_ns")
              and rows[0][name] is not None}  # fmt: skip
    bench.note("throttled, of the time", shares)
    bench.tell("largest_throttle_ratio", max(shares.values(), default=0.0))
    bench.keep_json("gpu-rows-under-load.json", rows)


def copied_bytes(bench: Bench) -> None:
    """PCIe bytes as counted, against those that were copied."""
    gib = bench.scale(12, 1)
    of = machine()
    counters = ((197, 0), (198, 0), (138, ALL_LINKS), (139, ALL_LINKS))
    with sampler() as found, load("--copy", str(gib)) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        row_of(found)
        time.sleep(0.3)
        before, fields_before = row_of(found), [of.field(*each) for each in counters]
        print("", file=process.stdin, flush=True)
        copied = int(process.stdout.readline())
        time.sleep(0.3)
        after, fields_after = row_of(found), [of.field(*each) for each in counters]
        reasons = {name: why.reason for name, why in found.told.items()}
    bench.note("fields 197, 198, 138, 139 before and after", [fields_before, fields_after])
    for column, figure in (("pcie_receive_bytes", "received_ratio"),
                           ("nvlink_receive_bytes", "nvlink_received_bytes")):  # fmt: skip
        if before[column] is None or after[column] is None:
            bench.skip(figure, reasons.get(column, "the driver gave no value"))
        else:
            grown = after[column] - before[column]
            bench.tell(figure, grown / copied if figure == "received_ratio" else grown)
