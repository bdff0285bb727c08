"""Items that fail in every way: `python -m tests.benchmarks.items OUT SECONDS NAME...`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.bench import Bench, Expect, Item
from benchmarks.gpu.runner import Plan, run

HERE = "tests.benchmarks.items"
ONE = (Expect(figure="one", words="one", equals=1, source="arithmetic"),)


def works(bench: Bench) -> None:
    bench.tell("one", 1)
    bench.keep_json("one.json", {"one": 1})


def wrong(bench: Bench) -> None:
    bench.tell("one", 2)


def raises(bench: Bench) -> None:
    raise ValueError("no such luck")


def crashes(bench: Bench) -> None:
    bench.tell("one", 1)
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(bench: Bench) -> None:
    bench.tell("one", 1)
    beside = subprocess.Popen(["sleep", "600"])
    bench.note("beside", beside.pid)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def exits(bench: Bench) -> None:
    raise SystemExit(0)


def ends_mid_line(bench: Bench) -> None:
    bench.tell("one", 1)
    with bench._figures.open("a") as file:
        file.write('{"figure": "tw')


def main() -> None:
    """Arguments: where to, seconds in all, and the names of functions above."""
    items = [
        Item(name=name, question="?", function=name if ":" in name else f"{HERE}:{name}",
             limit_s=1.0 if name == "hangs" else 30.0, expects=ONE)
        for name in sys.argv[3:]
    ]  # fmt: skip
    run(Plan(items=items, out=Path(sys.argv[1]), seconds=float(sys.argv[2]), fake=False,
             machine={"gpu": "none"}))  # fmt: skip


if __name__ == "__main__":
    main()
