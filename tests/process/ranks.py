"""Starts the ranks of a job on this machine, as Slurm or mpirun does: with their variables alone.

    python tests/process/ranks.py 2 train.py --steps 3

torchrun is a process that loads torch too, two seconds of a processor: jobs whose launcher nobody
looks at are started so. When a rank fails the others end, and its status is the job's.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time


def main(count: int, words: list[str]) -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    ranks = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, **shared, **size, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(count)
    ]
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        time.sleep(0.05)
    failed = next((rank.returncode for rank in ranks if rank.poll()), 0)
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
        rank.wait()
    return failed if failed >= 0 else 128 - failed


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), sys.argv[2:]))
