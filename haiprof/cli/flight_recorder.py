"""`haiprof trace flight-recorder`: dumps of PyTorch's Flight Recorder, from any job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from haiprof.cli.arguments import AsJson
from haiprof.cli.command_line import Arg
from haiprof.cli.output import Output

Dumps = Annotated[
    list[Path],
    Arg("DUMPS", "Files, one per rank, which end in the rank's number, or a folder of them."),
]


def flight_recorder(dumps: Dumps, as_json: AsJson = False) -> None:
    """Name the collective that does not match, and the ranks, from dumps of the Flight Recorder.

    PyTorch's watchdog writes such dumps where a collective times out
    (TORCH_NCCL_DUMP_ON_TIMEOUT=1, TORCH_FR_BUFFER_SIZE=2000). Nothing in a pickle is executed.
    Where stacks were recorded, lines of your code are named.

    For example:

      haiprof trace flight-recorder /tmp/nccl_trace_rank_*
      haiprof trace flight-recorder dumps/ --json | jq '.findings[0]'
    """
    from haiprof.run_analysis.collectives import judge_dumps
    from haiprof.show.views.flight_dumps import flight_view

    verdict = judge_dumps(dumps)
    data = {
        "findings": verdict.findings,
        "ranks": verdict.ranks,
        "last": verdict.last.to_dicts(),
        "notes": verdict.notes,
    }
    Output(json=as_json).show(lambda _: flight_view(verdict), data)
