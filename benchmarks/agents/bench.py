"""Scores what an agent finds with haiprof's tools, with torch.profiler alone, with py-spy alone.

    python benchmarks/agents/bench.py                               all 20 jobs, scripted clients
    python benchmarks/agents/bench.py --repeats 1 --seeds 5004,5001
    python benchmarks/agents/bench.py --client 'python mine.py' --name mine --tools haiprof
    python benchmarks/agents/bench.py --client 'python mine.py' --ask FOLDER   no score

tasks.json holds the questions and the truth, from results/faults.json: the first 14 faults from
seed 5000 on that gain 5 % of the step or more, whose pairs agree to 7 points, each of a kind of its
own and without other processes or limits beside it; the first four healthy jobs of which haiprof
said nothing, and the two of which it said something false. clients.py holds the scripted clients
and the protocol of any other, toolsets.py how each tool records a job and what it answers. Each
repeat is a recording of its own. FOLDER holds train.py and logs/, a log directory of haiprof.
A run that was stopped goes on where it was; results are in benchmarks/results/agents.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FAULTS = Path(__file__).parents[1] / "faults"
sys.path.insert(0, str(FAULTS))

import measure  # noqa: E402
import score  # noqa: E402
from clients import SCRIPTED, Cause, Client, Session, external  # noqa: E402
from toolsets import HAIPROF, TOOLSETS, TORCH, Recorded, open_tools  # noqa: E402

TASKS = Path(__file__).with_name("tasks.json")
RESULT = Path(__file__).parents[1] / "results" / "agents.md"
REPEATS = 3
WINDOW_STEP = 22
"""After this one torch.profiler records (profiled.py); a job under load may end before."""


async def ask(toolset: str, folder: Path, question: str, client: Client) -> dict[str, Any]:
    """One question to a client about the recording in a folder."""
    began = time.monotonic()
    async with open_tools(toolset, folder) as (tools, call):
        session = Session(question=question, tools=tools, call_tool=call)
        causes = await client(session)
    return {"causes": causes, "calls": session.calls, "tokens": session.tokens,
            "answer_s": round(time.monotonic() - began, 1)}  # fmt: skip


def leave_out_cores(
    task: Mapping[str, Any], causes: Sequence[Cause], others: float
) -> list[Cause]:  # fmt: skip
    """Without time that others' use of so many cores took: true, as in the fault bench's score."""
    is_fault = "no core" in task.get("cause", {}).get("activities", ())
    if others < score.STRANGERS_CORES or is_fault:
        return list(causes)
    return [each for each in causes if not (each.get("activity") or "").startswith("no core")]


def judge(task: Mapping[str, Any], causes: Sequence[Cause]) -> dict[str, Any]:
    """What an answer is worth.

    `cause`: the first one is of a line at fault, or of its position, activity and rank, or of the
    function (by its first line, which is all that torch.profiler knows); `line`: it names such a
    line (None where the fault has none); `gain`: within 3 points of the true one, or a
    fifth of itself; `false`: causes of 5 % or more on a healthy job, or a first one that is not the
    fault.
    """
    if task["healthy"]:
        large = [each for each in causes if each.get("gain") is None or each["gain"] >= 0.05]
        return {"cause": None, "line": None, "gain": None, "false": len(large)}
    wanted, first = task["cause"], dict(causes[0]) if causes else None
    lines = [_place(line) for line in wanted["lines"]]
    if first is None:
        return {"cause": False, "line": False if lines else None, "gain": False, "false": 0}
    file, number = _place(first.get("line") or "")
    account = {
        "file": file or None, "line": number, "position": first.get("position") or "",
        "activity": first.get("activity") or "", "ranks": first.get("ranks") or [], "finding": {},
    }  # fmt: skip
    truth = score.Truth(
        lines=tuple(lines), positions=tuple(wanted["positions"]), rank=wanted["rank"],
        activities=tuple(wanted["activities"]),
    )  # fmt: skip
    right = score.is_fault(truth, account) or first.get("line") in wanted["functions"]
    gain = first.get("gain")
    return {
        "cause": right, "line": (file, number) in lines if lines else None,
        "gain": right and gain is not None and score.is_kept(gain, task["gain"]),
        "false": int(not right),
    }  # fmt: skip


def _place(line: str) -> tuple[str, int]:
    name, _, number = line.rpartition(":")
    return Path(name).name, int(number) if number.isdigit() else 0


def key(causes: Sequence[Cause]) -> str:
    """What must be the same in each repeat."""
    return f"{causes[0].get('line') or causes[0].get('position')}" if causes else "nothing"


def measured(task: Mapping[str, Any], toolset: str, client: Client, folder: Path) -> dict[str, Any]:
    """Records a job, asks, and judges."""
    from draw import draw
    from run import Drawn  # type: ignore[attr-defined] # of the fault bench

    job = Recorded(Drawn(case=draw(task["seed"])), toolset)
    load = os.getloadavg()[0]
    ran = measure.run(job, folder, measure.AS_DRAWN, recorded=toolset == HAIPROF)
    row = {"seed": task["seed"], "load": round(load, 1), **ran.numbers, "steps": ran.steps}
    if ran.status or not ran.steps:
        return {**row, "broken": (folder / "output.txt").read_text(errors="replace")[-300:]}
    if toolset == TORCH and ran.steps <= WINDOW_STEP:
        return {**row, "broken": f"the profiler's window never opened: {ran.steps} steps"}
    written = [f"train.py:{line}" for line in job.lines]
    if not task["healthy"] and written != task["cause"]["lines"]:
        return {**row, "broken": f"another program was drawn, with its fault at {written}"}
    try:
        answer = asyncio.run(ask(toolset, folder, task["question"], client))
    except Exception as error:  # noqa: BLE001 - a client of others may fail in any way
        return {**row, "broken": f"{type(error).__name__}: {error}"}
    causes = leave_out_cores(task, answer["causes"], ran.numbers["strangers_cores"])
    return {**row, **answer, "causes": causes, **judge(task, causes)}


def summary(tasks: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each client."""
    lines = [
        "| client | cause right | line right | gain right | false claims, faulty | false claims, "
        "healthy | the same in each repeat | tool calls | tokens read |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["client"] for row in rows):
        own = [r for r in rows if r["client"] == name and "broken" not in r]
        faulty = [r for r in own if r["cause"] is not None]
        healthy = [r for r in own if r["cause"] is None]
        count = max(len(own), 1)
        lined = [r["line"] for r in faulty if r["line"] is not None]
        told = [key_set for t in tasks if len(key_set := keys(own, t["seed"])) > 1]
        lines.append(
            f"| {name} | {score.of([r['cause'] for r in faulty])} | {score.of(lined)} | "
            f"{score.of([r['gain'] for r in faulty])} | "
            f"{sum(r['false'] for r in faulty)} of {len(faulty)} | "
            f"{sum(r['false'] > 0 for r in healthy)} of {len(healthy)} | "
            f"{sum(len(set(each)) == 1 for each in told)} of {len(told)} jobs | "
            f"{sum(r['calls'] for r in own) / count:.1f} | "
            f"{sum(r['tokens'] for r in own) / count:,.0f} |"
        )
    return lines


def keys(rows: Iterable[Mapping[str, Any]], seed: int) -> list[str]:
    """What each repeat said first of a job."""
    return [key(row["causes"]) for row in rows if row["seed"] == seed]


def table(tasks: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each job: what each client said, and how often."""
    names = list(dict.fromkeys(row["client"] for row in rows))
    lines = [f"| job | kind | true cause | true gain | {' | '.join(names)} |",
             "|---|---|---|---|" + "---|" * len(names)]  # fmt: skip
    for task in tasks:
        cells = []
        for name in names:
            own = [r for r in rows if r["client"] == name and r["seed"] == task["seed"]]
            said = [_said(task, row) for row in own]
            counts = {text: said.count(text) for text in dict.fromkeys(said)}
            cells.append("; ".join(f"{n}x {text}" for text, n in counts.items()) or "-")
        cause, gain = "none", "-"
        if not task["healthy"]:
            place = task["cause"]["positions"] or task["cause"]["activities"]
            cause = ", ".join(task["cause"]["lines"]) or "/".join(place)
            gain = f"{task['gain']:.0%} ({task['gain_low']:.0%} to {task['gain_high']:.0%})"
        lines.append(
            f"| {task['seed']} | {task['kind']} | {cause} | {gain} | {' | '.join(cells)} |"
        )
    return lines


def _said(task: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    if "broken" in row:
        return "not measured"
    if not row["causes"]:
        return "nothing" + ("" if task["healthy"] else " (missed)")
    first, gain = row["causes"][0], row["causes"][0].get("gain")
    verdict = "false" if row["false"] else "right" if row["cause"] else "small"
    if row["cause"]:
        verdict += ", gain " + ("right" if row["gain"] else "wrong")
    share = "" if gain is None else f" {gain:.0%}"
    return f"{first.get('line') or first.get('position')}{share} ({verdict})"


def report(
    rows: Sequence[Mapping[str, Any]], tasks: Sequence[Mapping[str, Any]], note: str = ""
) -> None:  # fmt: skip
    """Writes the table; the note says what else was special."""
    loads = sorted(row["load"] for row in rows)
    others = sorted(row["strangers_cores"] for row in rows)
    recorded = {row["seed"] for row in rows}
    repeats = max(row["repeat"] for row in rows) + 1
    few = "" if repeats >= REPEATS and len(recorded) == len(tasks) else (
        f" **Not complete**: {len(recorded)} of {len(tasks)} jobs, {repeats} recording(s) of each, "
        "as there was no more time: what is stable is not known.")  # fmt: skip
    text = f"""# What agents find with which tools

    python benchmarks/agents/bench.py

20 jobs of the fault bench, 14 with a known fault and 6 healthy ones.{few} **These clients are \
scripts**: they show what lies on the surface of a tool's answers, not what a model would find \
with them. `haiprof` follows the recipe of `haiprof skill`; `torch.profiler` takes the largest \
self time and its line, `py-spy` the line with most samples, both without lines that run the \
model, its backward or its optimizer, and nothing below 5 %. True gains are those of \
results/faults.json, from pairs of bare runs on another day. Intervals are Wilson's, as if \
recordings of the same job were independent. The load average before a job was {loads[0]} to \
{loads[-1]} (median {loads[len(loads) // 2]}) on {os.cpu_count()} cores, and others used \
{others[0]} to {others[-1]} cores meanwhile (median {others[len(others) // 2]}).
"""
    text += f"\n{note}\n" if note else ""
    lines = [text, *summary(tasks, rows), "", *table(tasks, rows)]
    RESULT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def wait_for_cores(limit_s: float) -> None:
    """Waits so long until others use less than half a core."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        before = measure.cpu_seconds()[0]
        time.sleep(2.0)
        if measure.cpu_seconds()[0] - before < 1.0:
            return


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the chosen jobs, a repeat of all of them after another."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--tools", choices=TOOLSETS, action="append", help="all by default")
    parser.add_argument("--client", help="a command instead of the scripted clients")
    parser.add_argument("--name", help="what that client is called in the table")
    parser.add_argument("--ask", type=Path, help="a folder that holds a recording: no score")
    parser.add_argument("--keep", type=Path, help="rows of jobs that ran, a line each")
    parser.add_argument("--note", default="", help="what the table says of this run besides")
    parser.add_argument("--wait", type=float, default=0, help="s to wait for others to leave")
    parser.add_argument("--stop-after", type=float, default=1e9, help="seconds; no more jobs")
    options = parser.parse_args(arguments)
    toolsets = options.tools or list(TOOLSETS)
    clients = {t: external(options.client) if options.client else SCRIPTED[t] for t in toolsets}
    tasks = json.loads(TASKS.read_text(encoding="utf-8"))
    if options.ask:
        found = asyncio.run(ask(toolsets[0], options.ask.absolute(), tasks[0]["question"],
                                clients[toolsets[0]]))  # fmt: skip
        print(json.dumps(found))
        return
    kept = options.keep or Path(tempfile.gettempdir()) / "haiprof-agents.jsonl"
    rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    began, root = time.monotonic(), Path(tempfile.mkdtemp(prefix="agents-"))
    chosen = [task for task in tasks if not options.seeds or task["seed"] in options.seeds]
    for repeat in range(options.repeats):
        for task in chosen:
            for toolset in toolsets:
                name = f"{options.name or 'external'} with {toolset}" if options.client else toolset
                done = (repeat, task["seed"], name)
                if done in ((r["repeat"], r["seed"], r["client"]) for r in rows):
                    continue
                if time.monotonic() - began > options.stop_after:
                    return
                wait_for_cores(options.wait)
                folder = root / f"{task['seed']}"
                row = measured(task, toolset, clients[toolset], folder)
                row = {"repeat": repeat, "client": name, **row}
                rows.append(row)
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{repeat} {task['seed']} {name}: {_said(task, row)} {row.get('broken', '')}",
                      flush=True)  # fmt: skip
                shutil.rmtree(folder, ignore_errors=True)
                report(rows, tasks, options.note)
    report(rows, tasks, options.note)


if __name__ == "__main__":
    main()
