"""What `haiprof preflight` runs in place of the job's script, on every rank; needs only torch."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median_high
from typing import Any

MARK = "haiprof-preflight: "
"""Before the printed line: launchers carry output from other nodes, where no file is shared."""
_SLICE_S, _SLICES = 0.12, 7
_COPY_BYTES, _FILE_BYTES, _MESSAGE_BYTES = 64 << 20, 16 << 20, 1 << 20
_GPU_BYTES = 256 << 20
_MATRIX, _GPU_MATRIX = 512, 8192
_LOOP = 20_000
_ASK_S = 20.0


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
    return median_high(found)


def loop() -> None:
    """Plain Python, which a slow or throttled core slows most."""
    total = 0
    for number in range(_LOOP):
        total += number


def measure_rank(torch: Any, folder: str, uuid: str = "") -> dict[str, Any]:
    """`rates` of this rank alone, higher is better: others of its node wait meanwhile."""
    # Where it has a GPU also its `clock` under load, and in `unread` why that is not known.
    torch.set_num_threads(1)
    source, matrix = torch.ones(_COPY_BYTES // 4), torch.ones(_MATRIX, _MATRIX)
    found: dict[str, Any] = {}
    found["rates"] = rates = {
        "cpu_loops_per_s": rate(loop, _LOOP),
        "memory_bytes_per_s": rate(lambda: source.clone().sum(), 3 * _COPY_BYTES),
        "gemm_flops": rate(lambda: matrix @ matrix, 2 * _MATRIX**3),
        "disk_bytes_per_s": write_rate(folder),
        "loader_batches_per_s": loader_rate(torch),
    }
    if torch.cuda.is_available():
        half = torch.ones(_GPU_MATRIX, _GPU_MATRIX, device="cuda", dtype=torch.bfloat16)
        pinned = source.pin_memory()

        def wait_for(work: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                work()
                torch.cuda.synchronize()

            return run

        multiply = wait_for(lambda: half @ half)
        rates["gpu_gemm_flops"] = rate(multiply, 2 * _GPU_MATRIX**3)
        found["clock"], why = loaded_clock(multiply, uuid)
        if found["clock"]["mhz"] is None:
            found["unread"] = {"clock of its GPU under load": why}
        else:
            rates["gpu_load_clock_mhz"] = found["clock"]["mhz"]
        copy = wait_for(lambda: pinned.to("cuda", non_blocking=True))
        rates["gpu_copy_bytes_per_s"] = rate(copy, _COPY_BYTES)
        large = torch.ones(_GPU_BYTES // 4, device="cuda")
        rates["gpu_memory_bytes_per_s"] = rate(wait_for(large.clone), 2 * _GPU_BYTES)
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
    return median_high(found)


def loader_rate(torch: Any) -> float:
    """Batches of 0.4 MB a second from one worker, over /dev/shm as the job's own come."""
    data = torch.utils.data.TensorDataset(torch.ones(2048, 3072))
    begun = time.perf_counter()
    count = sum(1 for _ in torch.utils.data.DataLoader(data, batch_size=32, num_workers=1))
    return count / (time.perf_counter() - begun)


def read_limits() -> dict[str, float | None]:
    """What bounds this process, None where nothing does."""
    limits: Facts = {"cpu_cores": cpu_limit(Path("/proc/self/cgroup").read_text())}
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
    "gpu_link_width": "pcie.link.width.current", "gpu_link_generation": "pcie.link.gen.max",
    "gpu_clock_mhz": "clocks.max.sm", "gpu_power_limit_watts": "power.limit",
}  # fmt: skip
_GPU_FAULTS = {"gpu_rows_failed": "remapped_rows.failure",
               "gpu_rows_pending": "remapped_rows.pending"}  # fmt: skip
_GPU_RECOVERY = {"gpu_recovery_needed": "gpu_recovery_action"}
_WORDS = {"yes": 1.0, "no": 0.0, "none": 0.0, "reset": 1.0, "reboot": 1.0, "drain p2p": 1.0,
          "drain and reset": 1.0}  # fmt: skip
"""What nvidia-smi says of a fault, or of what the driver wants done after one."""
_CLOCK_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")
"""Driver 535 and later, and earlier ones."""

