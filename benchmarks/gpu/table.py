"""gpu-check.md: what was expected, what was measured, and what came of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.bench import Item, value_text

MARKS = {"pass": "pass", "fail": "**FAIL**", "differs": "differs", "skipped": "skipped",
         "missing": "**no value**", "fake": "measured"}  # fmt: skip


def judge(item: Item, result: Mapping[str, Any], *, fake: bool) -> list[dict[str, Any]]:
    """One row per figure that was expected."""
    rows = []
    for expect in item.expects:
        value = result["figures"].get(expect.figure)
        reason = result["skipped"].get(expect.figure)
        if expect.figure in result["figures"] and value is not None:
            if fake and expect.kind != "must":
                outcome = "fake"
            elif expect.holds(value):
                outcome = "pass"
            else:
                outcome = "differs" if expect.kind == "published" else "fail"
        elif reason is not None:
            outcome = "skipped"
        else:
            outcome, reason = "missing", result["reason"] or "the item did not tell"
        rows.append(
            {"figure": expect.figure, "words": expect.words, "expected": expect.text(),
             "measured": value, "unit": expect.unit, "outcome": outcome, "reason": reason,
             "source": expect.source}
        )  # fmt: skip
    return rows


def markdown(content: Mapping[str, Any]) -> str:
    """All of it."""
    items: Sequence[Mapping[str, Any]] = content["items"]
    outcomes = Counter(row["outcome"] for item in items for row in item["rows"])
    bad = [item for item in items if item["state"] not in ("done", "not reached")]
    lines = ["# gpu-check", "", *_head(content["machine"]), ""]
    lines += [", ".join(f"{n} {word}" for word, n in sorted(outcomes.items())) + ".", ""]
    lines += [f"- {item['name']}: {item['state']}: {item['reason']}" for item in bad]
    for item in items:
        took = f" ({item['seconds']:.0f} s)" if item["seconds"] else ""
        lines += ["", f"## {item['name']}{took}", "", item["question"]]
        if item["state"] != "done":
            lines += ["", f"{item['state']}: {item['reason']}"]
        if item["state"] != "not reached":
            lines += ["", "| | expected | measured | | source |", "|---|---|---|---|---|"]
            lines += [_row(row) for row in item["rows"]]
    return "\n".join(lines) + "\n"


def _head(machine: Mapping[str, Any]) -> list[str]:
    words = [f"{name}: {value}" for name, value in machine.items() if value not in (None, "")]
    simulated = "**Simulated: nothing here is a measurement.** " if machine.get("fake") else ""
    return [simulated + "; ".join(words)]


def _row(row: Mapping[str, Any]) -> str:
    measured = (
        row["reason"] if row["measured"] is None else value_text(row["measured"], row["unit"])
    )
    cells = (row["words"], row["expected"], measured, MARKS[row["outcome"]], row["source"])
    return (
        "| " + " | ".join(str(c).replace("|", "/").replace("\n", " ")[:300] for c in cells) + " |"
    )
