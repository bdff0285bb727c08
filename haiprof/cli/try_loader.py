"""`haiprof try-loader`: short runs of a job that measure what other DataLoaders would bring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from haiprof.base.errors import UsageError
from haiprof.base.messages import print_message
from haiprof.cli.arguments import AsJson
from haiprof.cli.output import Output

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="train.py ...",
        help="The job, as after haiprof; this command's own options come before it.",
        show_default=False,
    ),
]
Steps = Annotated[int, typer.Option("--steps", metavar="N", min=60, help="Steps of a trial.")]
Seconds = Annotated[
    float,
    typer.Option(
        "--time", metavar="SECONDS", min=1.0, help="A trial ends after so long, fewer steps or not."
    ),
]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="LIST",
        help="Numbers of workers to try: 0,2,8 (default: 0, 1, 2, 4, ... up to a rank's share of "
        "the cores).",
        show_default=False,
    ),
]
LogDir = Annotated[
    Path | None,
    typer.Option(
        "--log-dir", metavar="DIR", help="Keep the trials' runs here.", show_default=False
    ),
]


def try_loader(
    words: Words, steps: Steps = 300, seconds: Seconds = 60.0, workers: Workers = None,
    log_dir: LogDir = None, as_json: AsJson = False,
) -> None:  # fmt: skip
    """Measure what a faster DataLoader would bring: the job's first steps, run again and again.

    The job is started for a few hundred steps as given, then with batches that are kept and handed
    out again (what a loader that costs nothing would gain), then with 0, 1, 2, 4, ... workers; each
    time it is ended after these steps. Nothing in the job is changed but its DataLoaders, while it
    runs. Checkpoints of torch.save go nowhere; what else the job writes, it writes. Not for a run
    whose results are wanted.

    For example:

      haiprof try-loader train.py --lr 0.1

      haiprof try-loader --steps 200 --workers 0,4,8 torchrun --nproc-per-node 2 train.py

      haiprof try-loader --json train.py | jq '.trials[] | [.loader, .steps_per_s]'
    """
    from haiprof.cli.own_command import own_command
    from haiprof.live.loader_trials import try_loaders
    from haiprof.show.views.loader_trials import headline, loader_trials_view

    counts = None if workers is None else _parse_counts(workers)
    trials = try_loaders(
        words, counts=counts, steps=steps, time_s=seconds, start=own_command,
        progress=print_message, kept=log_dir,
    )  # fmt: skip
    Output(json=as_json).show(
        lambda _: loader_trials_view(trials),
        {
            "command": words,
            "headline": headline(trials),
            "trials": [trial.as_json() for trial in trials],
        },
    )


def _parse_counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 4 for part in parts):
        raise UsageError(f"--workers {text}: expected numbers with commas between: 0,2,8")
    return list(dict.fromkeys(map(int, parts)))
