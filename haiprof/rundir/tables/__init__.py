"""The counter tables of a node, one file per source: each column's unit, kind and origin."""

from __future__ import annotations

from haiprof.rundir.tables.dcgm import DCGM
from haiprof.rundir.tables.ethernet import ETHERNET
from haiprof.rundir.tables.gpu import GPU
from haiprof.rundir.tables.gpu_health import GPU_HEALTH
from haiprof.rundir.tables.host import HOST
from haiprof.rundir.tables.infiniband import INFINIBAND, INFINIBAND_HEALTH
from haiprof.rundir.tables.placement import PLACEMENT
from haiprof.rundir.tables.process import PROCESS

COUNTER_TABLES = (
    HOST,
    PROCESS,
    PLACEMENT,
    GPU,
    GPU_HEALTH,
    DCGM,
    INFINIBAND,
    INFINIBAND_HEALTH,
    ETHERNET,
)
