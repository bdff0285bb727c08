"""A slow, sequential reading of the same rules, and a grammar of training loops to try them on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

TRAIN = ("F", "B", "O", "S")


@dataclass
class Step:
    """What one step holds."""

    start: int
    end: int = 0
    dataloader: int = 0
    forward: int = 0
    backward: int = 0
    optimizer: int = 0
    evaluated: int = 0
    micro: int = 0
    closed: Step | None = None
    """As it was when its last optimizer step ended."""


@dataclass
class Loop:
    """A loop's words with what its author would count."""

    words: list[str] = field(default_factory=list)
    steps: int = 0
    micro_steps: int = 0


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    """Epochs of a loader: accumulation, GAN, closures, prefetching, evaluation now and then."""
    loop = Loop()
    batches = draw(st.integers(1, 6))
    accumulation = draw(st.integers(1, 3))
    style = draw(st.sampled_from(["plain", "gan", "closure", "scaler"]))
    prefetch = draw(st.booleans())
    eval_every = draw(st.integers(0, 3))
    evaluation = draw(st.sampled_from(["E", "ITER D E D E END", "ITER D D E END E", "E E"]))
    for _ in range(draw(st.integers(1, 3))):
        total = batches * accumulation
        loop.words += ["ITER", "D"] if prefetch else ["ITER"]
        for batch in range(total):
            if not prefetch:
                loop.words.append("D")
            else:
                loop.words.append("D" if batch + 1 < total else "END")
            last = (batch + 1) % accumulation == 0
            loop.words += _work(style, last)
            loop.micro_steps += 2 if style == "gan" and last else 1
            loop.steps += last
            if last and eval_every and loop.steps % eval_every == 0:
                loop.words += evaluation.split()
        if not prefetch:
            loop.words.append("END")
    return loop


def _work(style: str, last: bool) -> list[str]:
    if style == "closure":
        return ["O(F", "B)"] if last else ["F", "B"]
    if style == "gan" and last:
        return ["F", "B", "O0", "F", "B", "O1"]
    end = {"plain": ["O"], "gan": ["O0"], "scaler": ["S(O)"]}[style]
    return ["F", "B", *(end if last else [])]


def slow_steps(rows: list[tuple[str, int, int]], inner: dict[int, list[tuple[str, int]]]
               ) -> list[Step]:  # fmt: skip
    """Steps of a line with a loader, one token after the other."""
    steps: list[Step] = []
    current: Step | None = None
    closed = False
    evaluation = 0
    for place, (word, start, end) in enumerate(rows):
        if word.islower():
            if current and not evaluation:
                evaluation = start
            if current and (place + 1 == len(rows) or not rows[place + 1][0].islower()):
                follows = closed and place + 1 < len(rows) and rows[place + 1][0] in ("D", "ITER")
                follows |= closed and _opens(rows, place + 1)
                if follows:
                    current.end = evaluation
                else:
                    current.evaluated += end - evaluation
                evaluation = 0
            continue
        if current is None or (closed and _opens(rows, place)):
            if current is not None and not current.end:
                current.end = start
            current, closed = Step(start), False
            steps.append(current)
        for phase, time in inner.get(place, []):
            setattr(current, phase, getattr(current, phase) + time)
        current.micro += word == "B" or ("backward" in dict(inner.get(place, [])) and word in "OS")
        if word in ("O", "S"):
            closed = True
            follower = rows[place + 1] if place + 1 < len(rows) else ("", 0, 0)
            stop = follower[1] if follower[0].islower() else end
            current.closed = replace(current, end=stop, closed=None)
    if steps and not steps[-1].end and steps[-1].closed:
        steps[-1] = replace(steps[-1].closed, closed=steps[-1].closed)
    return [step for step in steps if step.closed]


def _opens(rows: list[tuple[str, int, int]], place: int) -> bool:
    """Whether a step can begin with that token."""
    if place >= len(rows):
        return False
    word = rows[place][0]
    follower = rows[place + 1][0] if place + 1 < len(rows) else ""
    return word in ("D", "ITER") or (word == "END" and follower in TRAIN)
