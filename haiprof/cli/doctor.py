"""`haiprof doctor`: every counter of this node, and what stands in the way of the others."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Annotated

from haiprof.cli.arguments import AsJson
from haiprof.cli.command_line import Opt
from haiprof.cli.output import Output

EveryRow = Annotated[bool, Opt("--all", "Every counter on a line of its own, missing ones too.")]
_NO_RUN = Path(os.devnull) / "doctor"  # no folder can be there: nothing is found, nothing is left


def doctor(as_json: AsJson = False, every_row: EveryRow = False) -> None:
    """Show every counter of this node: its value, source and cost, or why there is none.

    Needs no job, changes nothing, leaves no file. What is missing is shown with what an
    administrator would have to set. Counters of ranks are those of haiprof's own process.

    For example:

      haiprof doctor                  what is measured in short, then what is missing
      haiprof doctor --all            one line per counter
      haiprof doctor --json | jq '.counters[] | select(.status == "denied")'
      srun --ntasks-per-node 1 haiprof doctor         on each node of a job
    """
    from haiprof.agent.burst import find_nsys
    from haiprof.agent.samplers.registry import counter_row, survey
    from haiprof.agent.samplers.table import Node
    from haiprof.agent.samplers.tools import find_permissions, find_tools, software
    from haiprof.run_format.layout import RunPaths
    from haiprof.show.views.doctor import doctor_view

    here = Node(run=RunPaths(_NO_RUN), host=socket.gethostname(), pid=os.getpid())
    counters = survey(here)
    nsys = find_nsys(os.environ)
    tools = find_tools(known={"nsys": nsys} if isinstance(nsys, str) else {})
    permissions, node = find_permissions(), software()
    output = Output(json=as_json)
    output.show(
        lambda _: doctor_view(counters, tools, permissions, node=node, every_row=every_row),
        {
            "counters": [counter_row(state) for state in counters],
            "tools": tools,
            "permissions": permissions,
            "node": node,
        },
    )
    output.hint("next: haiprof train.py" if every_row else "next: haiprof doctor --all")
