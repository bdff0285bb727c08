"""`haiprof skill`: writes SKILL.md, which tells an agent how to make a training job faster."""

from __future__ import annotations

from pathlib import Path

from haiprof.base.version import PACKAGE
from haiprof.cli.command_line import argument, option
from haiprof.cli.output import Output

SKILL = (PACKAGE / "cli" / "skill.md").read_text(encoding="utf-8")


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
