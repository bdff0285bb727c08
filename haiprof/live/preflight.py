"""Starts a job's launcher with the preflight's probe in place of the job's script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.version import PACKAGE
from haiprof.launch.command import find_program

PROBE = PACKAGE / "in_job" / "preflight_probe.py"
MARK = "haiprof-preflight: "  # As the probe prints it, which is never imported here
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")


class PreflightError(HaiprofError):
    """The probe did not come to its end."""

    exit_code = 5


def probe_command(words: Sequence[str], *, backend: str | None = None) -> list[str]:
    """The launcher's command line with the probe as its script; alone, one rank per GPU or core.

    The job's own script, from the first word that is a Python file, is left out with its arguments.
    A launcher that starts any program, such as srun, gets Python before the probe.
    """
    probe = [str(PROBE), *([backend] if backend else [])]
    if not words:
        count = len(list(Path("/proc/driver/nvidia/gpus").glob("*"))) or min(os.cpu_count() or 1, 8)
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*start, f"--nproc-per-node={count}", *probe]
    end = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    kept = list(words[:end])
    if not kept or Path(kept[-1]).name.startswith("python"):
        raise UsageError(
            "preflight takes the job's launcher", hint="haiprof preflight torchrun ... train.py"
        )
    kept[0] = find_program(kept[0])
    is_torchrun = any(Path(word).name in _TORCHRUN for word in kept) and "--no-python" not in kept
    return [*kept, *probe] if is_torchrun else [*kept, sys.executable, *probe]


def run_preflight(
    words: Sequence[str], *, folder: Path, limit_s: float, backend: str | None = None
) -> list[dict[str, Any]]:
    """What each rank of the job measured, in order of ranks; the disk of `folder`, too."""
    line = probe_command(words, backend=backend)
    environment = {**os.environ, "HAIPROF_PREFLIGHT_FOLDER": str(folder.resolve())}
    try:
        job = subprocess.Popen(
            line, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True, text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        raise PreflightError(f"{line[0]}: {error.strerror}") from None
    try:
        said, _ = job.communicate(timeout=limit_s)
        how = f"exit status {job.returncode}"
    except subprocess.TimeoutExpired:
        how = f"did not end in {limit_s:.0f} s"
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            said, _ = job.communicate()
    lines = [text.strip() for text in said.splitlines() if text.strip()]
    measured = [text.partition(MARK)[2] for text in lines if MARK in text]
    if measured and job.returncode == 0:
        found: list[dict[str, Any]] = json.loads(measured[0])
        return found
    errors = [text for text in lines if "Error" in text] or lines or ["it said nothing"]
    raise PreflightError(
        f"the preflight failed: {how}: {errors[-1]}",
        hint="a rank that never joined holds the others: try with fewer nodes",
    )
