"""Cards of jobs that the bench ran and kept, each with its true gain beside what was promised.

python benchmarks/faults/run.py --seeds 5062 --keep /tmp/runs
python benchmarks/faults/cards.py /tmp/runs 5062 mnist+fault > benchmarks/results/cards.md
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from run import reported


def card(row: dict[str, Any], logs: Path) -> str:
    """One job: what is wrong with it, what it gained, and what haiprof said."""
    line = [sys.executable, "-m", "haiprof", "verdict", str(logs)]
    said = subprocess.run(line, capture_output=True, text=True, check=True).stdout
    truth = row.get("truth") or {}
    gain = f"; the true gain is {truth['gain']:.1%} of the step" if "gain" in truth else ""
    pairs = [f"{before:.1f} to {after:.1f}" for before, after in
             zip(truth.get("before_ms", []), truth.get("after_ms", []), strict=True)]  # fmt: skip
    measured = f" (bare runs in turn: {', '.join(pairs)} ms a step)" if pairs else ""
    wrong = row["kind"] if row["fault"] else f"healthy ({row['kind']})"
    text = "\n".join(each for each in said.splitlines() if not each.startswith("next:"))
    return f"## {row['id']}: {wrong}\n{row['job']}{gain}{measured}.\n\n```\n{text}\n```\n"


def main() -> None:
    """Prints the cards."""
    folder, *ids = sys.argv[1:]
    rows = {row["id"]: row for row in reported()}
    print("# Cards of unseen jobs, with the true gain beside each\n")
    for each in ids:
        print(card(rows[each], Path(folder) / each.replace(" ", "-") / "recorded" / "logs"))


if __name__ == "__main__":
    main()
