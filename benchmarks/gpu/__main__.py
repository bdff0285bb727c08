"""`scripts/gpu-check`: runs every item on the GPU of this machine, or on a simulated one."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))

from benchmarks.gpu import carried  # noqa: E402
from benchmarks.gpu.bench import ITEMS  # noqa: E402

RESULTS = REPOSITORY / "benchmarks" / "results" / "gpu"


def main() -> int:
    """The command."""
    options = arguments()
    if options.list:
        for item in ITEMS:
            print(f"{item.name:28} {item.question}")
        return 0
    if options.pack is not None:
        return carried.collect(options.pack, options.python)
    unknown = sorted(set(options.only) - {item.name for item in ITEMS})
    if unknown:
        print(f"no item {', '.join(unknown)}: --list names them all", file=sys.stderr)
        return 2
    gpu = {"gpu": "simulated"} if options.fake else find_gpu()
    if gpu is None:
        print("No NVIDIA GPU here (nvidia-smi names none): nothing was run, nothing was written.")
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-tools-") as folder:
        return prepared(options, gpu, Path(folder))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/gpu-check", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.5, help="in all (default: 9.5)")
    parser.add_argument("--out", type=Path, help="where results go (default: $OUT, or "
                        "benchmarks/results/gpu/DEVICE)")  # fmt: skip
    parser.add_argument("--fake", action="store_true", help="a simulated GPU, short loops")
    parser.add_argument("--only", action="append", default=[], metavar="ITEM", help="repeatable")
    parser.add_argument("--list", action="store_true", help="name the items")
    parser.add_argument("--pack", type=Path, nargs="?", const=carried.WHEELS, metavar="DIR",
                        help="collect the wheels that a machine without network needs")  # fmt: skip
    parser.add_argument("--wheels", type=Path, default=carried.WHEELS, metavar="DIR",
                        help="wheels that were carried (default: .whl)")  # fmt: skip
    parser.add_argument("--python", default=carried.PYTHON, help="of that machine (default: 3.12)")
    return parser.parse_args()


def find_gpu() -> dict[str, Any] | None:
    """Name and driver of the first GPU as nvidia-smi has them; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"gpu": "NVIDIA"} if Path("/dev/nvidia0").exists() else None
    words = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    name, _, driver = done.stdout.strip().partition(", ")
    return {"gpu": name, "driver": driver} if done.returncode == 0 and name else None


def prepared(options: argparse.Namespace, gpu: dict[str, Any], folder: Path) -> int:
    """Finds the packages, puts the stand-ins in place, runs."""
    try:
        told = carried.use_wheels(options.wheels, folder)
    except carried.LackingError as lacking:
        print(lacking, file=sys.stderr)
        return 2
    print(told)
    if options.fake:
        from tests.simulated import tools

        os.environ.update(tools.install(folder / "fakes"))
    from benchmarks.gpu.runner import Plan, run

    chosen = [item for item in ITEMS if not options.only or item.name in options.only]
    machine = {**gpu, **about(), "fake": options.fake, "packages": told}
    out = options.out or default_out(str(gpu["gpu"]))
    plan = Plan(items=chosen, out=out, seconds=options.minutes * 60, fake=options.fake,
                machine=machine)  # fmt: skip
    results = run(plan, say=lambda line: print(line, flush=True))
    bad = [row for result in results for row in result["rows"] if row["outcome"] == "fail"]
    broken = [r for r in results if r["state"] not in ("done", "not reached")]
    left = [str(result["name"]) for result in results if result["state"] == "not reached"]
    if left:
        print("not reached: " + " ".join(f"--only {name}" for name in left))
    print(f"{len(results)} items, {len(bad)} figures fail, {len(broken)} items broke: {out}")
    return 1 if bad or broken else 0


def about() -> dict[str, Any]:
    """The machine, as far as it can be told without torch."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = None
    return {"torch": torch, "python": platform.python_version(), "kernel": os.uname().release,
            "cpu_count": os.cpu_count(), "load_average": os.getloadavg()[0]}  # fmt: skip


def default_out(gpu: str) -> Path:
    """`$OUT` where a tool gives one, else a folder named after the GPU."""
    given = os.environ.get("OUT")
    return Path(given) if given else RESULTS / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


if __name__ == "__main__":
    sys.exit(main())
