"""`haiprof preflight`, `try-loader`, `doctor` and `node`: before a job, and without one."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

from haiprof.base.errors import HaiprofError, RunNotFoundError, UsageError
from haiprof.base.log_addresses import is_address
from haiprof.base.messages import print_message
from haiprof.cli.command_line import ExitStatus, argument, option
from haiprof.cli.output import Output
from haiprof.cli.shared import OUTPUT, default_log_dir
from haiprof.run_format.node_history import LIMIT_MB


def preflight(
    words: list[str] | None = argument(
        "COMMAND",
        "The job's launcher as it is started on this node; this command's own options come before "
        "it. Left out: one rank per GPU, or per core, of this machine.",
        is_command=True,
    ),
    baseline: Path | None = option(
        "--baseline FILE", "Also compare with the rates kept in this file."
    ),
    keep: Path | None = option("--keep-baseline FILE", "Keep the median rates in this file."),
    folder: Path = option(
        "--folder DIR", "The disk to measure, such as where data lies.", Path(".")
    ),
    seconds: float = option(
        "--time SECONDS", "The preflight is ended after so long.", 120.0, low=1.0
    ),
    backend: str | None = option(
        "--backend NAME", "Of torch.distributed; left out: nccl on GPUs, else gloo."
    ),
    output: Output = OUTPUT,
) -> None:
    """Measure ranks, nodes and links before a job, and name those that differ from their peers.

    The job's launcher is started with a probe in place of the script: processor, memory, matrix
    products, disk, DataLoader and limits of each rank in turn; bandwidth between each two ranks and
    an all-reduce over the job's own backend. On several nodes run it on each, as the job. The exit
    status is 1 where something is to be left out or looked at. What was found is kept in the log
    directory, for verdicts of later runs and `haiprof ls --nodes`.

    For example:

      haiprof preflight torchrun --nproc-per-node 8 train.py

      haiprof preflight --json srun -N 4 torchrun --nnodes 4 ... train.py | jq -r .slurm
    """
    from haiprof.base.safe_files import output_file
    from haiprof.diagnosis.named_nodes import keep_preflight
    from haiprof.diagnosis.preflight import judge_preflight
    from haiprof.live.preflight import run_preflight
    from haiprof.show.views.prepare import headline, preflight_view

    known = _read_baseline(baseline)
    begun = time.monotonic()
    ranks = run_preflight(words or [], folder=folder, limit_s=seconds, backend=backend)
    found = judge_preflight(ranks, known)
    if found.ranks[0]["host"] == socket.gethostname():  # of several nodes one keeps it
        try:
            path = keep_preflight(found, default_log_dir(), time.time_ns())
            output.hint(f"kept in {path}")
        except OSError as error:
            output.hint(f"not kept in {default_log_dir()}: {error.strerror or error}")
    if keep is not None:
        with output_file(keep, force=True) as file:
            file.write(json.dumps(found.rates, indent=1).encode() + b"\n")
    names = ("leave_out", "slurm", "suspects", "unread", "rates", "ranks")
    data = {"headline": headline(found), "seconds": time.monotonic() - begun}
    output.show(
        lambda _: preflight_view(found), {**data, **{name: getattr(found, name) for name in names}}
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


def try_loader(
    words: list[str] = argument(
        "COMMAND",
        "The job, as after haiprof; this command's own options come before it.",
        is_command=True,
    ),
    steps: int = option("--trial-steps N", "Steps of a trial.", 300, low=60),
    seconds: float = option(
        "--time SECONDS", "A trial ends after so long, fewer steps or not.", 60.0, low=1.0
    ),
    workers: str | None = option(
        "--workers LIST",
        "Numbers of workers to try: 0,2,8 (default: 0, 1, 2, 4, ... up to a rank's share of "
        "the cores).",
    ),
    log_dir: str | None = option("--log-dir DIR", "Keep the trials' runs here."),
    output: Output = OUTPUT,
) -> None:
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
    from haiprof.cli.names import own_command
    from haiprof.live.loader_trials import try_loaders
    from haiprof.run_format.secrets import mask_text
    from haiprof.show.views.prepare import loader_trials_view, trials_headline

    if log_dir is not None and is_address(log_dir):
        raise UsageError(f"--log-dir {mask_text(log_dir)}: expected a folder of this machine")
    parts = [part.strip() for part in (workers or "0").split(",")]
    if not all(part.isdecimal() and len(part) < 4 for part in parts):
        raise UsageError(f"--workers {workers}: expected numbers with commas between: 0,2,8")
    counts = None if workers is None else list(dict.fromkeys(map(int, parts)))
    trials = try_loaders(
        words, counts=counts, steps=steps, time_s=seconds, start=own_command,
        progress=print_message, kept=None if log_dir is None else Path(log_dir),
    )  # fmt: skip
    output.show(
        lambda _: loader_trials_view(trials),
        {"command": words, "headline": trials_headline(trials), "trials": trials},
    )


def doctor(
    output: Output = OUTPUT,
    every_row: bool = option("--all", "Every counter on a line of its own, missing ones too."),
) -> None:
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
    from haiprof.agent.samplers import registry
    from haiprof.agent.samplers.table import Node
    from haiprof.show.views.prepare import doctor_view

    counters = registry.survey(Node(host=socket.gethostname(), pid=os.getpid()))
    nsys = find_nsys(os.environ)
    tools = registry.find_tools(known={"nsys": nsys} if isinstance(nsys, str) else {})
    permissions, node = registry.find_permissions(), registry.software()
    rows = [registry.counter_row(state) for state in counters]
    output.show(
        lambda _: doctor_view(counters, tools, permissions, node=node, every_row=every_row),
        {"counters": rows, "tools": tools, "permissions": permissions, "node": node},
    )
    output.hint("next: haiprof train.py" if every_row else "next: haiprof doctor --all")


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class NodeAgentError(HaiprofError):
    """The agent cannot write where it should."""

    exit_code = 5


def node(
    directory: Path | None = argument(
        "DIR",
        "Where the records are; several nodes may share it. Default: ~/.local/state/haiprof/node.",
        callback=lambda path: path and path.expanduser(),
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
    output: Output = OUTPUT,
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
        _show_nodes(folder, last, output)
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


def _show_nodes(folder: Path, last: str, output: Output) -> None:
    from rich.console import Group

    from haiprof.run_analysis.node_history import read_node
    from haiprof.run_format.layout import RunPaths
    from haiprof.show.views.node import node_view, step_ns

    number, unit = last[:-1], _SECONDS.get(last[-1:])
    if unit is None or not number.isdecimal() or int(number) == 0:
        raise UsageError(f"--last {last}: expected such as 10m, 24h, 7d, 26w")
    span_s = float(int(number) * unit)
    nodes = [paths for _, paths in RunPaths(folder).node_folders()]
    if not nodes:
        raise RunNotFoundError(f"{folder}: no node was recorded here", hint="haiprof node DIR")
    step, now_ns = step_ns(span_s), time.time_ns()
    since_ns = now_ns - round(span_s * 1e9)
    since_ns -= since_ns % step
    found = [read_node(n, since_ns=since_ns, until_ns=now_ns, step_ns=step) for n in nodes]
    output.show(
        lambda _: Group(*(node_view(each, step) for each in found)),
        {"step_ns": step, "nodes": found},
    )
