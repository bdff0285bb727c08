"""Stand-ins for the tools of a machine with a GPU: NVIDIA's library, nvidia-smi, nsys.

The library is `tests/nvml_stub`, compiled here; nsys is `tests/fake_nsys.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
STUB = REPOSITORY / "tests" / "nvml_stub" / "nvml_stub.c"
# What the stub answers, by nvidia-smi's names and in its units.
SMI = {
    "utilization.gpu": "40", "memory.used": "5120", "memory.total": "81920",
    "power.draw.average": "500.00", "power.draw.instant": "510.00", "clocks.sm": "1755",
    "clocks.mem": "2619", "temperature.gpu": "50", "temperature.memory": "60",
    "pcie.link.gen.current": "5", "pcie.link.width.current": "16", "enforced.power.limit": "700.00",
    "clocks.max.sm": "1980", "ecc.errors.uncorrected.volatile.total": "4",
    "clocks_event_reasons.active": "0x0000000000000024", "name": "NVIDIA Stub",
    "driver_version": "580.159.04",
}  # fmt: skip
_SMI_PROGRAM = """#!{python} -S
import sys
answers = {answers!r}
asked = next(w.partition("=")[2] for w in sys.argv if w.startswith("--query-gpu="))
if asked not in answers:
    print(f'Field "{{asked}}" is not a valid field to query.')
    raise SystemExit(2)
print(answers[asked])
"""
# Recording a command, it sets what the real one sets; sampling GPUs, it is tests/fake_nsys.py.
_NSYS_PROGRAM = """#!/bin/sh
case "$*" in
*--trace=cuda*)
    shift
    while case "$1" in --*) true ;; *) false ;; esac; do shift; done
    NSYS_PROFILING_SESSION_ID=1 exec "$@" ;;
*) exec {python} {nsys} works "$@" ;;
esac
"""


def install(folder: Path) -> dict[str, str]:
    """Puts them into a folder; the variables with which programs find them."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    _program(programs / "nvidia-smi", _SMI_PROGRAM.format(python=sys.executable, answers=SMI))
    nsys = _NSYS_PROGRAM.format(python=sys.executable, nsys=REPOSITORY / "tests" / "fake_nsys.py")
    _program(programs / "nsys", nsys)
    found = {
        "GPU_CHECK_FAKE": "1", "KINETO_LOG_LEVEL": "99", "OMP_NUM_THREADS": "1",
        "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', '')}",
    }  # fmt: skip
    library = compile_stub(folder / "lib")
    if library is not None:
        found |= {"LD_LIBRARY_PATH": str(library)}
    return found


def compile_stub(folder: Path) -> Path | None:
    """The folder of a libnvidia-ml.so.1 of our own; None without a C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    folder.mkdir(parents=True)
    target = folder / "libnvidia-ml.so.1"
    name = f"-Wl,-soname,{target.name}"
    command = [compiler, "-shared", "-fPIC", name, "-o", str(target), str(STUB)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return folder


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
