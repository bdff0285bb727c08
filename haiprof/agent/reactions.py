"""Automatic reactions: a snapshot when no step ends, a trace when steps become slower."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from haiprof.agent.notifications import Notifier, find_grown_accounts
from haiprof.agent.step_watch import Alarm, Node, Watch
from haiprof.base.code_places import parse_frames, stack_text
from haiprof.base.messages import print_message
from haiprof.base.options import Options
from haiprof.base.safe_files import create_file, make_private
from haiprof.base.subcommand import end_child
from haiprof.base.units import duration_text
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import parse_object
from haiprof.run_format.writer import append_line

LOOK_S = 2.0
PAUSE_S = 300.0  # minimum time between two reactions of a kind, over all nodes
TRACE_STEPS = 5
LIMIT_S = 600.0
_RESULT_LIMIT_BYTES = 1 << 24
NOTIFIED_TIMES = 20  # hangs, and slow-downs, that `--notify` tells of, where fewer are looked into
_MOST_SUSPECTS = 8
_KEPT = ("rank", "reason", "doing", "certain")

Start = Callable[[str, Sequence[str], int], "subprocess.Popen[bytes]"]
"""Starts a haiprof command on the run, with its arguments, and a file as its output."""


@dataclass(slots=True)
class _Action:
    """A running command."""

    name: str
    alarm: Alarm
    command: str
    process: subprocess.Popen[bytes]
    result: Path
    deadline_s: float


@dataclass
class Reactor:
    """Watches the ranks of one node, and starts a snapshot or trace of the run when needed."""

    run: RunPaths
    host: str
    options: Options
    start: Start
    watch: Watch
    notifier: Notifier | None = None
    _told_hang: Alarm | None = None
    _action: _Action | None = None
    _look_at: float = 0.0

    def tick(self, node: Node) -> None:
        """Looks every two seconds."""
        now, action = time.monotonic(), self._action
        if action is not None and action.process.poll() is not None:
            self._action = None
            self._finish(action)
        elif action is not None and now > action.deadline_s:
            action.process.kill()  # it is collected at the next tick
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        for alarm in self.watch.look(node):
            self._react(alarm)
        self._tell_hang_end(node)
        while self.watch.suspensions:
            begin, end, seen = self.watch.suspensions.pop(0)
            line = {"type": "job_suspended", "time_ns": end, "gap_ns": end - begin, "seen": seen}
            self._append(line)

    def close(self) -> None:
        """Ends running commands when the job is over."""
        action, self._action = self._action, None
        if action is None:
            return
        if action.process.poll() is None:
            end_child(action.process)
            self._note_result(action, {"state": "failed", "reason": "the job ended before"})
        else:
            self._finish(action)

    def _react(self, alarm: Alarm) -> None:
        if (claim := self._claim(alarm)) is None:
            return
        fd, path = claim
        is_looked_into = int(path.stem.rpartition("-")[2]) < self.options.react_times
        kind = "trace" if alarm.trigger == "slow" else "snapshot"
        command = None
        if is_looked_into and self._action is None and self.options.react in (kind, "both"):
            command = "trace-now" if kind == "trace" else "snapshot"
        try:
            wall_ns, mono_ns = time.time_ns(), time.monotonic_ns()
            self._append({
                "type": "reaction", "name": path.stem, "time_ns": mono_ns, "wall_ns": wall_ns,
                "trigger": alarm.trigger, "rank": alarm.rank, "step": alarm.step,
                "since_wall_ns": wall_ns - mono_ns + alarm.since_mono_ns, "reason": alarm.reason,
                **alarm.numbers, "action": command or "none",
            })  # fmt: skip
            if not self.options.quiet and command != "snapshot":
                print_message(
                    f"{alarm.reason}; tracing {self._steps} steps" if command else alarm.reason
                )
            if command is not None:
                self._begin(path, alarm, command, fd)
            if alarm.trigger == "slow" or self._action is None or self._action.alarm is not alarm:
                self._tell(alarm, alarm.reason)
        finally:
            os.close(fd)

    @property
    def _steps(self) -> int:
        return self.options.trace_steps or TRACE_STEPS

    def _begin(self, path: Path, alarm: Alarm, command: str, fd: int) -> None:
        words = ["--json"]
        if command == "trace-now":
            words += ["--steps", str(self._steps), *self.options.trace_now_words()]
        try:
            process = self.start(command, words, fd)
        except (OSError, subprocess.SubprocessError) as error:
            failed = {"state": "failed", "reason": str(error)}
            self._append({"type": "reaction_result", "name": path.stem, **failed})
            return
        self._action = _Action(path.stem, alarm, command, process, path, time.monotonic() + LIMIT_S)

    def _claim(self, alarm: Alarm) -> tuple[int, Path] | None:
        """The file of the next reaction of this kind; None if it is too early, or one too many."""
        # Nodes share the number of reactions: the node that creates a reaction's file in the run
        # directory carries it out.
        with contextlib.suppress(OSError):  # full disk: its result could not be stored either
            make_private(self.run.control, below=self.run.root)
            notified = 0 if self.notifier is None else NOTIFIED_TIMES
            for number in range(max(self.options.react_times, notified)):
                path = self.run.control_reaction(alarm.trigger, number)
                try:
                    fd = create_file(path, below=self.run.root, mode=0o600)
                except FileExistsError:
                    if time.time() - path.stat().st_mtime < PAUSE_S:
                        return None  # another node was faster
                    continue
                return fd, path
        return None

    def _finish(self, action: _Action) -> None:
        found = None
        with contextlib.suppress(OSError), action.result.open("rb") as file:
            found = parse_object(file.read(_RESULT_LIMIT_BYTES))
        if found is None:
            status = action.process.returncode
            reason = f"haiprof {action.command} ended with status {status}"
            if status in (-signal.SIGINT, 128 + signal.SIGINT):
                reason = "Ctrl-C came before it was done"
            content: dict[str, Any] = {"state": "failed", "reason": reason}
        elif action.command == "snapshot":
            content = _of_snapshot(found)
        else:
            done = [rank for rank in found.get("ranks", ()) if rank.get("state") == "done"]
            steps = done[0].get("steps") if done else None
            counts = {"window": found.get("window"), "rank_count": len(done), "steps": steps}
            content = {"state": "done", **counts}
        self._note_result(action, content)

    def _note_result(self, action: _Action, content: Mapping[str, Any]) -> None:
        line = {"type": "reaction_result", "name": action.name, "wall_ns": time.time_ns()}
        self._append({**line, **content})
        if action.alarm.trigger == "hang":
            found = f": {_snapshot_text(content)}" if content["state"] == "done" else ""
            self._tell(action.alarm, action.alarm.reason + found, snapshot=content.get("path"))
        if self.options.quiet or content["state"] != "done":
            return
        if action.command == "snapshot":
            print_message(
                f"{action.alarm.reason}: {_snapshot_text(content)}; see {content['path']}"
            )
        else:
            print_message(
                f"traced {content['rank_count']} ranks: haiprof trace report {self.run.root} "
                f"--window {content['window']}"
            )

    def _tell(self, alarm: Alarm, text: str, **details: object) -> None:
        """Notifies of an alarm: a hang with its snapshot, slower steps with what grew in them."""
        if self.notifier is None:
            return
        step = alarm.step
        complete = None
        if alarm.trigger == "hang":
            self._told_hang = alarm
        elif step is not None:
            complete = partial(find_grown_accounts, self.start, step)
        self.notifier.send(
            alarm.trigger, text, complete, rank=alarm.rank, step=step, **alarm.numbers, **details
        )

    def _tell_hang_end(self, node: Node) -> None:
        alarm = self._told_hang
        if alarm is None or self.notifier is None or self.watch.is_hanging:
            return
        lives = bool(node.live_ranks())
        if lives and not self.watch.has_gone_on:
            return
        self._told_hang = None
        lasted = duration_text(time.monotonic_ns() - alarm.since_mono_ns)
        how = f"after {lasted}: steps go on" if lives else "as its ranks have ended"
        self.notifier.send("hang_end", f"the hang is over {how}", steps_go_on=lives)

    def _append(self, line: Mapping[str, object]) -> None:
        append_line(self.run.node(self.host).events, line)


def _of_snapshot(found: Mapping[str, Any]) -> dict[str, Any]:
    """The ranks that held the job up, without those that save a checkpoint or wait for one."""
    if not (ranks := found.get("ranks")):
        return {"state": "failed", "reason": "the ranks had ended before they were asked"}
    saving = found.get("saving") or []
    suspects = [{key: suspect.get(key) for key in _KEPT} for suspect in found.get("suspects", ())]
    if not suspects and not saving:
        suspects = _only_rank(ranks)
    if all(suspect["rank"] in saving for suspect in suspects):
        suspects = []
    return {
        "state": "done", "path": found.get("path"), "moves": found.get("moves"), "saving": saving,
        "suspects": suspects[:_MOST_SUSPECTS],
        "all_at": None if suspects or saving else _common_line(ranks),
    }  # fmt: skip


def _common_line(ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Where all of several ranks are; None where their lines differ or one is not known."""
    stacks = [parse_frames(rank.get("stack")) for rank in ranks]
    if len(stacks) < 2 or not stacks[0] or any(stack != stacks[0] for stack in stacks):
        return None
    return stack_text(stacks[0])


