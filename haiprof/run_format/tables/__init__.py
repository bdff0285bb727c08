"""The counter tables of a node, one file per source: each column's unit, kind and origin."""

from __future__ import annotations

from haiprof.run_format.tables.cgroup import CGROUP
from haiprof.run_format.tables.dcgm import DCGM
from haiprof.run_format.tables.ethernet import ETHERNET
from haiprof.run_format.tables.filesystem import FILESYSTEM
from haiprof.run_format.tables.gpu import GPU
from haiprof.run_format.tables.gpu_health import GPU_HEALTH
from haiprof.run_format.tables.host import HOST
from haiprof.run_format.tables.infiniband import INFINIBAND, INFINIBAND_HEALTH
from haiprof.run_format.tables.memory_bandwidth import MEMORY_BANDWIDTH
from haiprof.run_format.tables.numa import NUMA
from haiprof.run_format.tables.placement import PLACEMENT
from haiprof.run_format.tables.process import PROCESS
from haiprof.run_format.tables.remote_memory import REMOTE_MEMORY

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