Facts = dict[str, float | None]


def gpu_uuid(properties: Any) -> str:
    """As nvidia-smi takes it; empty where torch does not tell it."""
    uuid = str(getattr(properties, "uuid", ""))
    return uuid if not uuid or uuid.startswith("GPU-") else f"GPU-{uuid}"


def gpu_facts(uuid: str) -> tuple[Facts, Facts, str]:
    """Limits and faults (1: it has it) of a GPU by nvidia-smi, None for what is not told; why."""
    # The reason is empty where it answers. Drivers before 570 do not know the recovery action.
    limits, why = ask_nvidia_smi("--query-gpu", _GPU_LIMITS, uuid)
    faults, _ = ask_nvidia_smi("--query-remapped-rows", _GPU_FAULTS, uuid)
    recovery, _ = ask_nvidia_smi("--query-gpu", _GPU_RECOVERY, uuid)
    return limits, {**faults, **recovery}, why


def loaded_clock(work: Callable[[], None], uuid: str) -> tuple[Facts, str]:
    """The SM clock of a GPU that works meanwhile, its maximum, what holds it down; why not."""
    # `mhz`, `max_mhz`, and `reasons`, bits of nvmlClocksEventReasons (nvml.h).
    found: Facts = {}
    why = ""
    for reasons in _CLOCK_REASONS:
        fields = {"mhz": "clocks.sm", "max_mhz": "clocks.max.sm", "reasons": reasons}
        found, why = ask_nvidia_smi("--query-gpu", fields, uuid, meanwhile=work)
        if found["mhz"] is not None:
            break
    return found, "" if found["mhz"] is not None else why or "nvidia-smi does not tell it"


def ask_nvidia_smi(
    query: str, fields: dict[str, str], uuid: str, meanwhile: Callable[[], None] | None = None
) -> tuple[Facts, str]:
    """One line of numbers of one GPU; why there is none, or nothing."""
    if not uuid:
        return dict.fromkeys(fields), "torch does not tell which GPU it is"
    line = ["nvidia-smi", f"{query}={','.join(fields.values())}", "--format=csv,noheader,nounits",
            f"--id={uuid}"]  # fmt: skip
    found: Facts = dict.fromkeys(fields)
    try:
        asked = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
        )
    except OSError as error:
        return found, f"nvidia-smi: {error.strerror}"
    try:
        until = time.monotonic() + _ASK_S
        while meanwhile is not None and asked.poll() is None and time.monotonic() < until:
            meanwhile()
        said, _ = asked.communicate(timeout=_ASK_S)
    except subprocess.TimeoutExpired:
        asked.kill()
        asked.communicate()
        return found, f"nvidia-smi: no answer in {_ASK_S:.0f} s"
    first = said.strip().partition("\n")[0]
    words = first.split(",")
    if asked.returncode or len(words) != len(fields):
        return found, f"nvidia-smi: {first[:200] or f'exit status {asked.returncode}'}"
    return {name: number(word.strip()) for name, word in zip(fields, words, strict=True)}, ""


def number(word: str) -> float | None:
    """A number, `Yes`, a recovery action or bits (`0x04`) as a number; None for anything else."""
    try:
        return float(int(word, 16)) if word.startswith("0x") else float(word)
    except ValueError:
        return _WORDS.get(word.lower())


_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d{1,5}),? ?(.*)")
_LOG_BYTES = 8192  # printk: the longest record of /dev/kmsg
_XID_LIMIT = 100


