"""What compressing traces costs by zlib's level, against gzip's usual level 6 beside it.

HAIPROF_TRACES=../shared/traces python benchmarks/finish.py
"""

from __future__ import annotations

import gzip
import os
import time
import zlib
from pathlib import Path

from haiprof.agent.finish_traces import CHUNK_BYTES, GZIP_LEVEL

LEVELS = (1, 2, 3, 4, 6, 9)
USUAL = 6
NAMES = ("hta_diff_control_a100_r3of8", "tl_h100_qwen05_mem_stack", "tl_mi300_ddp_resnet18")
ROUNDS = 3


def compressed(data: bytes, level: int) -> tuple[float, int]:
    """CPU seconds (the best of some rounds) and bytes."""
    best, size = float("inf"), 0
    for _ in range(ROUNDS):
        began = time.process_time()
        packer = zlib.compressobj(level, zlib.DEFLATED, 31)
        pieces = range(0, len(data), CHUNK_BYTES)
        size = sum(len(packer.compress(data[at : at + CHUNK_BYTES])) for at in pieces)
        size += len(packer.flush())
        best = min(best, time.process_time() - began)
    return best, size


def main() -> None:
    """Prints a line per trace and level."""
    root = Path(os.environ.get("HAIPROF_TRACES", "../shared/traces"))
    print(f"load {os.getloadavg()[0]:.1f}; haiprof takes level {GZIP_LEVEL}")
    for name in NAMES:
        (path,) = list((root / name).glob("*.gz"))[:1]
        data = gzip.decompress(path.read_bytes())
        usual_s, usual_bytes = compressed(data, USUAL)
        for level in LEVELS:
            seconds, size = compressed(data, level)
            print(
                f"{name} {len(data) / 1e6:.0f} MB, level {level}: "
                f"{len(data) / 1e6 / seconds:.0f} MB/s, 1/{len(data) / size:.1f}; "
                f"of level {USUAL}: {seconds / usual_s:.2f} of the time, "
                f"{size / usual_bytes:.2f} of the size"
            )


if __name__ == "__main__":
    main()
