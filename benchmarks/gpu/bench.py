"""What an item is, what is expected of it, and what its function is given; stdlib alone."""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

Kind = Literal["must", "goal", "published"]
"""`must`: haiprof's own promise, whatever the hardware; a fake holds it too. `goal`: haiprof's own
promise on times, which only a GPU can keep or break. `published`: somebody else's figure, put
beside ours; another one is no failure."""
Value = bool | int | float | str | None
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect:
    """One figure of an item, and what is known of it beforehand."""

    figure: str
    """Its name in gpu-check.json."""
    words: str
    """What it is."""
    source: str
    """Where the expectation is from."""
    kind: Kind = "must"
    unit: str = ""
    low: float | None = None
    high: float | None = None
    equals: Value = None

    def holds(self, value: Value) -> bool:
        """Whether a measured value is as expected."""
        if self.equals is not None:
            return value == self.equals
        if not isinstance(value, (int, float)):
            return False
        above = self.low is None or value >= self.low
        return above and (self.high is None or value <= self.high)

    def text(self) -> str:
        """The expectation as people read it."""
        if self.equals is not None:
            return _plain(self.equals)
        unit = f" {self.unit}" if self.unit else ""
        if self.low is not None and self.high is not None:
            return f"{self.low:g} to {self.high:g}{unit}"
        return f"≥ {self.low:g}{unit}" if self.low is not None else f"≤ {self.high:g}{unit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question to the hardware, answered in a process of its own."""

    name: str
    question: str
    function: str
    """`module:function`; the module is imported in the item's own process."""
    limit_s: float
    """After so long it is killed; what it had measured by then stays."""
    expects: tuple[Expect, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process alone, set before torch is imported."""


class Bench:
    """What the function of an item works with; every figure is kept as soon as it is known."""

    def __init__(
        self, figures: Path, *, scratch: Path, recordings: Path, fake: bool, seconds: float
    ) -> None:
        self.scratch = scratch
        self.fake = fake
        self._figures = figures
        self._recordings = recordings
        self._deadline = time.monotonic() + seconds

    @property
    def seconds_left(self) -> float:
        """Until it is killed."""
        return self._deadline - time.monotonic()

    def scale(self, real: T, fake: T) -> T:
        """The size of a loop: on a GPU, and where one is simulated."""
        return fake if self.fake else real

    def tell(self, figure: str, value: Value) -> None:
        """Keeps a figure."""
        self._write({"figure": figure, "value": value})

    def skip(self, figure: str, reason: str) -> None:
        """Keeps why a figure cannot be measured here."""
        self._write({"figure": figure, "skipped": reason})

    def note(self, name: str, content: object) -> None:
        """Keeps what is worth knowing beside the figures."""
        self._write({"note": name, "content": content})

    def keep(self, path: Path, name: str = "") -> None:
        """Puts a file or a folder among the recordings, if it is there."""
        target = self._recordings / (name or path.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            hidden = shutil.ignore_patterns(".*", "boot")  # caches; what a hook is started with
            shutil.copytree(path, target, dirs_exist_ok=True, ignore=hidden)
        elif path.exists():
            shutil.copyfile(path, target)

    def keep_json(self, name: str, content: object) -> None:
        """Puts a JSON file among the recordings."""
        target = self._recordings / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content, indent=1, default=str) + "\n")

    def _write(self, line: Mapping[str, object]) -> None:
        with self._figures.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())


def _plain(value: Value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def value_text(value: Value, unit: str = "") -> str:
    """A measured value as people read it."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return _plain(value) + (f" {unit}" if unit and known else "")


_KINDS = ("must", "goal", "published")


def _value(text: str) -> Value:
    try:
        found: Value = ast.literal_eval(text)
    except ValueError:
        return text
    return found


def _expect(line: str) -> Expect:
    head, words, source = (part.strip() for part in line.split(" | "))
    kind, figure, expected, *unit = head.split()
    assert kind in _KINDS, line
    equals = _value(expected[1:]) if expected.startswith("=") else None
    low, _, high = ("", "", "") if equals is not None else expected.partition("..")
    return Expect(
        figure=figure,
        words=words,
        source=source,
        kind=cast(Kind, kind),
        unit=" ".join(unit),
        equals=equals,
        low=ast.literal_eval(low or "None"),
        high=ast.literal_eval(high or "None"),
    )


def _item(lines: list[str]) -> Item:
    head, question = lines[0].split(" | ")
    name, function, seconds, *variables = head.split()
    return Item(
        name=name, question=question, function=f"benchmarks.gpu.{function}", limit_s=float(seconds),
        expects=tuple(map(_expect, lines[1:])), environment=dict(v.split("=") for v in variables),
    )  # fmt: skip


def _read() -> tuple[Item, ...]:
    items: list[list[str]] = []
    for line in Path(__file__).with_name("items.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("  "):
            items[-1].append(line)
        elif line and not line.startswith("#"):
            items.append([line])
    return tuple(map(_item, items))


ITEMS = _read()


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


def main() -> int:
    """Runs one item: FUNCTION FIGURES SCRATCH RECORDINGS FAKE SECONDS."""
    function, figures, scratch, recordings, fake, seconds = sys.argv[1:]
    bench = Bench(Path(figures), scratch=Path(scratch), recordings=Path(recordings),
                  fake=fake == "1", seconds=float(seconds))  # fmt: skip
    module, _, name = function.partition(":")
    try:
        getattr(importlib.import_module(module), name)(bench)
    except BaseException:  # noqa: BLE001  it is told, and the process ends here in any case
        text = traceback.format_exc()
        bench.note("error", text)
        sys.stderr.write(text)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # whatever threads or a driver still hold
