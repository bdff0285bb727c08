"""`haiprof export --to scalars`: live scalars of every rank for TensorBoard."""

from __future__ import annotations

from typing import Annotated

from haiprof.cli.arguments import RunDir
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output
from haiprof.cli.target import open_target

AsJson = Annotated[bool, Opt("--json", "Print what was written as JSON at the end.")]
Follow = Annotated[
    bool, Opt("--follow", "Keep writing until the job has ended, or until interrupted.")
]
Every = Annotated[float, Opt("--every SECONDS", "Time between two looks at the run.", low=0.5)]


def scalars(
    directory: RunDir = None, follow: Follow = False, every: Every = 5.0, as_json: AsJson = False
) -> None:
    """Write step time, phases, CPU, memory and GPU of every rank as scalars for TensorBoard.

    They go into DIR/tensorboard/rank0, rank1, ...; the job itself is not touched. Of steps faster
    than 50 per second some are left out. Needs `pip install 'haiprof[tensorboard]'`.

    For example:

      haiprof export --to scalars --follow                    beside the job that runs
      tensorboard --logdir haiprof-logs           to see them
      haiprof train.py --tensorboard              starts this by itself
    """
    from haiprof.show.scalars import write_scalars

    analyzer = open_target(directory)
    written = write_scalars(analyzer.run, follow=follow, every_s=every)
    Output(json=as_json).show(lambda _: written.line, written.as_json())
