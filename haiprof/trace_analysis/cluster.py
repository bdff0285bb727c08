"""The pool of `--cluster`: a Dask scheduler's address, or nodes allocated by Slurm."""

from __future__ import annotations

from haiprof.base.errors import UsageError
from haiprof.trace_analysis.dask_pool import DaskCluster
from haiprof.trace_analysis.pool import Pool

_SCHEMES = ("tcp://", "tls://", "ucx://", "ws://", "wss://", "inproc://")


def cluster_pool(address: str) -> Pool:
    """The pool of an address as `--cluster` takes it."""
    if address == "slurm" or address.startswith("slurm:"):
        from haiprof.trace_analysis.slurm import SlurmCluster, SlurmOptions

        return SlurmCluster(SlurmOptions.parse_options(address))
    if not address.startswith(_SCHEMES):
        raise UsageError(f"--cluster {address}: not an address", hint="tcp://HOST:8786 or slurm")
    return DaskCluster(address)
