"""After a death: start the job again, start it without some nodes, or stop."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from haiprof.base.errors import HaiprofError
from haiprof.base.units import bytes_text, visible
from haiprof.run_analysis.deaths import Death, ended_on_nan
from haiprof.run_analysis.restarts import Goodput, goodput
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, read_manifest, run_folders, script_words

Action = Literal["RESTART", "RESTART WITHOUT", "STOP"]
_Judgement = tuple[Action, tuple[str, ...], str, str]  # Action, nodes, reason, text
EXIT_STATUS: dict[Action, int] = {"RESTART": 10, "RESTART WITHOUT": 11, "STOP": 12}
"""Of `haiprof verdict --advice`; 0: nothing died. Errors of haiprof are below 10."""
_EARLIER_RUNS = 8
_IDLE_DEATHS = 3  # So many deaths in a row without a step are no accident
_ASKED = ("interrupted", "cancelled")
_FULL = ("disk_full", "shared_memory_full")
_OF_CODE = ("exception", "exit", "crash", "early_exit", "mismatch", "hang", "deadlock")
"""Causes that stand at a line of the user's code."""
_WITHOUT_LINE = ("early_exit", "mismatch")
"""Causes that no machine has, which need no line to be the same again."""
OF_NODES = ("killed", "crash", "hang", "gone", "node_lost", "never_started")
"""Causes that a sick node has."""
_HARDWARE = re.compile(
    r"uncorrectable ECC|fallen off the bus|NVLink error|CUDA-capable device\(s\) is/are busy or "
    r"unavailable|hardware error",
    re.IGNORECASE,
)
"""Texts of CUDA's and the kernel's that only a broken device causes."""
_PROGRAM = re.compile(
    r"(?:SyntaxError|IndentationError|NameError|UnboundLocalError|AttributeError|TypeError|"
    r"ImportError|ModuleNotFoundError|NotImplementedError)\b"
)
"""Exceptions of a program that is wrong, whatever its data and its machine."""
_OF_DATA = re.compile(
    r"(?:\w+\.)*(?:ZeroDivisionError|OverflowError|KeyError|IndexError|LookupError|AssertionError|"
    r"ValueError|JSONDecodeError|Unicode\w+Error|UnpicklingError|RecursionError|"
    r"RuntimeError(?=: (?:mat1 and mat2|The size of tensor|Sizes of tensors|shape |stack expects |"
    r"Expected |expected )))\b"
)
"""These as well before a step has ended; later they may be of the data."""
_OF_MACHINE = re.compile(
    r"(?:Connect\w*|Network|Store|Timeout|Timedout|HTTP|URL|SSL|[Ss]ocket|IO|OS|Permission|"
    r"File\w+|Directory|Pipe|Process|Memory|Backend|Accelerator)(?:Error|Exception|Exceeded|Timeout)|"
    r"(?i:\bCUDA|\bcu(?:DNN|BLAS|sparse)|\bHIP\b|NCCL|RCCL|gloo|\bMPI\b|rendezvous|\bconnect|"
    r"socket|address|shared memory|worker|no space|quota|"
    r"timed? ?out|out of memory|no such file|\bI/O|errno)"
)
"""What memory, devices, the network, file systems or the rendezvous cause, too."""
_BEFORE_ERROR = re.compile(
    r".*(?:, while handling |; raised from )|its DataLoader worker \d+ raised "
)
"""What stands before the error that an end goes back to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One start of the job's ranks that died."""

    run: str  # The run directory's name
    generation: int
    cause: str  # As in `deaths.Death`
    line: str | None
    step: int | None  # The last one of the rank that it began with; None where that is not known
    has_trained: bool  # Whether any rank is known to have ended a step
    is_hardware: bool  # Whether the exception says that a device is broken
    is_program: bool
    """Whether its exception is one of the program, or ranks issued other collectives than others:
    that comes again at each start."""
    is_of_code: bool
    """Whether the job's code ended it by itself: by sys.exit, or by an exception that no device,
    file or network raises, such as ValueError."""
    is_nan: bool
    """Whether the job ended itself because a value, such as its loss, was no finite number."""
    growth_bytes_per_step: float | None
    """By which memory grew all along until it ran out; None where it did not, or is not known."""
    has_saved: bool  # Whether a checkpoint was seen to be written
    hosts: tuple[str, ...]  # Of the ranks that it began with, where that is known
    died_ns: int | None
    headline: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a job script should do after a death."""

    action: Action
    nodes: tuple[str, ...]  # Nodes to leave out; empty where the advice is another one
    reason: str  # Slug of the rule that gave it
    text: str
    exit_status: int
    attempts: tuple[Attempt, ...]
    """Deaths of this job, of this run and earlier ones, oldest first; the last one is judged."""

    @property
    def headline(self) -> str:
        """`RESTART WITHOUT node-2,node-5`: nodes as Slurm's `--exclude` takes them."""
        return f"{self.action} {','.join(self.nodes)}".rstrip()


