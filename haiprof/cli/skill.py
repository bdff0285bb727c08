"""`haiprof skill`: writes SKILL.md, which tells an agent how to make a training job faster."""

from __future__ import annotations

from pathlib import Path

from haiprof.cli.command_line import argument, option
from haiprof.cli.output import Output

SKILL = """\
---
name: haiprof
description: Find out why a PyTorch training job is slow, hangs or died, and prove that a change made it faster. Use for slow training, low GPU use, stragglers, data loading, out of memory.
---

# Make a PyTorch training job faster with haiprof

Work in rounds: measure, read the ledger, change one thing, compare the promised with the true gain.
With the tools of `haiprof mcp`, ask those; else run the commands below with `--json`.

## 1. Measure

    haiprof train.py --epochs 1              # the job's own command, nothing in its code changes
    haiprof torchrun --nproc-per-node 8 train.py

At least 100 steps after warm-up. Nothing else should run on the machine. Say how long it ran.

## 2. Read the ledger

    haiprof verdict                          # why it died, or what makes it slow (tool: verdict)
    haiprof verdict --json                   # `ledger`: each account of a step (tool: ledger)
    haiprof verdict lines                    # lines of code by time (tool: lines)
    haiprof verdict overview                 # does one rank differ from the others (tool: ranks)

- `gain` is what the mean step becomes without an account, with its interval. Time that is hidden
  behind other work has no gain: do not shorten it.
- Take the account with the largest gain. If its lower bound is 0, or the headline says that nothing
  stands out, say so and stop: do not invent a cause.
- "not measured" and "not evaluated" name what is not known, and why. Do not fill it with a guess.
- Of a GPU: `haiprof --trace train.py`, then `haiprof verdict TRACES`, `haiprof trace report TRACES`.

## 3. Change one thing

Write down the promise (the step now, the step that the gain promises), then change that one thing:
no second change, the same data, batch size, seed and number of steps. Results must stay the same.

## 4. Compare the promised with the true gain

    haiprof compare BEFORE AFTER             # slower, faster or not known (tool: compare)

`promise` says what was promised and what came. "inconclusive" is an answer: record longer, or on a
quiet machine. If the gain did not come, take the change back and read the ledger again: the time may
have moved to another account. Report: the cause and its line, promised and true gain with intervals,
what was not measured. Then the next round, until nothing stands out.
"""  # noqa: E501 - the description is one line of YAML


def skill(
    directory: Path = argument(
        "DIR",
        "The agent's folder of skills. Left out: .claude/skills in this folder.",
        Path(".claude/skills"),
    ),
    force: bool = option("--force", "Replace a SKILL.md that already exists."),
) -> None:
    """Write DIR/haiprof/SKILL.md: how an agent measures, reads the ledger, changes and compares.

    For example:

      haiprof skill                         into .claude/skills of this folder
      haiprof skill ~/.codex/skills         for another agent
    """
    from haiprof.base.safe_files import output_file

    path = directory / "haiprof" / "SKILL.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    with output_file(path, force=force) as file:
        file.write(SKILL.encode())
    Output().hint(f"wrote {path}; its tools: haiprof mcp --help")
