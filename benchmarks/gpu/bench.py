"""What an item is, what is expected of it, and what its function is given; stdlib alone."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

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