def restart_advice(frames: RunFrames) -> Advice | None:
    """The advice after a run's last death; None where it has not died, or only a part was read."""
    deaths = frames.deaths()
    if not any(death.final for death in deaths):
        return None
    attempts = [*_earlier_attempts(frames), *_attempts(frames)]
    hosts = frozenset(fate.host for fate in deaths[-1].fates if fate.host is not None)
    return advise(attempts, hosts)


def advise(attempts: Sequence[Attempt], hosts: frozenset[str]) -> Advice:
    """The advice after the last of these deaths, on these nodes, by the first rule that has one."""
    action, nodes, reason, text = next(_judge(attempts, hosts))
    return Advice(action=action, nodes=nodes, reason=reason, text=text,
                  exit_status=EXIT_STATUS[action], attempts=tuple(attempts))  # fmt: skip


def _judge(attempts: Sequence[Attempt], hosts: frozenset[str]) -> Iterator[_Judgement]:
    *earlier, last = attempts
    earlier = [each for each in earlier if each.cause not in _ASKED]
    alike = [each for each in earlier if each.cause == last.cause]
    if last.cause in _ASKED:
        text = "it was interrupted or cancelled: start it again if that was not meant"
        yield "STOP", (), "asked", text
    if last.cause in _FULL:
        yield "STOP", (), last.cause, "a restart finds it as full as it was"
    # Of a killed rank the last step may not be written.
    near = range(0) if last.step is None else range(last.step - 1, last.step + 2)
    same = [each for each in alike if each.step in near]
    if last.cause == "out_of_memory" and same:
        text = f"out of memory at the same step, {last.step}, in {len(same) + 1} starts"
        yield "STOP", (), "same_memory", text
    others_are_left = bool(hosts - set(last.hosts))
    if others_are_left and last.hosts and (last.cause == "node_lost" or last.is_hardware):
        text = "the node was lost" if last.cause == "node_lost" else "its device is broken"
        yield "RESTART WITHOUT", last.hosts, "broken_node", text
    before = {h for a in earlier if a.cause in OF_NODES or a.is_hardware for h in a.hosts}
    again = tuple(host for host in last.hosts if host in before)
    if others_are_left and again and last.cause in OF_NODES:
        yield "RESTART WITHOUT", again, "same_node", "ranks there were the first to die before"
    same = [a for a in alike if a.line == last.line and (a.line or a.cause in _WITHOUT_LINE)]
    if last.cause in _OF_CODE and same:
        place = f"at the same line, {last.line}," if last.line else f"of the same ({last.cause})"
        yield "STOP", (), "same_line", f"it died {place} in {len(same) + 1} starts"
    same = [a for a in alike if a.step in near and a.line is last.line is None]
    if last.cause in _OF_CODE and same:
        text = f"it died so at the same step, {last.step}, in {len(same) + 1} starts"
        yield "STOP", (), "same_step", text
    if last.is_program:
        yield "STOP", (), "program", "an error of the program: it comes again at each start"
    if last.is_nan:
        text = "it ended on a NaN: the same seeds and settings meet it again; begin from a "
        text += "checkpoint before it with another setting, such as a lower learning rate"
        yield "STOP", (), "nan", text
    if last.is_of_code:
        place = f" at {last.line}" if last.line else ""
        text = f"an error of the program or its data{place}: a restart helps only if the order of "
        text += "the data or a damaged read was to blame"
        if last.cause == "exit":
            text = f"the program ended itself{place}: see why before it is started again"
        yield "STOP", (), "code", text
    idle = attempts[-_IDLE_DEATHS:]
    if len(idle) == _IDLE_DEATHS and not any(each.has_trained for each in idle):
        yield "STOP", (), "never_trained", f"no step ended in the last {_IDLE_DEATHS} starts"
    if last.growth_bytes_per_step is not None:
        grown = f"memory grew by {bytes_text(round(last.growth_bytes_per_step))} a step"
        if last.has_saved:
            after = "" if last.step is None else f" after some {last.step + 1} steps"
            text = f"{grown}: a restart goes on from the checkpoint, and dies again{after}"
            yield "RESTART", (), "grows", f"{text}; for good, stop the growth"
        text = f"{grown}, and no checkpoint was seen: begun anew, it dies at about the same step"
        yield "STOP", (), "grows", f"{text}; stop the growth first"
    none = f"none of {len(earlier)} earlier deaths was like it" if earlier else "its first death"
    if alike:
        none = f"{len(alike)} of {len(earlier)} earlier deaths had the same cause"
    text = ", nothing shows that it fails the same way again"
    if last.line is not None and last.cause in ("exception", "crash"):
        text = " if the machine, the network or the order of the data caused it; a second death at "
        text += f"{last.line} is a STOP"
    if last.cause == "deadlock":
        text = ", as which thread comes first is chance; for good, change how the locks are taken: "
        text += "a second death at that line is a STOP"
    yield "RESTART", (), "not_repeated", f"{none}: a restart may get past it{text}"


