"""What devices can do at most: dense FLOP/s by precision, memory bandwidth, and who says so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from haiprof.base.errors import UsageError

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")
MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One device."""

    name: str
    pattern: str
    """Of its name in traces."""
    flops_per_s: Mapping[str, float]
    """By precision, without sparsity; fp64 and fp32 outside matrix units."""
    bytes_per_s: float
    source: str
    sparse_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """With 2:4 sparsity, for reference: nothing here is measured against it."""


def _peak(
    name: str, pattern: str, teraflops: dict[str, float], terabytes: float, source: str, *,
    sparse: tuple[str, ...] = (),
) -> Peak:  # fmt: skip
    dense = {precision: value * 1e12 for precision, value in teraflops.items()}
    return Peak(
        name=name, pattern=pattern, flops_per_s=dense, bytes_per_s=terabytes * 1e12, source=source,
        sparse_flops_per_s={precision: 2 * dense[precision] for precision in sparse},
    )  # fmt: skip


_AMPERE = ("tf32", "fp16", "bf16", "int8")
_HOPPER = (*_AMPERE, "fp8")
PEAKS = (
    _peak("V100 SXM2", r"V100-(?:SXM2|SXM3|DGXS)", {"fp64": 7.8, "fp32": 15.7, "fp16": 125}, 0.9,
          "NVIDIA V100 datasheet (January 2020)"),
    _peak("V100 PCIe", r"V100-PCIE", {"fp64": 7, "fp32": 14, "fp16": 112}, 0.9,
          "NVIDIA V100 datasheet (January 2020)"),
    _peak("T4", r"Tesla T4", {"fp32": 8.1, "fp16": 65, "int8": 130}, 0.32,
          "NVIDIA T4 datasheet (March 2019)"),
    _peak("A100 80 GB", r"A100.*80GB",
          {"fp64": 9.7, "fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624}, 2.039,
          "NVIDIA A100 datasheet (June 2021); the PCIe card has 1.935 TB/s", sparse=_AMPERE),
    _peak("A100 40 GB", r"A100",
          {"fp64": 9.7, "fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312, "int8": 624}, 1.555,
          "NVIDIA A100 datasheet (June 2021)", sparse=_AMPERE),
    _peak("A10", r"\bA10\b",
          {"fp32": 31.2, "tf32": 62.5, "fp16": 125, "bf16": 125, "int8": 250}, 0.6,
          "NVIDIA A10 datasheet (March 2022)", sparse=_AMPERE),
    _peak("L4", r"NVIDIA L4\b",
          {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121, "fp8": 242.5, "int8": 242.5}, 0.3,
          "NVIDIA L4 datasheet (2023), half of its figures with sparsity", sparse=_HOPPER),
    _peak("L40S", r"L40S",
          {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362, "fp8": 733, "int8": 733}, 0.864,
          "NVIDIA L40S datasheet (2023)", sparse=_HOPPER),
    _peak("H100 PCIe", r"H100 PCIe",
          {"fp64": 25.6, "fp32": 51.2, "tf32": 378, "fp16": 756, "bf16": 756, "fp8": 1513,
           "int8": 1513}, 2.0, "NVIDIA H100 PCIe product brief PB-11133 (November 2022)",
          sparse=_HOPPER),
    _peak("H100 NVL", r"H100 NVL",
          {"fp64": 30, "fp32": 60, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5, "fp8": 1670.5,
           "int8": 1670.5}, 3.9, "NVIDIA H100 datasheet (2024), half of its figures with sparsity",
          sparse=_HOPPER),
    _peak("GH200", r"GH200",
          {"fp64": 34, "fp32": 67, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9,
           "int8": 1978.9}, 4.0, "NVIDIA GH200 datasheet (2024), with HBM3", sparse=_HOPPER),
    _peak("H200", r"H200",
          {"fp64": 34, "fp32": 67, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9,
           "int8": 1978.9}, 4.8, "NVIDIA H200 datasheet (2024), half of its figures with sparsity",
          sparse=_HOPPER),
    _peak("H100 SXM", r"H100",
          {"fp64": 33.5, "fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9,
           "int8": 1978.9}, 3.35, "NVIDIA H100 architecture whitepaper v1.04, table 2",
          sparse=_HOPPER),
    _peak("B200", r"\bG?B200",
          {"fp64": 37, "fp32": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500,
           "int8": 4500}, 8.0,
          "NVIDIA DGX B200 datasheet (2024), an eighth, half of its figures with sparsity",
          sparse=_HOPPER),
    _peak("MI250X", r"MI250X",
          {"fp64": 23.95, "fp32": 23.95, "fp16": 191.5, "bf16": 191.5, "int8": 191.5}, 1.6384,
          "AMD Instinct MI250X datasheet (2022); one of the two dies, which is a device"),
    _peak("MI300X", r"MI300X",
          {"fp64": 81.7, "fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4,
           "fp8": 2614.9, "int8": 2614.9}, 5.3, "AMD Instinct MI300X datasheet (2023)",
          sparse=_HOPPER),
    _peak("MI325X", r"MI325X",
          {"fp64": 81.7, "fp32": 163.4, "tf32": 653.7, "fp16": 1307.4, "bf16": 1307.4,
           "fp8": 2614.9, "int8": 2614.9}, 6.0, "AMD Instinct MI325X datasheet (2024)",
          sparse=_HOPPER),
    _peak("MI355X", r"MI355X",
          {"fp64": 78.6, "fp32": 157.3, "fp16": 2516.6, "bf16": 2516.6, "fp8": 5033.2,
           "int8": 5033.2}, 8.0, "AMD Instinct MI355X datasheet (2025)",
          sparse=("fp16", "bf16", "int8")),
)  # fmt: skip
"""The first whose pattern is found in the device's name counts."""


def peak_of(device: str | None, overrides: Mapping[str, float] | None = None) -> Peak | None:
    """What a device can do; None where its name is not known and nothing was given."""
    known = next((peak for peak in PEAKS if device and re.search(peak.pattern, device)), None)
    if not overrides:
        return known
    flops = dict(known.flops_per_s) if known else {}
    flops |= {name: value for name, value in overrides.items() if name != MEMORY}
    return Peak(
        name=known.name if known else device or "device",
        pattern="",
        flops_per_s=flops,
        bytes_per_s=overrides.get(MEMORY, known.bytes_per_s if known else float("nan")),
        source="as given" + (f", else {known.source}" if known else ""),
    )


def parse_peak(text: str | None) -> dict[str, float] | None:
    """`bf16=989,memory=3.35` in TFLOP/s and TB/s as FLOP/s and bytes/s."""
    if text is None:
        return None
    found = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name not in (*PRECISIONS, MEMORY) or not 0 < number < 1e9:
            raise UsageError(
                f"--peak {text}: expected TFLOP/s by precision, and TB/s of memory",
                hint=f"--peak bf16=989.4,memory=3.35; precisions: {', '.join(PRECISIONS)}",
            )
        found[name] = number * 1e12
    return found
