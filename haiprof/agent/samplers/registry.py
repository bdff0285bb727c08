"""Every sampler, in the order in which they are opened and shown."""

from __future__ import annotations

from haiprof.agent.samplers.cgroup import CgroupSampler
from haiprof.agent.samplers.dcgm import DcgmSampler
from haiprof.agent.samplers.ethernet import EthernetSampler
from haiprof.agent.samplers.filesystem import FilesystemSampler
from haiprof.agent.samplers.gpu import GpuSampler
from haiprof.agent.samplers.gpu_health import GpuHealthSampler
from haiprof.agent.samplers.host import HostSampler
from haiprof.agent.samplers.infiniband import InfinibandHealthSampler, InfinibandSampler
from haiprof.agent.samplers.memory_bandwidth import MemoryBandwidthSampler
from haiprof.agent.samplers.numa import NumaSampler
from haiprof.agent.samplers.placement import PlacementSampler
from haiprof.agent.samplers.process import ProcessSampler
from haiprof.agent.samplers.remote_memory import RemoteMemorySampler

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