def _only_rank(ranks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The only rank of a job, which stands still: nobody else holds it up."""
    if len(ranks) != 1:
        return []
    only = ranks[0]
    frames = parse_frames(only.get("stack")) or ()
    if not frames or only.get("process_state") in ("T", "t"):
        return []
    doing, beside = stack_text(frames), only.get("worker") or only.get("beside")
    return [{
        "rank": only.get("rank"), "reason": "it is the only rank, and no step of it ends",
        "doing": f"{doing}; {beside}" if isinstance(beside, str) and beside else doing,
        "certain": True,
    }]  # fmt: skip


def _snapshot_text(content: Mapping[str, Any]) -> str:
    suspects: list[dict[str, Any]] = content["suspects"]
    if suspects:
        first = suspects[0]
        if sum(suspect["reason"] == first["reason"] for suspect in suspects) > 1:
            return f"ranks contradict each other: {first['reason']}"
        verb = "holds the job up" if first["certain"] else "does something different from the rest"
        doing = f"; it is at {first['doing']}" if first["doing"] else ""
        return f"rank {first['rank']} {verb}: {first['reason']}{doing}"
    if content["saving"]:
        return f"a checkpoint is being saved (rank {content['saving'][0]})"
    if content["moves"]:
        return "collectives go on"
    where = f": all are at {content['all_at']}" if content["all_at"] else ""
    return f"no rank differs from the others{where}"
