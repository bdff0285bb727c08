"""A snapshot of a running job: what every rank does now, and who holds the others up."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from haiprof.analysis.lateness import collective_frame
from haiprof.analysis.run import RunFiles, open_run
from haiprof.jobs.ask import Answers, Member, ask, lost_members, members
from haiprof.jobs.closer import Closer, look_closer
from haiprof.jobs.roll_call import roll_call
from haiprof.jobs.stacks import Node, Stack, main_stack, merge, parse_frames
from haiprof.jobs.standstill import (
    GONE,
    Mismatch,
    RankState,
    Suspect,
    mismatched,
    moves,
    saving,
    suspects,
    suspended,
)
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.writer import write_json
from haiprof.samplers.procfs import is_mine, process_state
from haiprof.units import NS_PER_S

ANSWER_S = 3.0
"""A healthy interpreter answers within the agent's tick; others are looked at from outside."""
BETWEEN_LOOKS_S = 1.0
_SPY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What a running job was doing."""

    wall_ns: int
    run: str
    states: tuple[RankState, ...]
    moves: bool | None
    """Whether collectives went on between two looks; null where the job has none."""
    suspended: bool
    """Whether all ranks are stopped by a signal."""
    suspects: tuple[Suspect, ...]
    mismatches: tuple[Mismatch, ...]
    threads: Mapping[int, Sequence[Any]]
    """All threads of each rank, as it answered."""
    saving: tuple[int, ...]
    """Ranks that are saving a checkpoint."""
    closer: tuple[Closer, ...]
    """More of the first suspects."""
    tree: Node
    """The main threads' stacks, merged."""
    notes: tuple[str, ...]
    path: str
    """Where it is kept."""

    def as_json(self) -> dict[str, Any]:
        """The snapshot as plain JSON values."""
        return {
            "version": 1,
            "wall_ns": self.wall_ns,
            "run": self.run,
            "path": self.path,
            "moves": self.moves,
            "suspended": self.suspended,
            "suspects": [asdict(suspect) for suspect in self.suspects],
            "mismatches": [asdict(mismatch) for mismatch in self.mismatches],
            "saving": list(self.saving),
            "closer": [asdict(closer) for closer in self.closer],
            "ranks": [
                {**asdict(state), "threads": list(self.threads.get(state.rank, ()))}
                for state in self.states
            ],
            "tree": self.tree.as_json(),
            "notes": list(self.notes),
        }


