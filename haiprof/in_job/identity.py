"""Who this process is in the job: rank, attempt, versions; its report to the run directory."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from haiprof.base.safe_files import make_folder
from haiprof.run_format.environment import (
    LOCAL_RANK_VARIABLES,
    RANK_VARIABLES,
    WORLD_VARIABLES,
    find_number,
    installed_packages,
    named_variables,
)
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.run_format.schema import SCHEMA_VERSION, ClockAnchor
from haiprof.run_format.secrets import mask_command
from haiprof.run_format.writer import write_json

_MAX_ATTEMPTS = 1000


def has_process_group() -> bool:
    """Whether torch.distributed has been set up in this process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    return bool(distributed.is_initialized())


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the world size: from torch.distributed, else from the launcher."""
    if has_process_group():
        world = int(sys.modules["torch.distributed"].get_world_size())
    else:
        world = find_number(os.environ, WORLD_VARIABLES) or 1
    return named_rank() or 0, world


def named_rank() -> int | None:
    """The rank that torch.distributed or a launcher gave this process; None where none did."""
    if has_process_group():
        return int(sys.modules["torch.distributed"].get_rank())
    return find_number(os.environ, RANK_VARIABLES)


def restart() -> int:
    """How often torchrun has started this rank again."""
    return find_number(os.environ, ("TORCHELASTIC_RESTART_COUNT",)) or 0


def local_rank() -> int | None:
    """This process's number on its node, where its launcher tells."""
    return find_number(os.environ, LOCAL_RANK_VARIABLES)


def process_details() -> dict[str, Any]:
    """Who this process is, as every file that it leaves begins."""
    rank, world = rank_and_world()
    return {
        "version": SCHEMA_VERSION, "host": socket.gethostname(), "pid": os.getpid(), "rank": rank,
        "world_size": world, "local_rank": local_rank(), "restart": restart(),
    }  # fmt: skip


def claim_folder(run: RunPaths, rank: int) -> tuple[int, RankPaths]:
    """Creates this process's folder; a rank seen before gives another attempt."""
    for attempt in range(_MAX_ATTEMPTS):
        paths = run.rank(rank, attempt)
        try:
            make_folder(paths.root, below=run.root, new=True, trusted=True)
        except FileExistsError:
            continue
        return attempt, paths
    raise OSError(f"{run.ranks}: rank {rank} has {_MAX_ATTEMPTS} attempts already")


def report_in(
    paths: RankPaths, *, attempt: int, clock: ClockAnchor, details: Mapping[str, Any]
) -> None:
    """Writes rank.json."""
    content = {
        **process_details(), "attempt": attempt, "ppid": os.getppid(),
        "start_ticks": _start_ticks(), "python": platform.python_version(),
        "argv": mask_command(getattr(sys, "orig_argv", sys.argv)),
        "clock": {"wall_ns": clock.wall_ns, "mono_ns": clock.mono_ns}, **details,
    }  # fmt: skip
    write_json(paths.report, content, below=paths.run_root)


def torch_facts() -> dict[str, Any]:
    """Version and device; CUDA is asked only where the job itself has started it."""
    import torch

    details: dict[str, Any] = {"torch": str(torch.__version__), "device": "cpu", "gpu_uuid": None}
    details["operator_threads"] = torch.get_num_threads()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        details["device"] = "cuda"
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        uuid = getattr(properties, "uuid", None)
        details["gpu_uuid"] = None if uuid is None else f"GPU-{uuid}"
        details["gpu_name"] = str(properties.name)
    return details


def environment_line() -> dict[str, Any]:
    """What this process runs with; versions are read from what torch has loaded, and from names."""
    # The first process of a node lists its packages, the others leave it at the digest.
    import hashlib

    packages = installed_packages(list(sys.path))
    text = "\n".join(f"{name} {version}" for name, version in packages.items())
    version, names = sys.modules.get("torch.version"), ("cuda", "hip", "git_version")
    return {
        "type": "environment", "time_ns": time.perf_counter_ns(),
        "variables": named_variables(os.environ),
        "packages": packages if not local_rank() else None,
        "packages_digest": hashlib.sha256(text.encode()).hexdigest()[:16],
        **{f"torch_{name}": getattr(version, name, None) for name in names},
    }  # fmt: skip


def _start_ticks() -> int | None:
    """Field 22 of /proc/self/stat: with the pid it names a process for good."""
    # Parsed here: the part in the job imports nothing of `linux`.
    try:
        stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
