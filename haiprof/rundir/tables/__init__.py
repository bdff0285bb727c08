"""The counter tables of a node, one file per source: each column's unit, kind and origin."""

from __future__ import annotations

from haiprof.rundir.tables.cgroup import CGROUP
from haiprof.rundir.tables.dcgm import DCGM
from haiprof.rundir.tables.ethernet import ETHERNET
from haiprof.rundir.tables.filesystem import FILESYSTEM
from haiprof.rundir.tables.gpu import GPU
from haiprof.rundir.tables.gpu_health import GPU_HEALTH
from haiprof.rundir.tables.host import HOST
from haiprof.rundir.tables.infiniband import INFINIBAND, INFINIBAND_HEALTH
from haiprof.rundir.tables.memory_bandwidth import MEMORY_BANDWIDTH
from haiprof.rundir.tables.numa import NUMA
from haiprof.rundir.tables.placement import PLACEMENT
from haiprof.rundir.tables.process import PROCESS
from haiprof.rundir.tables.remote_memory import REMOTE_MEMORY

COUNTER_TABLES = (
    HOST,
    CGROUP,
    PROCESS,
    PLACEMENT,
    GPU,
    GPU_HEALTH,
    DCGM,
    INFINIBAND,
    INFINIBAND_HEALTH,
    ETHERNET,
    FILESYSTEM,
    NUMA,
    MEMORY_BANDWIDTH,
    REMOTE_MEMORY,
)
