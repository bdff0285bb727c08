"""A snapshot of a running job: what every rank does now, and which rank blocks the others."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import polars as pl

from haiprof.base.code_places import Stack, frame_text, is_library, own_frame, parse_frames
from haiprof.base.errors import MissingDataError
from haiprof.base.safe_files import make_folder
from haiprof.base.units import NS_PER_S
from haiprof.linux.processes import ProcessTree
from haiprof.linux.procfs import is_mine, process_state
from haiprof.live.external_sampling import dump_threads, find_spy
from haiprof.live.find import (
    Answers,
    Member,
    Progress,
    ask,
    find_missing_ranks,
    lost_members,
    members,
)
from haiprof.live.standstill import (
    GONE,
    STOPPED,
    GroupStatus,
    Node,
    RankState,
    Suspect,
    file_suspects,
    find_address,
    is_suspended,
    main_stack,
    merge,
    moves,
    other_threads,
    ras_suspects,
    saving,
    suspects,
)
from haiprof.run_analysis.collectives import Mismatch, collective_frame, find_mismatches
from haiprof.run_analysis.counters import counter_frame
from haiprof.run_analysis.nccl_witness import files_of_run
from haiprof.run_analysis.process_ends import workers_last_at
from haiprof.run_analysis.run_files import RunFiles, integer, objects, open_run
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.writer import write_json

LOOKED_AT = 2  # Maximum number of suspects: each is paused for its native stack
RECENT_NS = 60 * NS_PER_S
_FRAME_LIMIT = 100
_GPU_METRICS = (
    "utilization_ratio", "memory_used_bytes", "power_watts", "temperature_celsius",
    "sm_clock_hz", "sm_active_ratio",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SuspectDetails:
    """Details of one suspect."""

    rank: int
    native: tuple[str, ...] | None
    """Main thread, outermost first, with the frames of C and C++; None where `note` says why."""
    note: str | None
    gpu: Mapping[str, float]  # Latest counters of its GPU; empty where none were recorded
    xids: tuple[int, ...]  # Codes of its GPU's XID errors since the run began


def inspect_suspects(
    suspects: Sequence[Suspect], states: Sequence[RankState], run: RunFiles, *, wall_ns: int,
    spy: str | None,
) -> list[SuspectDetails]:  # fmt: skip
    """Reads native stacks and GPU counters of the first suspects."""
    by_rank = {state.rank: state for state in states}
    found = []
    for state in [by_rank[s.rank] for s in suspects[:LOOKED_AT] if s.rank in by_rank]:
        native = _native_stack(spy, state)
        gpu, counters = _gpu(state, run, wall_ns)
        nodes = [node for node in run.nodes if node.host == state.host]
        lines = [line for node in nodes for line in node.of_type("xid") if line.get("gpu") == gpu]
        codes = [integer(line.get("xid")) for line in lines if gpu is not None]
        stack, note = (None, native) if isinstance(native, str) else (native, None)
        found.append(SuspectDetails(
            rank=state.rank, native=stack, note=note, gpu=counters,
            xids=tuple(code for code in codes if code is not None),
        ))  # fmt: skip
    return found


def _native_stack(spy: str | None, state: RankState) -> tuple[str, ...] | str:
    """The stack, or why there is none."""
    if spy is None:
        return "only with --hang, and where py-spy is installed"
    if state.pid is None or state.host != socket.gethostname() or not is_mine(state.pid):
        return "it does not run on this node"
    if state.process_state in STOPPED:
        return "its process is stopped"
    threads = dump_threads(spy, state.pid, "--native")
    if isinstance(threads, str):
        return f"py-spy: {threads}"
    main = next((each for each in threads if each.get("thread_name") == "MainThread"), {})
    found = []
    for frame in objects(main.get("frames"))[:_FRAME_LIMIT][::-1]:  # native ones may have no line
        file = frame.get("short_filename") or frame.get("filename") or "?"
        line = f":{frame.get('line')}" if frame.get("line") else ""
        found.append(f"{frame.get('name')} ({str(file).rpartition('/')[2]}{line})")
    return tuple(found) or "py-spy: an answer without a main thread"


def _gpu(state: RankState, run: RunFiles, wall_ns: int) -> tuple[int | None, dict[str, float]]:
    """NVML index of the GPU that this rank alone uses, and its latest counters."""
    if state.host is None:
        return None, {}
    frame = counter_frame(
        run, between=(wall_ns - RECENT_NS, wall_ns), hosts=[state.host],
        metrics=[("gpu", metric) for metric in _GPU_METRICS],
    )  # fmt: skip
    own = frame.filter((pl.col("rank") == state.rank) & pl.col("value").is_not_null())
    last = own.sort("time_ns").group_by("metric", maintain_order=True).last()
    index = integer(own["gpu"][-1]) if own.height else None
    return index, {str(m): float(v) for m, v in last.select("metric", "value").rows()}


ANSWER_S = 3.0
"""A healthy interpreter answers within the agent's tick; others are sampled from outside."""
BETWEEN_LOOKS_S = 1.0
_LOADER = "torch/utils/data/dataloader.py"
_WORKER = "torch/utils/data/_utils/worker.py"
_WORKERS_LOOKED_AT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a running job was doing at one time."""

    wall_ns: int
    run: str
    states: tuple[RankState, ...]
    moves: bool | None  # Whether collectives went on between two looks; None where the job has none
    suspended: bool  # Whether all ranks are stopped by a signal
    suspects: tuple[Suspect, ...]
    mismatches: tuple[Mismatch, ...]
    threads: Mapping[int, Sequence[Any]]  # All threads of each rank, from its answer
    saving: tuple[int, ...]  # Ranks that are saving a checkpoint
    details: tuple[SuspectDetails, ...]  # Details of the first suspects; `closer` in the JSON
    tree: Node  # The main threads' stacks, merged
    notes: tuple[str, ...]
    path: str  # Its file

    def as_json(self) -> dict[str, Any]:
        """The snapshot as plain JSON values."""
        plain = ("wall_ns", "run", "path", "moves", "suspended")
        ranks = [{**asdict(state), "threads": list(self.threads.get(state.rank, ()))}
                 for state in self.states]  # fmt: skip
        return {
            "version": 1, **{name: getattr(self, name) for name in plain},
            "suspects": [asdict(suspect) for suspect in self.suspects],
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
            "saving": list(self.saving),
            "closer": [asdict(details) for details in self.details],
            "ranks": ranks, "tree": self.tree.as_json(), "notes": list(self.notes),
        }  # fmt: skip


def take_snapshot(
    run: RunPaths, *, hang: bool = False, progress: Progress = lambda _: None
) -> Snapshot:
    """Asks every rank for its stacks and collectives, and looks at those that do not answer.

    With `hang` and py-spy the first suspects are paused for some hundred milliseconds, for their
    native stacks. Otherwise no process is: ranks answer on a thread of their own. The list of the
    last collectives, which holds a rank's interpreter for some ten milliseconds, is asked for only
    when nothing moves, or with `hang`.
    """
    wall_ns = time.time_ns()
    spy = find_spy()
    folder = run.snapshots / time.strftime("%Y%m%d-%H%M%S", time.localtime(wall_ns / NS_PER_S))
    progress("asking all ranks what they do")
    began = members(run)
    stacks = ask(run, "stacks", timeout_s=ANSWER_S)
    able = tuple(m.rank for m in members(run) if m not in stacks.silent)
    first = ask(run, "collectives", timeout_s=ANSWER_S, ranks=able)
    time.sleep(BETWEEN_LOOKS_S)
    second = ask(run, "collectives", timeout_s=ANSWER_S, ranks=able)
    before, after = _groups(first), _groups(second)
    answered = [m for m in began if stacks.replies.get(m.name, {}).get("state") == "done"]
    by_name = {m.name: m for m in (*answered, *members(run), *stacks.silent)}  # some ended since
    asked = sorted(by_name.values(), key=lambda member: member.rank)
    absent = find_missing_ranks(run, asked)
    everybody = [*asked, *absent.late]
    spied, notes = _sample_silent(everybody, stacks, spy, progress)
    notes += [absent.note] if absent.note else []
    lost = [m for m in lost_members(run) if m.name not in by_name]
    states = [
        *(_state(m, stacks, before, after, spied, begun=m not in absent.late) for m in everybody),
        *(RankState(rank=m.rank, host=m.host, pid=m.pid, process_state=GONE) for m in lost),
    ]
    states = [_with_worker(run, state, spy, progress) for state in states]
    standing = hang or moves(states) is False
    if standing and after:
        progress(f"{'' if hang else 'nothing moves: '}asking for the last collectives")
        ask(run, "collectives", {"entries": True}, timeout_s=ANSWER_S, ranks=able)
    files = open_run(run.root)
    mismatches = []
    if standing:  # contradictions among the collectives that the ranks have just written
        mismatches = find_mismatches(collective_frame(files, since_ns=wall_ns)[0])
    found = suspects(states, mismatches) if standing or moves(states) is None else []
    if moves(states) is None and not any(suspect.certain for suspect in found):
        by_nccl, said = _ask_nccl(states, files, progress)
        named = {suspect.rank for suspect in by_nccl}
        found = [*by_nccl, *(suspect for suspect in found if suspect.rank not in named)]
        notes += said
    details = inspect_suspects(found, states, files, wall_ns=wall_ns, spy=spy if hang else None)
    alive = {state.rank: state.stack for state in states if state.stack is not None}
    snapshot = Snapshot(
        wall_ns=wall_ns, run=str(run.root), states=tuple(states), moves=moves(states),
        suspended=is_suspended(states), suspects=tuple(found), mismatches=tuple(mismatches),
        threads={m.rank: _threads(stacks, m) for m in everybody}, saving=saving(states),
        details=tuple(details), tree=merge(alive), notes=tuple(notes),
        path=str(folder / "snapshot.json"),
    )  # fmt: skip
    make_folder(folder, below=run.root)
    write_json(folder / "snapshot.json", snapshot.as_json(), below=run.root)
    return snapshot


def _ask_nccl(
    states: Sequence[RankState], files: RunFiles, progress: Progress
) -> tuple[list[Suspect], list[str]]:
    """Where the Flight Recorder tells nothing: whom NCCL names, by RAS, else by its files.

    And why nobody.
    """
    if len(states) < 2:
        return [], []
    said: list[str] = []
    if (address := find_address(files)) is not None:
        progress("the Flight Recorder tells nothing: asking NCCL's RAS")
        try:
            return ras_suspects(states, address), []
        except MissingDataError as error:
            said.append(str(error))
    if not files_of_run(files)[0]:
        return [], said
    progress("the Flight Recorder tells nothing: reading NCCL's files")
    try:
        found, notes = file_suspects(states, files)
    except MissingDataError as error:
        return [], [*said, str(error)]
    return found, [*said, *notes]


def _groups(answers: Answers) -> dict[str, GroupStatus]:
    """By rank's name: its groups' sequence numbers, from replies that may hold anything."""
    done = {n: r.get("groups") for n, r in answers.replies.items() if r.get("state") == "done"}
    return {
        name: {str(group): status for group, status in groups.items()
               if isinstance(status, list) and len(status) == 3 and type(status[0]) is int}
        for name, groups in done.items() if isinstance(groups, dict)
    }  # fmt: skip


def _threads(stacks: Answers, member: Member) -> Sequence[Any]:
    threads = stacks.replies.get(member.name, {}).get("threads")
    return threads if isinstance(threads, list) else ()


def _state(
    member: Member, stacks: Answers, before: Mapping[str, GroupStatus],
    after: Mapping[str, GroupStatus], spied: Mapping[int, Stack], *, begun: bool,
) -> RankState:  # fmt: skip
    reply = stacks.replies.get(member.name, {})
    kernel = reply.get("process")
    if member.here and member.pid is not None and is_mine(member.pid):
        kernel = process_state(member.pid)
    letter = kernel.get("state") if isinstance(kernel, dict) else None
    threads = _threads(stacks, member)
    own = main_stack(threads)
    earlier = before.get(member.name, {})
    return RankState(
        rank=member.rank, host=member.host, pid=member.pid, begun=begun, before=earlier,
        answered=reply.get("state") == "done",
        process_state=letter if isinstance(letter, str) else None,
        stack=own if own is not None else spied.get(member.rank),
        collectives=after.get(member.name, earlier), beside=other_threads(threads),
    )  # fmt: skip


def _sample_silent(
    everybody: Sequence[Member], stacks: Answers, spy: str | None, progress: Progress
) -> tuple[dict[int, Stack], list[str]]:
    """Stacks, from outside, of the ranks of this node that did not answer; and why not, if not."""
    mute = [m for m in everybody if stacks.replies.get(m.name, {}).get("state") != "done"]
    found: dict[int, Stack] = {}
    notes = [f"rank {m.rank} on {m.host} did not answer" for m in mute if m.host and not m.here]
    for pid, rank in [(m.pid, m.rank) for m in mute if m.here and m.pid and is_mine(m.pid)]:
        if spy is None:
            notes.append(
                f"rank {rank} did not answer, and py-spy, which could look at it from outside, is "
                "not installed (pip install 'haiprof[attach]')"
            )
            continue
        progress(f"looking at rank {rank} from outside")
        stack = _run_spy(spy, pid)
        if isinstance(stack, str):
            notes.append(f"rank {rank} did not answer; py-spy: {stack}")
        else:
            found[rank] = stack
    return found, notes


def _with_worker(run: RunPaths, state: RankState, spy: str | None, progress: Progress) -> RankState:
    """A rank that waits for a batch, with what its DataLoader workers do: as sampled, or py-spy."""
    waits = any(_LOADER in file and "get" in function for file, _, function in state.stack or ())
    if not waits or state.pid is None:
        return state
    attempts = [paths for rank, _, paths in run.rank_folders() if rank == state.rank]
    found = workers_last_at(attempts[-1]) if attempts else {}
    if not found and spy is not None and is_mine(state.pid):
        progress(f"looking at the DataLoader workers of rank {state.rank}")
        for pid in ProcessTree().refresh().children.get(state.pid, ())[:_WORKERS_LOOKED_AT]:
            stack = _run_spy(spy, pid)
            if not isinstance(stack, str) and any(_WORKER in file for file, _, _ in stack):
                found[pid] = stack
    for pid, stack in found.items():
        own = own_frame(stack)
        if own is not None and not is_library(own[0], own[2]):
            worker = f"its DataLoader worker (pid {pid}) is at {frame_text(own)}"
            return replace(state, worker=worker)
    return state


def _run_spy(command: str, pid: int) -> Stack | str:
    """The main thread's stack by py-spy, without pausing the process; or py-spy's error."""
    known = dump_threads(command, pid, "--nonblocking")
    if isinstance(known, str):
        return known
    main = [thread for thread in known if thread.get("thread_name") == "MainThread"]
    for thread in main or known[:1]:
        inner_first = objects(thread.get("frames"))
        frames = [[f.get("filename"), f.get("line"), f.get("name")] for f in inner_first]
        if (stack := parse_frames(frames[::-1])) is not None:
            return stack
    return "an answer that is no stack"
