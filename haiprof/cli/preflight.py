"""`haiprof preflight`: which ranks, nodes and links to leave out, before a job starts."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import AsJson
from haiprof.cli.command_line import Arg, ExitStatus, Opt
from haiprof.cli.output import Output

Words = Annotated[
    list[str] | None,
    Arg(
        "COMMAND",
        "The job's launcher as it is started on this node; this command's own options come before "
        "it. Left out: one rank per GPU, or per core, of this machine.",
        is_command=True,
    ),
]
Baseline = Annotated[
    Path | None, Opt("--baseline FILE", "Also compare with the rates kept in this file.")
]
Keep = Annotated[Path | None, Opt("--keep-baseline FILE", "Keep the median rates in this file.")]
Folder = Annotated[Path, Opt("--folder DIR", "The disk to measure, such as where data lies.")]
Seconds = Annotated[float, Opt("--time SECONDS", "The preflight is ended after so long.", low=1.0)]
Backend = Annotated[
    str | None, Opt("--backend NAME", "Of torch.distributed; left out: nccl on GPUs, else gloo.")
]


def preflight(
    words: Words = None, baseline: Baseline = None, keep: Keep = None, folder: Folder = Path("."),
    seconds: Seconds = 120.0, backend: Backend = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Measure ranks, nodes and links before a job, and name those that differ from their peers.

    The job's launcher is started with a probe in place of the script: processor, memory, matrix
    products, disk, DataLoader and limits of each rank in turn; bandwidth between each two ranks and
    an all-reduce over the job's own backend. On several nodes run it on each, as the job. The exit
    status is 1 where something is to be left out or looked at.

    For example:

      haiprof preflight torchrun --nproc-per-node 8 train.py

      haiprof preflight --json srun -N 4 torchrun --nnodes 4 ... train.py | jq -r .slurm
    """
    from haiprof.base.output_file import output_file
    from haiprof.diagnosis.preflight import judge_preflight
    from haiprof.live.preflight import run_preflight
    from haiprof.show.views.preflight import headline, preflight_view

    known = _read_baseline(baseline)
    begun = time.monotonic()
    ranks = run_preflight(words or [], folder=folder, limit_s=seconds, backend=backend)
    found = judge_preflight(ranks, known)
    if keep is not None:
        with output_file(keep, force=True) as file:
            file.write(json.dumps(found.rates, indent=1).encode() + b"\n")
    Output(json=as_json).show(
        lambda _: preflight_view(found),
        {
            "headline": headline(found),
            "seconds": time.monotonic() - begun,
            "leave_out": found.leave_out,
            "slurm": found.slurm,
            "suspects": [asdict(one) for one in found.suspects],
            "rates": found.rates,
            "ranks": found.ranks,
        },
    )
    if found.suspects:
        raise ExitStatus(1)


def _read_baseline(path: Path | None) -> dict[str, float]:
    if path is None:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {str(name): float(value) for name, value in content.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        raise UsageError(
            f"{path}: not a baseline", hint="--keep-baseline FILE writes one"
        ) from None