def take_snapshot(
    run: RunPaths,
    *,
    hang: bool = False,
    spy: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Snapshot:
    """Asks every rank for its stacks and collectives, and looks at those that do not answer.

    With `hang` and py-spy the first suspects are paused for some hundred milliseconds, for their
    native stacks. Otherwise nobody is: a healthy job is not slowed, as its ranks answer on a thread
    of their own. The list of the last collectives, which holds a rank's interpreter for some ten
    milliseconds, is asked for only when nothing moves, or with `hang`.

    Args:
        run: The running job's run directory.
        hang: Whether the job is known to hang.
        spy: The command py-spy; null looks for it on PATH.
        progress: Is told what is being waited for.

    Raises:
        OSError: The run directory is gone, read-only or full.
    """
    wall_ns = time.time_ns()
    folder = run.snapshots / time.strftime("%Y%m%d-%H%M%S", time.localtime(wall_ns / NS_PER_S))
    progress("asking all ranks what they do")
    stacks = ask(run, "stacks", timeout_s=ANSWER_S)
    able = tuple(m.rank for m in members(run) if m not in stacks.silent)
    first = ask(run, "collectives", timeout_s=ANSWER_S, ranks=able)
    time.sleep(BETWEEN_LOOKS_S)
    second = ask(run, "collectives", timeout_s=ANSWER_S, ranks=able)
    before, after = _groups(first), _groups(second)
    asked = _everybody(run, stacks)
    absent = roll_call(run, asked)
    everybody = [*asked, *absent.late]
    spied, notes = _spy_on(everybody, stacks, spy, progress)
    notes += [absent.note] if absent.note else []
    states = (
        *(_state(m, stacks, before, after, spied, begun=m not in absent.late) for m in everybody),
        *(_lost(m) for m in lost_members(run)),
    )
    standing = hang or moves(states) is False
    if standing and after:
        progress("nothing moves: asking for the last collectives")
        ask(run, "collectives", {"entries": True}, timeout_s=ANSWER_S, ranks=able)
    files = open_run(run.root)
    mismatches = _mismatches(files, wall_ns) if standing else []
    found = suspects(states, mismatches) if standing or moves(states) is None else []
    closer = look_closer(found, states, files, wall_ns=wall_ns, spy=_spy(spy, allowed=hang))
    alive = {state.rank: state.stack for state in states if state.stack is not None}
    snapshot = Snapshot(
        wall_ns=wall_ns,
        run=str(run.root),
        states=states,
        moves=moves(states),
        suspended=suspended(states),
        suspects=tuple(found),
        mismatches=tuple(mismatches),
        threads={m.rank: _threads(stacks, m) for m in everybody},
        saving=saving(states),
        closer=tuple(closer),
        tree=merge(alive),
        notes=tuple(notes),
        path=str(folder / "snapshot.json"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "snapshot.json", snapshot.as_json())
    return snapshot


def _everybody(run: RunPaths, stacks: Answers) -> list[Member]:
    asked = {member.name: member for member in (*members(run), *stacks.silent)}
    return sorted(asked.values(), key=lambda member: member.rank)


def _lost(member: Member) -> RankState:
    return RankState(
        rank=member.rank,
        host=member.host,
        pid=member.pid,
        answered=False,
        process_state=GONE,
        stack=None,
        collectives={},
        before={},
    )


def _groups(answers: Answers) -> dict[str, dict[str, Sequence[int]]]:
    """By rank's name: its groups' sequence numbers, from replies that may hold anything."""
    found: dict[str, dict[str, Sequence[int]]] = {}
    for name, reply in answers.replies.items():
        groups = reply.get("groups")
        if reply.get("state") == "done" and isinstance(groups, dict):
            found[name] = {
                str(group): status
                for group, status in groups.items()
                if isinstance(status, list) and len(status) == 3 and type(status[0]) is int
            }
    return found


def _threads(stacks: Answers, member: Member) -> Sequence[Any]:
    threads = stacks.replies.get(member.name, {}).get("threads")
    return threads if isinstance(threads, list) else ()


def _state(
    member: Member,
    stacks: Answers,
    before: Mapping[str, Mapping[str, Sequence[int]]],
    after: Mapping[str, Mapping[str, Sequence[int]]],
    spied: Mapping[int, Stack],
    *,
    begun: bool,
) -> RankState:
    reply = stacks.replies.get(member.name, {})
    kernel = reply.get("process")
    if member.here and member.pid is not None and is_mine(member.pid):
        kernel = process_state(member.pid)
    letter = kernel.get("state") if isinstance(kernel, dict) else None
    own = main_stack(_threads(stacks, member))
    return RankState(
        rank=member.rank,
        host=member.host,
        pid=member.pid,
        answered=reply.get("state") == "done",
        process_state=letter if isinstance(letter, str) else None,
        stack=own if own is not None else spied.get(member.rank),
        collectives=after.get(member.name, before.get(member.name, {})),
        before=before.get(member.name, {}),
        begun=begun,
    )


def _spy(spy: str | None, *, allowed: bool) -> str | None:
    """The command py-spy, where it is installed and allowed."""
    beside = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return (spy or shutil.which("py-spy", path=beside)) if allowed else None


def _mismatches(files: RunFiles, since_wall_ns: int) -> list[Mismatch]:
    """Contradictions among the collectives that the ranks wrote down just now."""
    frame, _ = collective_frame(files, since_wall_ns=since_wall_ns)
    return mismatched(frame)


def _spy_on(
    everybody: Sequence[Member],
    stacks: Answers,
    spy: str | None,
    progress: Callable[[str], None],
) -> tuple[dict[int, Stack], list[str]]:
    """Stacks, from outside, of the ranks of this node that did not answer; and why not, if not."""
    mute = [m for m in everybody if stacks.replies.get(m.name, {}).get("state") != "done"]
    found: dict[int, Stack] = {}
    notes = [f"rank {m.rank} on {m.host} did not answer" for m in mute if m.host and not m.here]
    here = [m for m in mute if m.here and m.pid is not None and is_mine(m.pid)]
    command = _spy(spy, allowed=True)
    for member in here:
        if command is None:
            notes.append(
                f"rank {member.rank} did not answer, and py-spy, which could look at it from "
                "outside, is not installed (pip install py-spy)"
            )
            continue
        progress(f"looking at rank {member.rank} from outside")
        stack = _spied(command, member.pid or 0)
        if isinstance(stack, str):
            notes.append(f"rank {member.rank} did not answer; py-spy: {stack}")
        else:
            found[member.rank] = stack
    return found, notes


def _spied(command: str, pid: int) -> Stack | str:
    """The main thread's stack by py-spy, without pausing the process; or what py-spy said."""
    try:
        done = subprocess.run(
            [command, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            capture_output=True, text=True, timeout=_SPY_TIMEOUT_S, check=False,
        )  # fmt: skip
        threads = json.loads(done.stdout) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return str(error)
    if not isinstance(threads, list):
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]
    main = [t for t in threads if isinstance(t, dict) and t.get("thread_name") == "MainThread"]
    for thread in main or threads[:1]:
        frames = [
            [frame.get("filename"), frame.get("line"), frame.get("name")]
            for frame in thread.get("frames", [])
        ]
        stack = parse_frames(frames[::-1])
        if stack is not None:
            return stack
    return "an answer that is no stack"


def snapshot_folders(run: RunPaths) -> list[Path]:
    """The snapshots of a run, oldest first."""
    return sorted(path.parent for path in run.snapshots.glob("*/snapshot.json"))
