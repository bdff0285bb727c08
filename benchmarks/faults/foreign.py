"""Programs that nobody here wrote, healthy and with a fault of one line: run as drawn jobs are.

    python benchmarks/faults/foreign.py --mirror /work/.mirror              all of them
    python benchmarks/faults/foreign.py --mirror /work/.mirror --name mnist --truth-only
    python benchmarks/faults/foreign.py --mirror /work/.mirror --report     into results/faults.md

They come from git mirrors of pytorch/examples and OrderLab/TrainCheck-Evaluation-Workloads, which
stay outside this repository: `MIRROR/OWNER+NAME/repo`. A file of foreign/ says of one program which
folder it is, how it starts, what is edited (a clock behind its step, a CPU in place of a GPU, made
data in place of a download), which line is planted as its fault and what the true account of that
is, and what of it can be left out to try a problem that is named of the healthy program. What is
not installed (torchvision, gymnasium, matplotlib, traincheck) is stood in for by foreign/stubs, as
far as the programs use it. All work with one thread, for `steps` steps.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from measure import AS_DRAWN, Change
from run import add_options, run_all, usual_change
from score import Truth, places

RECIPES = Path(__file__).with_name("foreign")
TICK = '__import__("step_clock").tick()'


@dataclass(kw_only=True)
class Foreign:
    """A foreign program as measure.py runs it."""

    name: str
    recipe: dict[str, Any]
    mirror: Path
    healthy: bool
    loaded: bool
    marked: dict[str, set[tuple[str, int]]] = field(default_factory=dict)
    """Where the fault and what can be left out stand, as the program was last written whole."""

    def __post_init__(self) -> None:
        loaded = " loaded" if self.loaded else ""
        self.id = f"{self.name}{'' if self.healthy else '+fault'}{loaded}"
        self.kind = "foreign" if self.healthy else self.recipe["fault"]["name"]
        self.text = f"{self.recipe['source']}/{self.recipe['folder']}"
        self.ranks, self.steps = self.recipe.get("ranks", 1), self.recipe["steps"]
        self.doing = tuple(self.recipe.get("fault", {}).get("doing", ()))
        self.options: tuple[str, ...] = ()
        self.seconds, self.beside, self.under, self.link_bytes_per_s = 10.0, "", "", 0.0

    def write(self, folder: Path, change: Change) -> list[str]:
        """The program with its edits, and how it is started."""
        recipe = self.recipe
        repo = self.mirror / recipe["source"].replace("/", "+") / "repo"
        tree = ["git", "-C", str(repo), "archive", f"HEAD:{recipe['folder']}", *recipe["files"]]
        packed = subprocess.run(tree, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", str(folder)], input=packed, check=True)
        shutil.copytree(RECIPES / "stubs", folder / "stubs")
        if recipe.get("data"):
            subprocess.run([sys.executable, "-c", recipe["data"]], cwd=folder, check=True)
        edits = [(None, edit) for edit in recipe["edits"]]
        edits += [(str(n), edit) for n, edit in enumerate(recipe.get("optional", []))]
        if not self.healthy and change.faulty:
            edits.append(("fault", recipe["fault"]))
        marks: dict[str, tuple[str, str]] = {}
        for key, edit in edits:
            if key is None or key == "fault" or key in change.without:
                _apply(edit, folder / edit["file"], "  # FAULT" if key == "fault" else "")
            if key is not None and change == AS_DRAWN:
                marks[key] = (edit["file"], "# FAULT" if key == "fault" else edit["find"])
        if change == AS_DRAWN:  # lines are known when all edits are made
            self.marked = {k: _lines(folder / f, text) for k, (f, text) in marks.items()}
        start = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.ranks)]
        start += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
        return [sys.executable, *(start if self.ranks > 1 else []), *shlex.split(recipe["run"])]

    def truth(self) -> Truth:
        """The account of the planted line."""
        fault = self.recipe["fault"]
        return Truth(
            lines=tuple(self.marked["fault"]), positions=tuple(fault.get("at", ())),
            activities=self.doing, rank=fault.get("rank"),
        )  # fmt: skip

    def without(self, account: dict[str, Any]) -> Change | None:
        """How to try it without an account; None where nothing is known."""
        for key, lines in self.marked.items():
            if key != "fault" and lines & places(account):
                return Change(without=(key,))
        return usual_change(account)


def _apply(edit: dict[str, str], path: Path, mark: str) -> None:
    """Replaces what an expression finds, or adds a line behind its line, as far in as that."""
    text = path.read_text(encoding="utf-8")
    if "find" in edit:
        text, count = re.subn(edit["find"], edit["put"], text)
    else:
        code = edit["line"].replace("TICK", TICK) + mark
        into = edit.get("into", "")
        line = rf"^([ \t]*)({edit['after']}.*)$"
        text, count = re.subn(
            line, lambda m: f"{m[0]}\n{m[1]}{into}{code}", text, count=1, flags=re.M
        )  # fmt: skip
    assert count, (path, edit)
    path.write_text(text, encoding="utf-8")


def _lines(path: Path, mark: str) -> set[tuple[str, int]]:
    text = path.read_text(encoding="utf-8")
    found = {(path.name, text.count("\n", 0, m.start()) + 1) for m in re.finditer(mark, text)}
    assert found, (path, mark)
    return found


def programs(mirror: Path, *, loaded: bool) -> list[Foreign]:
    """All programs, each healthy and then with its fault."""
    found = []
    for path in sorted(RECIPES.glob("*.yaml")):
        recipe = {"files": [], "edits": [], **yaml.safe_load(path.read_text(encoding="utf-8"))}
        for healthy in (True, False) if "fault" in recipe else (True,):
            one = Foreign(
                name=path.stem, recipe=recipe, mirror=mirror, healthy=healthy, loaded=loaded
            )  # fmt: skip
            found.append(one)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the chosen programs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mirror", type=Path, required=True, help="holds OWNER+NAME/repo")
    parser.add_argument("--name", help="those whose name has this in it")
    parser.add_argument("--report", action="store_true", help="keep their rows in results/")
    add_options(parser)
    options = parser.parse_args(arguments)
    found = programs(options.mirror, loaded=options.loaded)
    chosen = [p for p in found if options.name is None or options.name in p.name]
    run_all(chosen, options, lambda _: options.report)


if __name__ == "__main__":
    main()
