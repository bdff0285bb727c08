"""Samples read back as the analysis sees them, null where a value is missing; a simulated clock."""

from __future__ import annotations

import math
import threading
from typing import TypeVar

from haiprof.agent.samplers.table import TableSampler
from haiprof.run_format.schema import NULL_I64, Table

AnySampler = TypeVar("AnySampler", bound=TableSampler)

Row = dict[str, float | int | None]


def rows(table: Table, data: bytes) -> list[Row]:
    """The records in `data` by column name."""
    names = [column.name for column in table.columns]
    return [
        {name: _value(value) for name, value in zip(names, record, strict=True)}
        for record in table.struct.iter_unpack(data)
    ]


def _value(value: float | int) -> float | int | None:
    return None if value == NULL_I64 or (isinstance(value, float) and math.isnan(value)) else value


def opened(sampler: AnySampler) -> AnySampler:
    """The sampler after its first reads; the fixture in conftest.py closes it."""
    sampler.open()
    return sampler


class SimulatedTime(threading.Event):
    """A stop that comes after so many seconds, on a clock that moves by waiting for it alone."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.now, self._end_ns = 0, round(seconds * 1e9)

    def clock(self) -> int:
        return self.now

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now += max(1, round(timeout * 1e9))
        return self.now >= self._end_ns
