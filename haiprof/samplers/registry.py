"""Every sampler, in the order in which they are opened and shown."""

from __future__ import annotations

from haiprof.samplers.cgroup import CgroupSampler
from haiprof.samplers.dcgm import DcgmSampler
from haiprof.samplers.ethernet import EthernetSampler
from haiprof.samplers.filesystem import FilesystemSampler
from haiprof.samplers.gpu import GpuSampler
from haiprof.samplers.gpu_health import GpuHealthSampler
from haiprof.samplers.host import HostSampler
from haiprof.samplers.infiniband import InfinibandHealthSampler, InfinibandSampler
from haiprof.samplers.memory_bandwidth import MemoryBandwidthSampler
from haiprof.samplers.numa import NumaSampler
from haiprof.samplers.placement import PlacementSampler
from haiprof.samplers.process import ProcessSampler
from haiprof.samplers.remote_memory import RemoteMemorySampler

SAMPLERS = (
    HostSampler,
    CgroupSampler,
    ProcessSampler,
    PlacementSampler,
    GpuSampler,
    GpuHealthSampler,
    DcgmSampler,
    InfinibandSampler,
    InfinibandHealthSampler,
    EthernetSampler,
    FilesystemSampler,
    NumaSampler,
    MemoryBandwidthSampler,
    RemoteMemorySampler,
)
