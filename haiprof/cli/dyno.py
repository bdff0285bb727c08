"""`haiprof trace dyno`: dynolog's own command line, for its daemons or without them."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Literal

from haiprof.base.errors import HaiprofError, MissingDataError, UsageError
from haiprof.base.messages import print_message
from haiprof.base.version import __version__
from haiprof.cli.command_line import argument, option
from haiprof.cli.output import Output
from haiprof.cli.shared import OUTPUT

if TYPE_CHECKING:
    from haiprof.live.kineto_trace import GpuTrace, NodeAnswer


Wish = Literal["status", "version", "gputrace", "dcgm-pause", "dcgm-resume"]
_RPC = {"status": "getStatus", "version": "getVersion", "dcgm-pause": "dcgmProfPause",
        "dcgm-resume": "dcgmProfResume"}  # fmt: skip


def dyno(
    command: Wish = argument("COMMAND", "status, version, gputrace, dcgm-pause or dcgm-resume."),
    hostname: str | None = option(
        "--hostname HOSTS",
        "Where dynolog's daemons listen: n1, or n[01-16,20] for one request to many. Left out: "
        "the daemon of this machine; where there is none, haiprof's own agent here.",
    ),
    port: int = option("--port PORT", "dynolog's port.", 1778, low=1, high=65535),
    job_id: int = option("--job-id NUMBER", "Of this job of Slurm (SLURM_JOB_ID).", 0, low=0),
    pids: str = option("--pids LIST", "Only these processes: 4711,4712. 0: all.", "0"),
    duration_ms: int = option("--duration-ms MS", "How long to trace.", 500, low=1),
    iterations: int = option("--iterations N", "Iterations in place of a duration.", -1),
    log_file: str = option(
        "--log-file FILE", "Traces are FILE with _PID before .json, on the job's nodes.", ""
    ),
    profile_start_time: int = option(
        "--profile-start-time MS", "Unix time at which a duration begins.", 0, low=0
    ),
    profile_start_iteration_roundup: int = option(
        "--profile-start-iteration-roundup N", "Iterations begin at a multiple of it.", 0, low=0
    ),
    process_limit: int = option(
        "--process-limit N", "Processes of a node at most; 0: all (dyno's own: 3).", 0, low=0
    ),
    record_shapes: bool = option("--record-shapes", "Shapes of operators' inputs."),
    profile_memory: bool = option("--profile-memory", "Allocations."),
    with_stacks: bool = option("--with-stacks", "Python stacks."),
    with_flops: bool = option("--with-flops", "Floating-point operations."),
    with_modules: bool = option("--with-modules", "Names of TorchScript modules."),
    fail_on_no_process: bool = option(
        "--fail-on-no-process", "Status 1 where no process is found."
    ),
    duration_s: int = option("--duration-s SECONDS", "How long dcgm-pause lasts.", 300, low=1),
    output: Output = OUTPUT,
) -> None:
    """Take dynolog's command line: alias dyno='haiprof trace dyno'.

    With dynolog's daemons it asks them, also those of many nodes at once, whose traces then begin
    together. Without one it asks haiprof's agent on this node (haiprof trace kineto-agent), waits
    for the traces, and completes them with rank and world size. What Kineto cannot give, such as
    steps and phases, is in docs/kineto.md; haiprof trace now gives it for jobs under haiprof.

    For example:

      haiprof trace dyno gputrace --log-file /tmp/t.json --iterations 5
      haiprof trace dyno --hostname n[01-16] gputrace --job-id 12 --log-file /shared/t.json
      haiprof trace dyno status
    """
    from haiprof.live.kineto_trace import GpuTrace, has_daemon

    question: GpuTrace | dict[str, Any]
    if command == "gputrace":
        named = {"shapes": record_shapes, "memory": profile_memory, "stacks": with_stacks,
                 "flops": with_flops, "modules": with_modules}  # fmt: skip
        question = GpuTrace(
            log_file=log_file, job_id=job_id, pids=_parse_pids(pids), duration_ms=duration_ms,
            iterations=iterations, start_ms=profile_start_time, limit=process_limit,
            roundup=profile_start_iteration_roundup,
            switches=tuple(name for name, is_on in named.items() if is_on),
        )  # fmt: skip
        _check(question)
    else:
        question = {"fn": _RPC[command]}
        question |= {"duration_s": duration_s} if command == "dcgm-pause" else {}
    if hostname is not None or has_daemon(port):
        _ask_daemons(hostname or "localhost", port, question, output, must_match=fail_on_no_process)
    elif isinstance(question, GpuTrace):
        _trace_here(question, output, must_match=fail_on_no_process)
    else:
        _tell_of_here(command, output)


def _parse_pids(text: str) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and len(word) < 10 for word in words):
        raise UsageError(f"--pids {text}: expected process ids, such as 4711,4712")
    return tuple(pid for pid in map(int, words) if pid)


def _check(wish: GpuTrace) -> None:
    """Refuses what cannot be traced, and says what is left out."""
    if not wish.log_file:
        raise UsageError("gputrace needs --log-file", hint="--log-file /tmp/trace.json")
    if any(character in wish.log_file for character in "\n\r#"):
        raise UsageError(f"--log-file {wish.log_file!r}: Kineto cannot take such a path")
    if ".json" not in wish.log_file:
        raise UsageError(f"--log-file {wish.log_file}: expected a name that ends with .json")
    if wish.iterations > 0 and wish.start_ms:
        print_message(
            "Kineto begins --iterations at no time of its own: a daemon's processes begin at once, "
            "others are asked shortly before --profile-start-time"
        )
    if wish.iterations <= 0 and wish.roundup:
        print_message("--profile-start-iteration-roundup is left out: it is of --iterations")


def _ask_daemons(
    hosts: str, port: int, question: GpuTrace | dict[str, Any], output: Output, *, must_match: bool
) -> None:
    from haiprof.live.kineto_trace import GpuTrace, ask_daemons, check_answers, expand_hosts

    answers = ask_daemons(expand_hosts(hosts), port, question)
    output.show(lambda _: "\n".join(map(_answer_text, answers)), {"daemons": answers})
    is_trace = isinstance(question, GpuTrace)
    if is_trace and not output.json:
        print_message("dynolog tells neither when a trace is written nor whose it is: the files "
                      "have no rank; haiprof trace report DIR reads them")  # fmt: skip
    check_answers(answers, needs_process=is_trace and must_match)


def _answer_text(found: NodeAnswer) -> str:
    if found.error:
        return f"{found.host}: {found.error}"
    if found.answer is not None:
        said = ", ".join(f"{key} {value}" for key, value in found.answer.items())
        return f"{found.host}: {said or 'done'}"
    if not found.matched:
        return f"{found.host}: no process was matched: see --job-id and --pids"
    left = set(found.matched) - set(found.triggered)
    busy = f"; not traced (another trace, or --process-limit): {sorted(left)}" if left else ""
    files = "".join(f"\n    {file}" for file in found.files)
    return f"{found.host}: matched {len(found.matched)} processes{busy}; traces will be in{files}"


def _trace_here(wish: GpuTrace, output: Output, *, must_match: bool) -> None:
    from haiprof.live.kineto_trace import trace_here
    from haiprof.show.views.requests import kineto_view

    try:
        found = trace_here(wish, print_message)
    except MissingDataError as error:
        if must_match:
            raise
        print_message(f"no process was matched: {error}")
        output.show(lambda _: "no process was matched", {"processes": []})
        return
    output.show(lambda _: kineto_view(found), found.as_json())
    if not found.done:
        raise HaiprofError("no process was traced")
    output.hint(f"next: haiprof trace report {shlex.quote(found.folder)}")


def _tell_of_here(command: Wish, output: Output) -> None:
    from haiprof.live.kineto_trace import agents_here

    if command == "version":
        said = f"haiprof {__version__}, in place of dynolog"
        output.show(lambda _: said, {"haiprof": __version__})
        return
    if command != "status":
        raise UsageError(
            f"{command} is of dynolog's DCGM, and no daemon listens here",
            hint="haiprof reads GPUs through NVML, and holds no counters that others wait for",
        )
    agents = agents_here()
    lines = [f"{place}: {said if isinstance(said, str) else f'{len(said)} processes {said}'}"
             for place, said in agents.items()]  # fmt: skip
    output.show(lambda _: "\n".join(lines), {"agents": agents})
