"""`haiprof try-loader`: short runs of a job that measure what other DataLoaders would bring."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.base.log_addresses import is_address
from haiprof.base.messages import print_message
from haiprof.cli.arguments import AsJson
from haiprof.cli.command_line import Arg, Opt
from haiprof.cli.output import Output

Words = Annotated[
    list[str],
    Arg(
        "COMMAND",
        "The job, as after haiprof; this command's own options come before it.",
        is_command=True,
    ),
]
Steps = Annotated[int, Opt("--trial-steps N", "Steps of a trial.", low=60)]
Seconds = Annotated[
    float, Opt("--time SECONDS", "A trial ends after so long, fewer steps or not.", low=1.0)
]
Workers = Annotated[
    str | None,
    Opt(
        "--workers LIST",
        "Numbers of workers to try: 0,2,8 (default: 0, 1, 2, 4, ... up to a rank's share of "
        "the cores).",
    ),
]
LogDir = Annotated[str | None, Opt("--log-dir DIR", "Keep the trials' runs here.")]


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

      haiprof try-loader --trial-steps 200 --workers 0,4,8 torchrun --nproc-per-node 2 train.py

      haiprof try-loader --json train.py | jq '.trials[] | [.loader, .steps_per_s]'
    """
    from haiprof.cli.own_command import own_command
    from haiprof.live.loader_trials import try_loaders
    from haiprof.run_format.secrets import mask_text
    from haiprof.show.views.loader_trials import headline, loader_trials_view

    if log_dir is not None and is_address(log_dir):
        raise UsageError(f"--log-dir {mask_text(log_dir)}: expected a folder of this machine")
    counts = None if workers is None else _parse_counts(workers)
    trials = try_loaders(
        words, counts=counts, steps=steps, time_s=seconds, start=own_command,
        progress=print_message, kept=None if log_dir is None else Path(log_dir),
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