def kernel_log(root: Path = Path("/")) -> list[tuple[float, str]]:
    """Seconds since boot and text of each message that the kernel still holds; else OSError."""
    # printk(9): a read gives one record, "level,number,microseconds,flags;text"; EPIPE: it has been
    # overwritten, and the next read goes on after it.
    found: list[tuple[float, str]] = []
    kernel = os.open(root / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        while True:
            try:
                record = os.read(kernel, _LOG_BYTES)
            except BlockingIOError:
                return found
            except BrokenPipeError:
                continue
            if not record:
                return found
            for line in record.decode(errors="replace").splitlines():
                head, _, text = line.partition(";")
                words = head.split(",")
                if len(words) > 2 and words[2].isdigit():
                    found.append((int(words[2]) / 1e6, text))
    finally:
        os.close(kernel)


def journal() -> list[tuple[float, str]]:
    """The same from the journal of this boot; OSError where this user may read none."""
    line = ["journalctl", "--dmesg", "--boot", "--output=short-monotonic", "--no-pager", "--quiet"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, errors="replace",
                              timeout=_ASK_S, check=True)  # fmt: skip
    except subprocess.SubprocessError as error:
        raise OSError(0, str(error).partition("\n")[0]) from None
    matches = [re.match(r"\[ *(\d+\.\d+)\] (.*)", line) for line in done.stdout.splitlines()]
    found = [(float(match[1]), match[2]) for match in matches if match]
    if not found:  # a kernel that has booted has said something
        raise OSError(0, "no message of the kernel may be read")
    return found


def read_xids(root: Path = Path("/")) -> tuple[list[dict[str, Any]], str]:
    """XID errors that the NVIDIA driver logged since boot, with their age; why none can be read."""
    reasons = []
    for name in ("/dev/kmsg", "journalctl"):
        try:
            log = journal() if name == "journalctl" else kernel_log(root)
            break
        except OSError as error:
            reasons.append(f"{name}: {error.strerror or error}")
    else:
        return [], "; ".join(reasons)
    now = time.clock_gettime(time.CLOCK_MONOTONIC)
    found = [(at, match) for at, text in log if (match := _XID.search(text))]
    return [
        {"gpu": match[1].removeprefix("PCI:"), "code": int(match[2]), "text": match[3][:200],
         "age_s": max(now - at, 0.0)}
        for at, match in found[-_XID_LIMIT:]
    ], ""  # fmt: skip


VARIABLES = (
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DESYNC_DEBUG", "NCCL_DESYNC_DEBUG",
    "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE",
    "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT",
)  # fmt: skip
"""What says when a collective that hangs is given up, and what is written then."""


def read_timeouts(torch: Any) -> dict[str, Any]:
    """Seconds until NCCL's collectives are given up, unless the job says them; VARIABLES as set."""
    usual = torch.distributed.constants.default_pg_nccl_timeout
    set_here = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    return {"collective_s": None if usual is None else usual.total_seconds(), "set": set_here}


def cpu_limit(text: str, root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that the process's own control group may use; None where it may use all."""
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        if names and "cpu" not in names.split(","):
            continue
        below = root / ("cpu" if names else "") / path.strip("/")
        try:
            if names:
                files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quota, whole = (float((below / name).read_text()) for name in files)
                return quota / whole if quota > 0 else None
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
                times.append(median_high(own))
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
        times.append(median_high(own))
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
    unread: dict[str, str] = {}
    uuid = ""
    if own["gpu_count"]:
        torch.cuda.set_device(local % own["gpu_count"])
        uuid = gpu_uuid(torch.cuda.get_device_properties(local % own["gpu_count"]))
        limits, own["faults"], unread["limits of its GPU"] = gpu_facts(uuid)
        own["limits"] |= limits
    if local == 0 and os.path.exists("/proc/driver/nvidia"):
        own["xids"], unread["XIDs of its node"] = read_xids()
    dist = torch.distributed
    everyone: list[Any] = [own]
    if world > 1:
        dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else None)
    for turn in range(on_node):
        if world > 1:
            dist.barrier()
        if turn == local:
            folder = environment.get("HAIPROF_PREFLIGHT_FOLDER", ".")
            measured = measure_rank(torch, folder, uuid)
            unread |= measured.pop("unread", {})
            own |= measured
    own["unread"] = {what: why for what, why in unread.items() if why}
    if world > 1:
        own["sends"] = measure_pairs(torch, rank, world)
        own["all_reduce"] = measure_reduction(torch)
        own["backend"] = dist.get_backend()
        if "nccl" in own["backend"]:
            own["timeouts"] = read_timeouts(torch)
        everyone = [None] * world
        dist.all_gather_object(everyone, own)
        dist.barrier()
        dist.destroy_process_group()
    if local == 0:
        sys.stdout.write(f"\n{MARK}{json.dumps(everyone)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
