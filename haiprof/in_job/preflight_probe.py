"""What `haiprof preflight` runs in place of the job's script, on every rank; needs only torch."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "haiprof-preflight: "
"""Before the printed line: launchers carry output from other nodes, where no file is shared."""
_SLICE_S, _SLICES = 0.12, 7
_COPY_BYTES, _FILE_BYTES, _MESSAGE_BYTES = 64 << 20, 16 << 20, 1 << 20
_GPU_BYTES = 256 << 20
_MATRIX, _GPU_MATRIX = 512, 8192
_LOOP = 20_000
_ASK_S = 20.0


def median(values: list[float]) -> float:
    """The middle one, of an even count the upper."""
    return sorted(values)[len(values) // 2]


def rate(work: Callable[[], None], amount: float) -> float:
    """Amount per second of the clock: the median of slices longer than a control group's period."""
    work()
    found = []
    for _ in range(_SLICES):
        begun, count = time.perf_counter(), 0
        while (passed := time.perf_counter() - begun) < _SLICE_S:
            work()
            count += 1
        found.append(count * amount / passed)
    return median(found)


def loop() -> None:
    """Plain Python, which a slow or throttled core slows most."""
    total = 0
    for number in range(_LOOP):
        total += number


def measure_rank(torch: Any, folder: str) -> dict[str, float]:
    """Rates of this rank alone, higher is better: others of its node wait meanwhile."""
    torch.set_num_threads(1)
    source, matrix = torch.ones(_COPY_BYTES // 4), torch.ones(_MATRIX, _MATRIX)
    found = {
        "cpu_loops_per_s": rate(loop, _LOOP),
        "memory_bytes_per_s": rate(lambda: source.clone().sum(), 3 * _COPY_BYTES),
        "gemm_flops": rate(lambda: matrix @ matrix, 2 * _MATRIX**3),
        "disk_bytes_per_s": write_rate(folder),
        "loader_batches_per_s": loader_rate(torch),
    }
    if torch.cuda.is_available():
        half = torch.ones(_GPU_MATRIX, _GPU_MATRIX, device="cuda", dtype=torch.bfloat16)
        pinned = source.pin_memory()

        def multiply() -> None:
            half @ half
            torch.cuda.synchronize()

        def copy() -> None:
            pinned.to("cuda", non_blocking=True)
            torch.cuda.synchronize()

        found["gpu_gemm_flops"] = rate(multiply, 2 * _GPU_MATRIX**3)
        found["gpu_copy_bytes_per_s"] = rate(copy, _COPY_BYTES)
        large = torch.ones(_GPU_BYTES // 4, device="cuda")

        def move() -> None:
            large.clone()
            torch.cuda.synchronize()

        found["gpu_memory_bytes_per_s"] = rate(move, 2 * _GPU_BYTES)
    return found


def write_rate(folder: str) -> float:
    """Bytes written and synced to the disk in a second, the median of three files."""
    found, content = [], b"\1" * _FILE_BYTES
    for _ in range(3):
        with tempfile.TemporaryFile(dir=folder) as file:
            begun = time.perf_counter()
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            found.append(_FILE_BYTES / (time.perf_counter() - begun))
    return median(found)


def loader_rate(torch: Any) -> float:
    """Batches of 0.4 MB a second from one worker, over /dev/shm as the job's own come."""
    data = torch.utils.data.TensorDataset(torch.ones(2048, 3072))
    begun = time.perf_counter()
    count = sum(1 for _ in torch.utils.data.DataLoader(data, batch_size=32, num_workers=1))
    return count / (time.perf_counter() - begun)


def read_limits() -> dict[str, float | None]:
    """What bounds this process, None where nothing does."""
    limits: dict[str, float | None] = {
        "cpu_cores": cpu_limit(Path("/proc/self/cgroup").read_text())
    }
    for name in ("NOFILE", "MEMLOCK", "NPROC", "STACK"):
        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        limits[f"ulimit_{name.lower()}"] = None if soft == resource.RLIM_INFINITY else soft
    shm = os.statvfs("/dev/shm")
    limits["shm_bytes"] = shm.f_blocks * shm.f_frsize
    limits |= nfs_limits()
    return limits


_NFS = {
    "nfs_rpc_slots": "proc/sys/sunrpc/tcp_slot_table_entries",
    "nfs_max_rpc_slots": "proc/sys/sunrpc/tcp_max_slot_table_entries",
    "nfs_session_slots": "sys/module/nfs/parameters/max_session_slots",
}


def nfs_limits(root: Path = Path("/")) -> dict[str, float | None]:
    """Requests that the NFS client has under way at once, to one server; None without a client."""
    found: dict[str, float | None] = {}
    for name, path in _NFS.items():
        try:
            found[name] = float((root / path).read_text())
        except (OSError, ValueError):
            found[name] = None
    return found


_GPU_LIMITS = {
    "gpu_link_width": "pcie.link.width.current",
    "gpu_link_generation": "pcie.link.gen.max",
    "gpu_clock_mhz": "clocks.max.sm",
    "gpu_power_limit_watts": "power.limit",
}
_GPU_FAULTS = {
    "gpu_rows_failed": "remapped_rows.failure",
    "gpu_rows_pending": "remapped_rows.pending",
}


def gpu_facts(uuid: str) -> tuple[dict[str, float | None], dict[str, float | None]]:
    """Limits and faults (1: it has it) of one GPU by nvidia-smi; None for what it cannot tell."""
    limits = ask_nvidia_smi("--query-gpu", _GPU_LIMITS, uuid)
    return limits, ask_nvidia_smi("--query-remapped-rows", _GPU_FAULTS, uuid)


def ask_nvidia_smi(query: str, fields: dict[str, str], uuid: str) -> dict[str, float | None]:
    """One line of numbers of one GPU."""
    line = ["nvidia-smi", f"{query}={','.join(fields.values())}", "--format=csv,noheader,nounits",
            f"--id={uuid}"]  # fmt: skip
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=_ASK_S, check=True)
        said = done.stdout.splitlines()[0].split(",")
    except (OSError, subprocess.SubprocessError, IndexError):
        said = []
    found: dict[str, float | None] = dict.fromkeys(fields)
    for name, word in zip(fields, said, strict=False):
        word = {"yes": "1", "no": "0"}.get(word.strip().lower(), word.strip())
        found[name] = float(word) if word.replace(".", "", 1).isdigit() else None
    return found


def cpu_limit(text: str, root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the process's own control group may use; None where it may use all."""
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        if names and "cpu" not in names.split(","):
            continue
        below = root / ("cpu" if names else "") / path.strip("/")
        try:
            if names:
                quota = float((below / "cpu.cfs_quota_us").read_text())
                return (
                    quota / float((below / "cpu.cfs_period_us").read_text()) if quota > 0 else None
                )
            allowed, period = (below / "cpu.max").read_text().split()
            return None if allowed == "max" else float(allowed) / float(period)
        except (OSError, ValueError):
            continue
    return None


def measure_pairs(torch: Any, rank: int, world: int) -> dict[str, list[float]]:
    """Bytes a second and seconds of one small message to each other rank: a round robin."""
    dist, device = torch.distributed, "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    large = torch.ones(_MESSAGE_BYTES // 4, device=device)
    small = torch.ones(1, device=device)
    found: dict[str, list[float]] = {}
    even = world + world % 2
    for turn in range(even - 1):
        # The circle method: in each turn everybody has one partner, and in the end had everybody.
        places = [0, *((turn + place) % (even - 1) + 1 for place in range(even - 1))]
        partner = places[even - 1 - places.index(rank)]
        dist.barrier()
        if partner >= world:
            continue
        for sender in sorted((rank, partner)):
            times = []
            for tensor, repeats in ((small, 12), (large, 3)):
                own = []
                for _ in range(repeats):
                    begun = time.perf_counter()
                    if rank == sender:
                        dist.send(tensor, partner)
                        dist.recv(small, partner)  # that it came: a send alone may only be queued
                    else:
                        dist.recv(tensor, partner)
                        dist.send(small, partner)
                    own.append(time.perf_counter() - begun)
                times.append(median(own))
            if rank == sender:
                latency, whole = times
                found[str(partner)] = [_MESSAGE_BYTES / max(whole - latency, 1e-9), latency]
    return found


def measure_reduction(torch: Any) -> list[float]:
    """Bytes a second of an all-reduce of 4 MiB, and the seconds of one of four bytes."""
    dist, device = torch.distributed, "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    times = []
    for count in (1 << 20, 1):
        tensor, own = torch.ones(count, device=device), []
        for _ in range(5):
            dist.barrier()
            begun = time.perf_counter()
            dist.all_reduce(tensor)
            if device == "cuda":
                torch.cuda.synchronize()
            own.append(time.perf_counter() - begun)
        times.append(median(own))
    return [(4 << 20) / times[0], times[1]]


def main() -> None:
    """Measures in turns; the first rank of each node prints what all ranks measured."""
    import torch

    environment = os.environ
    rank, world = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
    local = int(environment.get("LOCAL_RANK", "0"))
    on_node = int(environment.get("LOCAL_WORLD_SIZE", "1"))
    own: dict[str, Any] = {"rank": rank, "host": socket.gethostname(), "limits": read_limits()}
    own["gpu_count"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if own["gpu_count"]:
        torch.cuda.set_device(local % own["gpu_count"])
        uuid = str(getattr(torch.cuda.get_device_properties(local % own["gpu_count"]), "uuid", ""))
        if uuid:
            limits, own["faults"] = gpu_facts(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
            own["limits"] |= limits
    dist = torch.distributed
    everyone: list[Any] = [own]
    if world > 1:
        dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else None)
    for turn in range(on_node):
        if world > 1:
            dist.barrier()
        if turn == local:
            own["rates"] = measure_rank(torch, environment.get("HAIPROF_PREFLIGHT_FOLDER", "."))
    if world > 1:
        own["sends"] = measure_pairs(torch, rank, world)
        own["all_reduce"] = measure_reduction(torch)
        own["backend"] = dist.get_backend()
        everyone = [None] * world
        dist.all_gather_object(everyone, own)
        dist.barrier()
        dist.destroy_process_group()
    if local == 0:
        sys.stdout.write(f"\n{MARK}{json.dumps(everyone)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
