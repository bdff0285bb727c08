"""Events of a CPU's cores: instructions, cycles, cache fills from near and far DRAM, by model."""

from __future__ import annotations

from collections.abc import Mapping

from haiprof.linux.cpu_sockets import Cpu
from haiprof.linux.perf_events import EXCLUDE_KERNEL, INHERIT, TYPE_HARDWARE, TYPE_RAW, Event
from haiprof.linux.readings import Unavailable

LINE_BYTES = 64
INSTRUCTIONS, CYCLES = "instruction_count", "cycle_count"
LOCAL, REMOTE = "local_dram_bytes", "remote_dram_bytes"
_OWN_THREADS = EXCLUDE_KERNEL | INHERIT


def _raw(name: str, config: int, config1: int = 0) -> Event:
    return Event(name=name, type=TYPE_RAW, config=config, config1=config1, bits=_OWN_THREADS)


# Intel: fills of the core caches, prefetches included, from DRAM of the own and of other sockets
# (Linux tools/perf pmu-events, icelakex and sapphirerapids, OCR.READS_TO_CORE; the second number
# is MSR_OFFCORE_RSP).
_ICE_LAKE = (
    _raw("OCR.READS_TO_CORE.LOCAL_SOCKET_DRAM", 0x01B7, 0x70C000477),
    _raw("OCR.READS_TO_CORE.REMOTE_DRAM", 0x01B7, 0x730000477),
)
_SAPPHIRE_RAPIDS = (
    _raw("OCR.READS_TO_CORE.LOCAL_SOCKET_DRAM", 0x012A, 0x70C004477),
    _raw("OCR.READS_TO_CORE.REMOTE_DRAM", 0x012A, 0x730004477),
)
# Loads alone, without prefetches.
_LOADS = (
    _raw("MEM_LOAD_L3_MISS_RETIRED.LOCAL_DRAM", 0x01D3),
    _raw("MEM_LOAD_L3_MISS_RETIRED.REMOTE_DRAM", 0x02D3),
)
_INTEL = {
    85: _LOADS,  # Skylake, Cascade Lake, Cooper Lake servers
    106: _ICE_LAKE,
    108: _ICE_LAKE,
    143: _SAPPHIRE_RAPIDS,
    207: _SAPPHIRE_RAPIDS,  # Emerald Rapids
    173: _LOADS,  # Granite Rapids
    174: _LOADS,
}
# AMD: fills of the first-level data cache from DRAM of the same and of other NUMA nodes
# (amdzen3 to 5; Zen 2 counts demand alone). What came through the L2 by prefetch is not in it.
_ZEN3 = (
    _raw("ls_any_fills_from_sys.dram_io_near", 0x0844),
    _raw("ls_any_fills_from_sys.dram_io_far", 0x4044),
)
_ZEN2 = (
    _raw("ls_refills_from_sys.ls_mabresp_lcl_dram", 0x0843),
    _raw("ls_refills_from_sys.ls_mabresp_rmt_dram", 0x4043),
)


def core_events(cpu: Cpu) -> Mapping[str, Event | Unavailable]:
    """What fills each counter of the table `remote_memory`, or why nothing does."""
    local, remote = _fills(cpu)
    return {
        INSTRUCTIONS: Event(name="instructions", type=TYPE_HARDWARE, config=1, bits=_OWN_THREADS),
        CYCLES: Event(name="cycles", type=TYPE_HARDWARE, config=0, bits=_OWN_THREADS),
        LOCAL: local,
        REMOTE: remote,
    }


def _fills(cpu: Cpu) -> tuple[Event | Unavailable, Event | Unavailable]:
    if cpu.vendor == "GenuineIntel" and cpu.family == 6 and cpu.model in _INTEL:
        return _INTEL[cpu.model]
    if cpu.vendor == "AuthenticAMD" and cpu.family in (0x19, 0x1A):
        return _ZEN3
    if cpu.vendor == "AuthenticAMD" and cpu.family == 0x17 and cpu.model >= 0x30:
        return _ZEN2
    # Neoverse's REMOTE_ACCESS also counts what came from the caches of the other socket.
    why = Unavailable(f"no events for DRAM near and far are known for {cpu}", status="unsupported")
    return why, why
