"""Slurm on this machine alone, for tests: a controller and two nodes that are both this host.

Needs root and Debian's packages slurm-wlm and munge; without them tests skip and say so.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_CONF = """
ClusterName=haiprof_test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=20
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=9000
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "sinfo", "scancel")
_START_S = 30.0


_MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
_LIMITED = {
    "proctrack/linuxproc": "proctrack/cgroup", "task/none": "task/cgroup",
    "=CR_Core\n": "=CR_Core_Memory\n",
}  # fmt: skip
_CGROUP_CONF = """
CgroupPlugin=cgroup/v1
ConstrainRAMSpace=yes
ConstrainSwapSpace=yes
AllowedSwapSpace=0
"""


@contextmanager
def one_machine_slurm(folder: Path, *, limits_memory: bool = False) -> Iterator[Path]:
    """Starts it, and yields its configuration for SLURM_CONF; skips where it cannot run."""
    lacking = [name for name in _PROGRAMS if shutil.which(name, path=_path()) is None]
    if lacking or os.geteuid():
        reason = f"no {', '.join(lacking)}" if lacking else "not root"
        pytest.skip(f"Slurm on this machine: {reason} (apt-get install slurm-wlm munge)")
    port = 20_000 + os.getpid() % 10_000
    conf = folder / "slurm.conf"
    conf.write_text(_CONF.format(host=socket.gethostname(), port=port, folder=folder,
                                 first=port + 1, last=port + 2))  # fmt: skip
    if limits_memory:
        if not os.access(_MEMORY_GROUPS, os.W_OK):
            pytest.skip("Slurm's memory limit: no control groups of version 1 here")
        (folder / "cgroup.conf").write_text(_CGROUP_CONF)
        text = conf.read_text()
        for plain, limited in _LIMITED.items():
            text = text.replace(plain, limited)
        conf.write_text(text)
    for name in ("state", "spool/n1", "spool/n2"):
        (folder / name).mkdir(parents=True)
    environment = {**os.environ, "SLURM_CONF": str(conf), "PATH": _path()}
    with _alone():
        yield from _started(conf, environment)


@contextmanager
def _alone() -> Iterator[None]:
    """One at a time on this machine: munge's daemon is everybody's, and ends with its starter."""
    with Path(tempfile.gettempdir(), "haiprof-tests-slurm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _started(conf: Path, environment: dict[str, str]) -> Iterator[Path]:
    started: list[subprocess.Popen[bytes]] = []
    try:
        started += _munge(environment)
        started.append(subprocess.Popen(["slurmctld", "-D", "-f", conf], env=environment))
        for node in ("n1", "n2"):
            command = ["slurmd", "-D", "-N", node, "-f", conf]
            started.append(subprocess.Popen(command, env=environment))
        _wait_idle(environment)
        yield conf
        _wait_done(environment)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _path() -> str:
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


def _munge(environment: dict[str, str]) -> list[subprocess.Popen[bytes]]:
    """The daemon that signs for users; nothing where one runs already."""
    if not subprocess.run(["munge", "-n"], env=environment, capture_output=True).returncode:
        return []
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    command = ["munged", "--foreground"]
    return [subprocess.Popen(command, env=environment, user="munge", group="munge")]


def _wait_done(environment: dict[str, str]) -> None:
    """A job whose controller is gone would not end."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        left = subprocess.run(["squeue", "-h"], env=environment, capture_output=True).stdout
        if not left.strip():
            return
        time.sleep(0.2)


def _wait_idle(environment: dict[str, str]) -> None:
    until = time.monotonic() + _START_S
    states = ""
    while time.monotonic() < until:
        words = ["sinfo", "-h", "-N", "-o", "%t"]
        states = subprocess.run(words, env=environment, capture_output=True, text=True).stdout
        if states.split() == ["idle", "idle"]:
            return
        time.sleep(0.2)
    pytest.skip(f"Slurm on this machine does not come up: {states.split()}")
