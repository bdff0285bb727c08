"""A training job that dies, or stands still, in the way that it is told.

    torchrun --standalone --nproc-per-node 2 tests/process/dying_job.py raise
    python tests/process/dying_job.py spawn

Rank 1 does it at step 30 (60 where the ranks never meet again), unless it is about a job of one
process; gloo's timeout is 6 s.
"""

from __future__ import annotations

import ctypes
import os
import queue
import resource
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

AT, STEPS = 30, 120
TIMEOUT_S = float(os.environ.get("DYING_TIMEOUT_S", "6"))


class Samples(Dataset):  # type: ignore[type-arg]
    """Noise; of `size` numbers each, and from one on a worker may fail."""

    def __init__(self, size: int, fault: str) -> None:
        self.size, self.fault = size, fault

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index > 100 and self.fault in IN_WORKER:
            IN_WORKER[self.fault]()  # type: ignore[no-untyped-call]
        return torch.zeros(self.size)


def wait_for_file() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def raise_error() -> None:
    raise RuntimeError("bad sample 17")


def hold_interpreter_lock() -> None:
    ctypes.PyDLL(None).sleep(1000)


def fill_memory() -> None:
    group = Path("/sys/fs/cgroup/memory/haiprof-dying")
    (group / "cgroup.procs").write_text(str(os.getpid()))
    kept = []
    while True:
        kept.append(bytearray(20_000_000))
        time.sleep(0.05)


def fill_with_tensors() -> None:
    kept = []
    while True:
        kept.append(torch.empty(5_000_000))


def fill_with_objects() -> None:
    kept = []
    while True:
        kept.append(bytearray(20_000_000))


def sleep_on() -> None:
    time.sleep(1000)


def die_in_a_thread() -> None:
    batches: queue.Queue[int] = queue.Queue()

    def read() -> None:
        raise ValueError("truncated record 9")

    threading.Thread(target=read, name="reader").start()
    batches.get()


def run_out_of_gpu_memory() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB "
        "of which 1.20 GiB is free. Of the allocated memory 71.00 GiB is allocated by PyTorch, and "
        "5.10 GiB is reserved by PyTorch but unallocated."
    )


def exit_in_a_thread() -> None:
    reader = threading.Thread(target=lambda: os._exit(3), name="reader")
    reader.start()
    reader.join()


def leave_a_thread() -> None:
    batches: queue.Queue[int] = queue.Queue()
    threading.Thread(target=lambda: sys.exit(3), name="reader").start()
    batches.get()


def skip_a_step() -> bool:
    try:
        raise ValueError("nan in loss")
    except ValueError:
        return True


def use_cpu_time() -> None:
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + 2, used + 60))
    while True:
        pass


def allocate_in_cpp() -> None:
    new = ctypes.CDLL("libstdc++.so.6")._Znwm
    new.argtypes = [ctypes.c_size_t]
    new(1 << 60)


def interrupt() -> None:
    raise KeyboardInterrupt


FAULTS = {
    "raise": raise_error,
    "never-meet": raise_error,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "osexit": lambda: os._exit(7),
    "exit3": lambda: sys.exit(3),
    "exit3-thread": leave_a_thread,
    "osexit-thread": exit_in_a_thread,
    "cuda": run_out_of_gpu_memory,
    "exit0": lambda: os._exit(0),
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "hang": wait_for_file,
    "gil": hold_interpreter_lock,
    "memory": lambda: bytearray(1 << 60),
    "oom": fill_memory,
    "limit-torch": fill_with_tensors,
    "limit-python": fill_with_objects,
    "kill-hand": sleep_on,
    "thread": die_in_a_thread,
    "other": lambda: dist.broadcast(torch.ones(7), 1),
    "size": lambda: dist.all_reduce(torch.ones(999)),
    "swallow": skip_a_step,
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "cpu": use_cpu_time,
    "bad-alloc": allocate_in_cpp,
    "interrupt": interrupt,
    "exit-text": lambda: sys.exit("no such dataset"),
    "disk": lambda: torch.save(torch.zeros(4 << 20), "/mnt/checkpoint.pt"),
    "kill-launcher": lambda: os.kill(os.getppid(), signal.SIGKILL),
}
IN_WORKER = {"worker": wait_for_file, "worker-raise": raise_error, "worker-kill": FAULTS["kill"]}


def train(fault: str) -> None:
    restart = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    rank = int(os.environ.get("RANK", "0"))
    if fault == "late" and rank == 1:
        wait_for_file()
    if fault == "import" and rank == 1:
        raise ImportError("no module named flash_attn")
    if fault == "never-meet-first" or (fault == "never-meet" and restart):
        # Each waits in a store of its own for the others, as after a wrong address.
        store = f"file://{os.environ['DYING_SAVE']}.{rank}"
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=int(os.environ["WORLD_SIZE"])
        )
    elif "RANK" in os.environ:
        # torchrun's store lives on over restarts: gloo finds the addresses of the start before.
        store, rank_, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=TIMEOUT_S)))  # type: ignore[attr-defined]
        own = dist.PrefixStore(f"start{restart}", store)  # type: ignore[attr-defined]
        limit = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("gloo", store=own, rank=rank_, world_size=size, timeout=limit)
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8)
    model = DistributedDataParallel(layer) if dist.is_initialized() else layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    at = 2 * AT if fault == "never-meet" else AT
    steps = AT if fault == "uneven" and rank == 1 else STEPS
    big = fault == "shm"
    workers = 2 if big or fault in IN_WORKER else 0
    size = 4_000_000 if big else 8
    batches = iter(DataLoader(Samples(size, fault), batch_size=4, num_workers=workers))
    for step in range(steps):
        batch = next(batches)[:, :8].contiguous()
        if step == at and rank == 1 and fault in FAULTS and restart < 2 and FAULTS[fault]():  # type: ignore[no-untyped-call]
            continue
        if step == at and rank == 0:
            print("FAULT", time.time_ns(), flush=True)
        if fault == "all" and step == AT:
            raise_error()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == AT // 2 and rank == 0 and os.environ.get("DYING_SAVE"):
            torch.save(model.state_dict(), os.environ["DYING_SAVE"])
        time.sleep(0.02 if fault not in ("wait",) else 1.0)
    if dist.is_initialized() and fault != "uneven":
        dist.barrier()


def train_spawned(rank: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ["DYING_PORT"])
    train("raise")


def main() -> None:
    torch.set_num_threads(1)
    fault = sys.argv[1]
    if fault == "spawn":
        torch.multiprocessing.spawn(train_spawned, nprocs=2)  # type: ignore[attr-defined, no-untyped-call]
    else:
        train(fault)


if __name__ == "__main__":
    main()
