"""`haiprof node`: records a node for months without a job, and shows what it kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

from haiprof.base.errors import HaiprofError, RunNotFoundError, UsageError
from haiprof.cli.arguments import AS_JSON
from haiprof.cli.command_line import argument, option
from haiprof.cli.output import Output
from haiprof.run_format.node_history import LIMIT_MB

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class NodeAgentError(HaiprofError):
    """The agent cannot write where it should."""

    exit_code = 5


def node(
    directory: Path | None = argument(
        "DIR",
        "Where the records are; several nodes may share it. Default: ~/.local/state/haiprof/node.",
        callback=Path.expanduser,
    ),
    show: bool = option("--show", "Show what is there instead of recording."),
    last: str = option(
        "--last TIME", "With --show: how far back, such as 10m, 24h, 7d, 26w.", "24h"
    ),
    limit: float = option(
        "--limit MB", "Size of all files of this node at the most.", LIMIT_MB, low=32.0
    ),
    prometheus: int | None = option(
        "--prometheus PORT",
        "Serve the newest sample at 127.0.0.1:PORT/metrics. Left out: no port.",
        low=1,
        high=65_535,
    ),
    allow: str = option(
        "--prometheus-allow USERS", "Who else may read it: names, uids, or all.", ""
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Record this node without a job, for months: counters, jobs that come and go, GPUs held.

    Counters of host, disks, network, GPUs and InfiniBand each second for 6 hours, in 10 s for 3
    days, in 5 min for 180 days; how much that is here is printed after 3 s, and --limit is never
    exceeded. Jobs are runs of haiprof, and processes that have torch loaded. It needs no root and
    ends with Ctrl-C or TERM. A systemd unit, a DaemonSet and a Slurm prolog are in docs/fleet.md.

    For example:

      haiprof node &                                record this node
      haiprof node --show                           the last day, by the hour
      haiprof node --show --last 10m                ... ten minutes, every 60 s
      haiprof node --show --json | jq '.nodes[].held_gpus[] | select(.unused)'
      haiprof node /var/lib/haiprof --prometheus 9464   also for Prometheus, on this machine
    """
    from haiprof.base.log_addresses import recording_folder

    folder = directory or recording_folder(os.environ).with_name("node")
    if show:
        _show(folder, _span_s(last), Output(json=as_json))
        return
    from haiprof.base.options import Options, parse_value
    from haiprof.base.stop_signal import stop_event
    from haiprof.live.node import RECORDERS, run_node_agent

    users = parse_value("prometheus-allow", allow, origin="--prometheus-allow")[1]
    options = Options(recorder=RECORDERS, prometheus_port=prometheus or 0, prometheus_allow=users)  # type: ignore[arg-type]
    with stop_event() as stop:
        try:
            run_node_agent(folder, limit_bytes=round(limit * 1e6), options=options, stop=stop)
        except OSError as error:
            raise NodeAgentError(
                f"{error.filename or folder}: {error.strerror or error}",
                hint="haiprof node DIR records into another folder",
            ) from None


def _span_s(text: str) -> float:
    number, unit = text[:-1], _SECONDS.get(text[-1:])
    if unit is None or not number.isdecimal() or int(number) == 0:
        raise UsageError(f"--last {text}: expected such as 10m, 24h, 7d, 26w")
    return float(int(number) * unit)


def _show(folder: Path, span_s: float, output: Output) -> None:
    from rich.console import Group

    from haiprof.run_analysis.node_history import read_node
    from haiprof.run_format.layout import RunPaths
    from haiprof.show.views.node import node_view, step_ns

    nodes = [paths for _, paths in RunPaths(folder).node_folders()]
    if not nodes:
        raise RunNotFoundError(f"{folder}: no node was recorded here", hint="haiprof node DIR")
    step, now_ns = step_ns(span_s), time.time_ns()
    since_ns = now_ns - round(span_s * 1e9)
    since_ns -= since_ns % step
    found = [read_node(n, since_ns=since_ns, until_ns=now_ns, step_ns=step) for n in nodes]
    data = [
        {name: getattr(each, name) for name in each.__dataclass_fields__}
        | {"counters": each.counters.to_dicts()}
        for each in found
    ]
    output.show(
        lambda _: Group(*(node_view(each, step) for each in found)),
        {"step_ns": step, "nodes": data},
    )
