"""Which spans are recorded: warm-up, time limit, both moved to the end of a step."""

from __future__ import annotations

from array import array

from haiprof.run_format.ring import NEVER
from haiprof.run_format.schema import (
    BACKWARD,
    COLLECTIVE,
    DATA,
    EVAL,
    FORWARD,
    FORWARD_EVAL,
    MARK,
    NOGRAD,
    OPTIMIZER,
    TAG_BITS,
    TAG_MASK,
)

GRACE_S = 10.0  # how long to wait for an optimizer step to end on before cutting anyway
_NS_PER_S = 1_000_000_000
_STEP_ENDS = (OPTIMIZER, MARK)
_MODULES = (FORWARD, FORWARD_EVAL, EVAL, NOGRAD)


class RecordingWindow:
    """Cuts the stream of spans to the asked-for window.

    Both clocks start with the job's first training span (backward, optimizer, or a marked step);
    what was evaluated before is recorded, and takes none of the time. In a process that does not
    train they start when that is sure. The window opens at the first optimizer step that ends
    after the warm-up and closes at the first one that ends `time_s` later, so that it holds whole
    steps; where no optimizer step comes within `GRACE_S`, it is cut at the time itself.
    """

    def __init__(self, *, time_s: float, warmup_s: float) -> None:
        self.time_s = time_s
        self.warmup_s = warmup_s
        self.trained_ns: int | None = None
        self.started_ns: int | None = None
        self.ended_ns: int | None = None
        self.steps_before = 0
        self._untrained = self._marked = False

    def limits(self) -> tuple[int, int]:
        """From which time in ns on spans are kept, and after which a step's end is the last one."""
        opens_ns = (self.started_ns or NEVER) if self.warmup_s else 0
        if self.trained_ns is None or self.started_ns is None or not self.time_s:
            return opens_ns, NEVER
        return opens_ns, self._closes_ns(self.trained_ns, self.started_ns)

    def _closes_ns(self, trained_ns: int, started_ns: int) -> int:
        return max(trained_ns, started_ns) + round(self.time_s * _NS_PER_S)

    def cut(
        self, batch: array[int], now_ns: int, *, untrained: bool = False
    ) -> tuple[array[int], bool]:
        """The part of a batch of spans that is inside, and whether the window is over."""
        if self.trained_ns is None:
            self.trained_ns = _first_training_ns(batch)
            if self.trained_ns is None and untrained and batch:
                self._untrained, self.trained_ns = True, batch[0] >> TAG_BITS
        if self.started_ns is None and not self.warmup_s and batch:
            self.started_ns = batch[0] >> TAG_BITS
        if self.trained_ns is None:
            return array("q") if self.warmup_s else batch, False
        if self.started_ns is None:
            batch = self._open(batch, self.trained_ns, now_ns)
        if self.started_ns is None:
            return batch, False
        # What held the step that opened the window (GradScaler, train-step module).
        while self.warmup_s and batch and batch[0] >> TAG_BITS < self.started_ns:
            batch = batch[2:]
        if not self.time_s:
            return batch, False
        return self._close(batch, self._closes_ns(self.trained_ns, self.started_ns), now_ns)

    def _open(self, batch: array[int], first_ns: int, now_ns: int) -> array[int]:
        opens_ns = first_ns + round(self.warmup_s * _NS_PER_S)
        index = self._first_step_end(batch, opens_ns, before_fetch=True)
        if index is None and now_ns > opens_ns + GRACE_S * _NS_PER_S:
            index = 0
            self.started_ns = opens_ns
        elif index is not None:
            self.started_ns = (batch[index - 1] if index else batch[0]) >> TAG_BITS
        self.steps_before += sum(word & TAG_MASK == OPTIMIZER for word in batch[:index:2])
        return array("q") if index is None else batch[index:]

    def _close(self, batch: array[int], closes_ns: int, now_ns: int) -> tuple[array[int], bool]:
        index = self._first_step_end(batch, closes_ns)
        if index is not None:
            self.ended_ns = batch[index - 1] >> TAG_BITS
        elif now_ns > closes_ns + GRACE_S * _NS_PER_S:
            self.ended_ns = closes_ns
        return batch[:index], self.ended_ns is not None

    def _first_step_end(
        self, batch: array[int], after_ns: int, *, before_fetch: bool = False
    ) -> int | None:
        """Index behind the first step that ends at or after a time; None if there is none."""
        if not batch or batch[-1] >> TAG_BITS < after_ns:
            return None
        self._marked = self._marked or any(word & TAG_MASK == MARK for word in batch[::2])
        if self._marked:
            return _first_end(batch, after_ns, kinds=(MARK,))
        if not self._untrained:
            return _first_end(batch, after_ns, kinds=_STEP_ENDS)
        kinds = {word & TAG_MASK for word in batch[::2]}
        if DATA in kinds:  # a step begins with its batch
            index = _first_end(batch, after_ns, kinds=(DATA,))
            return index - 2 if before_fetch and index is not None else index
        ends = _MODULES if kinds.intersection(_MODULES) else (COLLECTIVE,)
        return _first_end(batch, after_ns, kinds=(*ends, *_STEP_ENDS))


def _first_end(batch: array[int], after_ns: int, *, kinds: tuple[int, ...]) -> int | None:
    """Index behind the first span of some kinds that ends then or later, and what it is in."""
    limit = after_ns << TAG_BITS
    for index in range(0, len(batch), 2):
        if batch[index + 1] >= limit and batch[index] & TAG_MASK in kinds:
            held = batch[index + 2 : index + 3]
            return index + (4 if held and held[0] < batch[index] else 2)
    return None


def _first_training_ns(batch: array[int]) -> int | None:
    """Start of the first backward or optimizer span, or end of the first marked step."""
    for index, word in enumerate(batch[::2]):
        if word & TAG_MASK == MARK:
            return batch[2 * index + 1] >> TAG_BITS
        if word & TAG_MASK in (BACKWARD, OPTIMIZER):
            return word >> TAG_BITS
    return None
