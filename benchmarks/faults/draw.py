"""From a seed to one job: its kind, model, loader, ranks, loop and noise; and the right answer."""

from __future__ import annotations

import importlib.util
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kinds import FAULTS, HEALTHY, Kind

TEMPLATE = Path(__file__).with_name("job.py")
STEP_S = 0.02
"""About what a step of most models takes: magnitudes are of that."""
BATCHES = {
    "mlp": 128, "cnn": 24, "unet": 64, "transformer": 20, "vit": 20, "lstm": 64,
    "recommender": 256, "graph": 40,
}  # fmt: skip
NEEDED = {"trainer": "transformers", "lightning": "lightning", "accelerate": "accelerate"}
PLACE = re.compile(r"^( *)# <(\w+)>$", re.M)


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
    loaded: bool
    """Whether two busy processes run beside it."""

    @property
    def rank(self) -> int | None:
        """The rank that a finding must name."""
        return {"": None, "first": 0, "last": self.ranks - 1}[self.kind.rank]

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong with it."""
        return not self.kind.accepted


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
        magnitude=low * (high / low) ** dice.random(), loaded=loaded,
    )  # fmt: skip


def _is_installed(style: str) -> bool:
    return style not in NEEDED or importlib.util.find_spec(NEEDED[style]) is not None


def write_job(case: Case, path: Path) -> None:
    """Writes the job as one script; `faulty_lines` of it are what a finding should name."""
    constants = {
        "FAMILY": case.family, "STYLE": case.style, "BATCH": BATCHES[case.family],
        "WORKERS": case.workers, "SECONDS": case.kind.seconds,
        "LOSE": round(case.magnitude * STEP_S, 5), "THREADS": 1, **case.kind.constants,
    }  # fmt: skip
    text = "\n".join(f"{name} = {value!r}" for name, value in constants.items())
    pieces: Mapping[str, str] = {
        **case.kind.pieces,
        "constants": f"{text}\n{case.kind.pieces.get('constants', '')}",
    }
    unknown = set(pieces) - {place for _, place in PLACE.findall(TEMPLATE.read_text("utf-8"))}
    assert not unknown, unknown

    def filled(found: re.Match[str]) -> str:
        lines = pieces.get(found[2], "").split("\n")
        return "\n".join(found[1] + line if line else line for line in lines)

    script = PLACE.sub(filled, TEMPLATE.read_text(encoding="utf-8"))
    path.write_text(script, encoding="utf-8")


def faulty_lines(path: Path) -> tuple[int, ...]:
    """The lines at fault of a job that was written."""
    numbered = enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
    return tuple(number for number, line in numbered if line.endswith("# FAULT"))
