"""Writes tasks.json: 20 jobs of the fault bench as questions, with what is true of each.

    python benchmarks/agents/tasks.py

Faults: the first 14 from seed 5000 on whose true gain is 5 % of the step or more and whose pairs
agree to 7 points (results/faults.json), each of a kind of its own, and none that needs other
processes or limits beside it. Healthy: the first four of which haiprof said nothing, and the two of
which it said something false. Lines are those of the program that the bench writes for a seed.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FAULTS = Path(__file__).parents[1] / "faults"
sys.path.insert(0, str(FAULTS))

from draw import Case, Work, draw, faulty_lines, write_job  # noqa: E402

TASKS = Path(__file__).with_name("tasks.json")
RESULTS = Path(__file__).parents[1] / "results" / "faults.json"
FAULTY, SILENT, LEAST_GAIN, MOST_SPREAD = 14, 4, 0.05, 0.07
SCORED = ("right", "right, another", "listed", "missed")
ANY_WORK = Work(1, 0.02, 10_000, 1e6)
"""It changes numbers in a program, and no line."""
QUESTIONS = (
    "My training ({job}) feels slow. Is there something that I should change, at which line, and "
    "how much shorter would the mean step be?",
    "Why does a step of this job ({job}) take as long as it does? Name the one thing that is worth "
    "changing, if there is one, its line, and the share of the step that it costs.",
    "We pay for this machine by the hour. What wastes the most time in this job ({job}), at which "
    "line, and how much of a step is it? Say so if nothing does.",
    "Find the bottleneck of this run ({job}): the cause, its line, and the gain that you expect. "
    "Do not guess.",
)


def choose() -> Iterator[dict[str, Any]]:
    """Rows of results/faults.json that become tasks."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    drawn = [row for row in rows if row["id"].isdigit()]
    kinds: set[str] = set()
    for row in (row for row in drawn if row["fault"] and row["outcome"] in SCORED):
        truth, kind = row["truth"], draw(int(row["id"])).kind
        sure = truth["gain"] >= LEAST_GAIN and truth["spread"] <= MOST_SPREAD
        if sure and not kind.under and not kind.beside and kind.name not in kinds:
            kinds.add(kind.name)
            if len(kinds) <= FAULTY:
                yield row
    healthy = [row for row in drawn if not row["fault"]]
    yield from [row for row in healthy if row["outcome"] == "silent"][:SILENT]
    yield from (row for row in healthy if row["outcome"] == "false")


def task(row: dict[str, Any], number: int) -> dict[str, Any]:
    """One task: the seed, the question, the truth."""
    case = draw(int(row["id"]))
    workers = f", {case.workers} loader workers a rank" if case.workers else ""
    job = f"a small {case.family}, {case.style} loop, {case.ranks} rank(s) on CPUs{workers}"
    found = {
        "seed": case.seed, "kind": case.kind.name, "healthy": case.kind.healthy,
        "question": QUESTIONS[number % len(QUESTIONS)].format(job=job),
    }  # fmt: skip
    if case.kind.healthy:
        return found | {"must_not_claim": "a cause that costs 5 % of the step or more"}
    truth = row["truth"]
    ends = [round(truth["gain"] + sign * truth["spread"] / 2, 4) for sign in (-1, 1)]
    return found | {
        "cause": {**lines(case), "positions": case.kind.positions,
                  "activities": case.kind.activities, "rank": case.rank},
        "gain": truth["gain"], "gain_low": ends[0], "gain_high": ends[1],
    }  # fmt: skip


def lines(case: Case) -> dict[str, list[str]]:
    """`train.py:235`: the lines at fault, and the first lines of the functions that hold them."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        write_job(case, script, ANY_WORK)
        faulty = faulty_lines(script)
        nodes = ast.walk(ast.parse(script.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    holding = [f for f in functions if any(f.lineno <= n <= (f.end_lineno or 0) for n in faulty)]
    first = sorted(holding, key=lambda each: each.lineno)[-1:]
    return {"lines": [f"train.py:{line}" for line in faulty],
            "functions": [f"train.py:{each.lineno}" for each in first]}  # fmt: skip


def main() -> None:
    """Writes the file, a task a line."""
    found = [json.dumps(task(row, number)) for number, row in enumerate(choose())]
    TASKS.write_text("[\n" + ",\n".join(found) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
