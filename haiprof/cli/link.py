"""`haiprof export --to linked`: execution traces joined with timelines."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from haiprof.base.errors import MissingDataError
from haiprof.cli.arguments import AsJson, Rank, ReadProgress, Traces, Window
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output

ExecutionTraces = Annotated[
    Path | None,
    Opt(
        "--et FILE_OR_DIR",
        "Execution traces; left out: *.et.json or *.et.json.gz next to the traces.",
    ),
]
LinkedFile = Annotated[
    Path | None,
    Opt(
        "-o --output FILE",
        "Write the joined trace, .json or .json.gz; of several ranks one file each, "
        "FILE.rankN.json.gz. Left out: only the report.",
    ),
]


def link(
    traces: Traces,
    execution: ExecutionTraces = None,
    output_file: LinkedFile = None,
    rank: Rank = None,
    window: Window = None,
    as_json: AsJson = False,
) -> None:
    """Link execution traces to timelines, operator by operator.

    Each node of the execution trace (haiprof --execution-trace, or torch's
    ExecutionTraceObserver) gets the time of its operator, the GPU work that it
    launched, and what it waited for. Says how much was linked, how, and why not
    the rest. Chakra's converter reads what is written.

    For example:

      haiprof export --to linked RUN -o linked.json.gz
      haiprof export --to linked traces/ --et execution_traces/ --json | jq '.ranks[].linked_ratio'
    """
    from haiprof.show.views.trace_files import link_data, link_view
    from haiprof.trace_analysis.execution_link import link as link_pair
    from haiprof.trace_analysis.execution_link import linked_path, write_rank
    from haiprof.trace_analysis.execution_pairs import pairs

    output = Output(json=as_json)
    shares, written = [], []
    with ReadProgress(quiet=as_json):
        found, alone = pairs(traces, execution, window=window, rank=rank)
        for pair in found:
            linked = link_pair(pair)
            shares.append(linked.share)
            if output_file is not None and linked.share.linked_count:
                path = linked_path(output_file, pair.rank if len(found) > 1 else None)
                write_rank(path, linked)
                written.append(path)
    output.show(lambda _: link_view(shares, alone), link_data(shares, alone, written))
    if not any(share.linked_count for share in shares):
        raise MissingDataError(
            f"{traces}: nothing was linked, and nothing was written",
            hint="both files have to come from the same steps of the same run",
        )
    if written:
        output.hint(f"wrote {', '.join(map(str, written))}")
        output.hint(f"next: haiprof export --to chakra {shlex.quote(str(written[0]))} -o chakra")