def _attempts(frames: RunFrames) -> list[Attempt]:
    """The deaths of a run, each once: starts that never trained tell that of an earlier one."""
    deaths = frames.deaths()
    told = {death.began_in for death in deaths}
    return [_attempt(frames, death) for death in deaths if death.generation not in told]


def _attempt(frames: RunFrames, death: Death) -> Attempt:
    hosts = {fate.host for fate in death.fates if fate.rank in death.ranks}
    trained = any(fate.step for fate in death.fates)
    error, raised = _BEFORE_ERROR.sub("", death.what, count=1), death.cause == "exception"
    of_data = _OF_DATA.match(error) is not None
    is_wrong = _PROGRAM.match(error) is not None or (
        raised and {f.rank for f in death.fates} == set(death.ranks)
        and not trained and _OF_MACHINE.search(error) is None
    )  # fmt: skip
    is_exit = death.cause == "exit" and death.line is not None and error == death.what
    return Attempt(
        run=frames.run.root.name, generation=death.generation, cause=death.cause, line=death.line,
        step=death.step, has_trained=trained and death.own_end is None,
        is_hardware=_HARDWARE.search(death.message or "") is not None,
        is_program=death.cause == "mismatch"
        or (raised and (is_wrong or (of_data and not trained))),
        is_of_code=is_exit or ((raised or death.cause == "exit") and (of_data or is_wrong)),
        is_nan=ended_on_nan(death.cause, (death.message, death.source), death.fates),
        growth_bytes_per_step=_growth(frames, death),
        has_saved=any(start.saves for start in frames.run_record().starts),
        hosts=tuple(sorted(host for host in hosts if host is not None)), died_ns=death.died_ns,
        headline=visible(death.headline),
    )  # fmt: skip


def _growth(frames: RunFrames, death: Death) -> float | None:
    """By how much memory grew with each step of a rank that it ran out on, of GPU or host."""
    if not death.final or death.cause != "out_of_memory":
        return None
    of_gpu = [each.growth_bytes_per_step for each in frames.gpu_memory_at_end()]
    of_host = [each.growth_bytes_per_step for each in frames.memory_at_end()]
    return next((growth for growth in of_gpu or of_host if growth is not None), None)


def _earlier_attempts(frames: RunFrames) -> list[Attempt]:
    """Deaths of earlier runs of the same job beside this one; runs that cannot be read are none."""
    own = frames.files.manifest
    if own is None:
        return []
    runs = [r for r in runs_beside(frames.run, own) if r.start_ns < own.start_wall_ns]
    attempts = []
    over = max((run.start_ns for run in runs if run.went_well), default=-1)
    for run in [run for run in runs[-_EARLIER_RUNS:] if run.start_ns > over]:
        with contextlib.suppress(HaiprofError):
            attempts += _attempts(RunFrames(run.folder))
    return attempts


class JobRun(NamedTuple):
    """One run of a job."""

    start_ns: int
    went_well: bool  # Whether it is known to have ended with status 0
    folder: Path


def identity(manifest: Manifest) -> tuple[object, ...]:
    """What all runs of a job have in common.

    `--run-id`; else the script with its arguments, and Slurm's job or, without one, the folder.
    """
    if manifest.options.get("run_id"):
        return manifest.name, manifest.options["run_id"]
    place = manifest.environment.get("slurm_job") or manifest.cwd
    return manifest.name, place, *script_words(manifest.command)


def runs_beside(run: RunPaths, own: Manifest) -> list[JobRun]:
    """The other runs of a run's job in its log directory, oldest first; none that is damaged."""
    found = []
    for folder in run_folders(run.root.parent):
        with contextlib.suppress(HaiprofError):
            if folder.name.startswith(f"{own.name}-") and folder.name != run.root.name:
                other = read_manifest(RunPaths(folder))
                if identity(other) == identity(own):
                    found.append(JobRun(other.start_wall_ns, other.exit_status == 0, folder))
    return sorted(found)


def runs_of_job(run: RunPaths) -> tuple[list[Path], str]:
    """All runs of a run's job, oldest first, and what they have in common, for people."""
    # Where nothing but the command names the job, a run that ended well is the end of it.
    own = read_manifest(run)
    at = JobRun(own.start_wall_ns, own.exit_status == 0, run.root)
    runs = sorted([at, *runs_beside(run, own)])
    if own.options.get("run_id"):
        why = f"--run-id {own.options['run_id']}"
    elif own.environment.get("slurm_job"):
        why = f"job {own.environment['slurm_job']} of Slurm"
    else:
        why = "the same command in the same folder, up to a run that ended well"
        ends = [each.start_ns for each in runs if each.went_well]
        before = max((start for start in ends if start < at.start_ns), default=-1)
        after = min((start for start in ends if start >= at.start_ns), default=1 << 63)
        runs = [each for each in runs if before < each.start_ns <= after]
    return [each.folder for each in runs], why


def job_goodput(runs: Sequence[Path]) -> Goodput:
    """The wall time of a job by account, from its first start to its last end."""
    records = [RunFrames(run).run_record() for run in runs]
    return goodput(sorted(records, key=lambda record: record.start_ns))
