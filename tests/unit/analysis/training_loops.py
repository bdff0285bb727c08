"""A grammar of training loops, with what their authors would count."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st


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
