"""How large the inputs of the training's root modules are: looked at about once a second."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from haiprof.in_job.object_settings import number_count

_OFTEN_NS, _SELDOM_NS = 1_000_000_000, 10_000_000_000
_OFTEN_COUNT = 120
"""So many looks a second apart; then one in ten seconds."""
_now = time.perf_counter_ns


class InputSizes:
    """Lines `input_size`: one where a root module's inputs have another size than before.

    Steps that take longer because a curriculum gives them more are no drift, and only this tells.
    The drain thread says when a look is due; the look is the training thread's, where it calls the
    module, and no value is read.
    """

    def __init__(self, lines: list[dict[str, Any]]) -> None:
        self._lines = lines
        self.restart()

    def restart(self) -> None:
        """In a forked child, which has modules of its own."""
        self.is_due = False
        self._last: dict[int, int] = {}
        self._looked_ns = self._look_count = 0
        self._is_over = False

    def becomes_due(self) -> bool:
        """Whether the next call is to be looked at; asked about once a second."""
        pause_ns = _OFTEN_NS if self._look_count < _OFTEN_COUNT else _SELDOM_NS
        if _now() - self._looked_ns >= pause_ns - _OFTEN_NS // 2:  # who asks is not exactly on time
            self.is_due = not self._is_over
        return self.is_due

    def look(self, step: int, tag: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A root module is called for training; after an error there are no more looks."""
        self.is_due = False
        self._looked_ns, self._look_count = _now(), self._look_count + 1
        try:
            count = number_count((*args, *kwargs.values()))
        except Exception as error:
            self._is_over = True
            reason = f"{type(error).__name__}: {error}"
            self._lines.append(
                {"type": "settings_failed", "time_ns": self._looked_ns, "reason": reason}
            )
            return
        if self._last.get(tag) != count:
            self._last[tag] = count
            self._lines.append(
                {
                    "type": "input_size",
                    "time_ns": self._looked_ns,
                    "step": step,
                    "root": tag,
                    "number_count": count,
                }
            )
