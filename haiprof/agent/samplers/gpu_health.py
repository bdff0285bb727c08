"""GPU errors, links and limits through NVML: slow to change, so read once in ten intervals."""

from __future__ import annotations

from collections.abc import Iterator

from haiprof.agent.samplers.nvml import Call, Device, NvmlSampler, call_reading
from haiprof.agent.samplers.nvml_fields import HEALTH_FIELDS, field_readings
from haiprof.agent.samplers.sampler import Node
from haiprof.linux.readings import Reading
from haiprof.run_format.tables.gpu_health import GPU_HEALTH

_SM = 1  # nvmlClockType_t
_SHUTDOWN, _SLOWDOWN = 0, 1  # nvmlTemperatureThresholds_t

CALLS = (
    Call(columns=("pcie_generation",), functions=("nvmlDeviceGetCurrPcieLinkGeneration",)),
    Call(columns=("pcie_generation_max",), functions=("nvmlDeviceGetMaxPcieLinkGeneration",)),
    Call(columns=("pcie_lane_count",), functions=("nvmlDeviceGetCurrPcieLinkWidth",)),
    Call(columns=("pcie_lane_max_count",), functions=("nvmlDeviceGetMaxPcieLinkWidth",)),
    Call(
        columns=("power_limit_watts",),
        functions=("nvmlDeviceGetEnforcedPowerLimit",),
        values=lambda milliwatts: (milliwatts / 1000,),
    ),
    Call(
        columns=("sm_clock_max_hz",),
        functions=("nvmlDeviceGetMaxClockInfo",),
        arguments=(_SM,),
        values=lambda megahertz: (megahertz * 1_000_000,),
    ),
    Call(columns=("temperature_margin_celsius",), functions=("nvmlDeviceGetMarginTemperature",)),
    Call(
        columns=("temperature_slowdown_celsius",),
        functions=("nvmlDeviceGetTemperatureThreshold",),
        arguments=(_SLOWDOWN,),
    ),
    Call(
        columns=("temperature_shutdown_celsius",),
        functions=("nvmlDeviceGetTemperatureThreshold",),
        arguments=(_SHUTDOWN,),
    ),
)


class GpuHealthSampler(NvmlSampler):
    """One record per GPU that the driver shows."""

    name = "gpu_health"
    every = 10
    table = GPU_HEALTH

    @classmethod
    def for_node(cls, node: Node) -> GpuHealthSampler:
        """The sampler of a node."""
        return cls(nvml=node.nvml, root=node.root, clock=node.clock)

    def readings(self, device: Device) -> Iterator[Reading]:
        """One batch of fields, and a call for each thing that has no field."""
        yield from field_readings(device, HEALTH_FIELDS)
        for call in CALLS:
            yield call_reading(device, call)
