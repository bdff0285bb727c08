"""From a seed to one job: its kind, model, loader, ranks, loop; with its fault or without."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kinds import FAULTS, HEALTHY, Kind

TEMPLATE = Path(__file__).with_name("job.py")
STEP_S = 0.02
"""About what a step of most models takes."""
BATCHES = {
    "mlp": 128, "cnn": 24, "unet": 64, "transformer": 20, "vit": 20, "lstm": 64,
    "recommender": 256, "graph": 40,
}  # fmt: skip
NEEDED = {"trainer": "transformers", "lightning": "lightning", "accelerate": "accelerate"}
PLACE = re.compile(r"^( *)# <(\w+)>$")


class Work(NamedTuple):
    """What work.py finds of one family on this machine."""

    work: int
    """Times over that a model works on its batch."""
    step_s: float
    """Its step by then."""
    parameters: int
    turns_per_s: float
    """Turns of a Python loop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One drawn job."""

    seed: int
    kind: Kind
    family: str
    style: str
    ranks: int
    workers: int
    magnitude: float
    every: int
    loaded: bool
    """Whether two busy processes run beside it."""

    @property
    def rank(self) -> int | None:
        """The rank that has the true account."""
        return {"": None, "first": 0, "last": self.ranks - 1}[self.kind.rank]

    @property
    def text(self) -> str:
        """The job in a line."""
        workers = f", {self.workers} workers" if self.workers else ""
        size = f"{self.magnitude:.2g}x" + (f" every {self.every}" if self.every > 1 else "")
        return f"{self.family}, {self.style}, {self.ranks} ranks{workers}, {size}"


def draw(seed: int, *, loaded: bool = False) -> Case:
    """The job of a seed: even seeds have a fault, odd ones are healthy.

    Kinds go round, in an order of their own each time, so that few seeds hold many of them.
    """
    kinds = HEALTHY if seed % 2 else FAULTS
    place, turn = (seed // 2) % len(kinds), (seed // 2) // len(kinds)
    order = random.Random(f"order {seed % 2} {turn}").sample(range(len(kinds)), len(kinds))
    kind, dice = kinds[order[place]], random.Random(seed)
    ranks = dice.choice(kind.ranks)
    styles = [
        s for s in kind.styles if _is_installed(s) and (ranks == 1 or s in ("plain", "accelerate"))
    ]
    low, high = kind.magnitudes
    return Case(
        seed=seed, kind=kind, ranks=ranks, style=dice.choice(styles or ["plain"]),
        family=dice.choice(kind.families or tuple(BATCHES)), workers=dice.choice(kind.workers),
        magnitude=low * (high / low) ** dice.random(), every=dice.choice(kind.every), loaded=loaded,
    )  # fmt: skip


def _is_installed(style: str) -> bool:
    return style not in NEEDED or importlib.util.find_spec(NEEDED[style]) is not None


def write_job(
    case: Case, path: Path, work: Work, *, faulty: bool = True, without: Sequence[str] = (),
    constants: Mapping[str, object] = {},
) -> dict[str, range]:  # fmt: skip
    """Writes the job as one script, with its fault or without.

    Args:
        case: The job.
        path: The script.
        work: Of its family.
        faulty: Whether it has its fault.
        without: Places of pieces to be left out.
        constants: These instead.

    Returns:
        The lines of each piece, by its place.
    """
    kind = case.kind
    times = work.work * kind.work
    step_s = work.step_s * kind.work
    lose_s = case.magnitude * step_s * case.every
    values = {
        "FAMILY": case.family, "STYLE": case.style, "BATCH": BATCHES[case.family],
        "WORKERS": case.workers, "SECONDS": kind.seconds, "WORK": times, "STEP": round(step_s, 5),
        "LOSE": round(lose_s, 6), "TURNS": max(int(lose_s * work.turns_per_s), 1),
        "EVERY": case.every, **kind.constants, **constants,
    }  # fmt: skip
    chosen = kind.pieces if faulty else kind.fixed
    pieces = {p: [code] for p, code in kind.shape.items()}
    for place, code in chosen.items():
        if place not in without:
            pieces.setdefault(place, []).append(code)
    text = [f"{name} = {value!r}" for name, value in values.items()]
    pieces["constants"] = text + pieces.get("constants", [])
    lines, spans = [], {}
    for line in TEMPLATE.read_text(encoding="utf-8").split("\n"):
        found = PLACE.match(line)
        if not found:
            lines.append(line)
            continue
        begin = len(lines) + 1
        for code in pieces.pop(found[2], []):
            lines += [found[1] + part if part else part for part in code.split("\n")]
        spans[found[2]] = range(begin, len(lines) + 1)
    assert not pieces, pieces
    path.write_text("\n".join(lines), encoding="utf-8")
    return {place: spans[place] for place in chosen if place in spans and place != "constants"}


def faulty_lines(path: Path) -> tuple[int, ...]:
    """The lines at fault of a job that was written."""
    numbered = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    return tuple(number for number, line in numbered if line.endswith("# FAULT"))
