"""Every sampler that a test opens is closed when the test is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from haiprof.agent.samplers.table import Missing, TableSampler


@pytest.fixture(autouse=True)
def close_samplers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Closes what is still open, so that no test has to."""
    found: list[TableSampler] = []
    open_sampler = TableSampler.open

    def note(sampler: TableSampler) -> list[Missing]:
        found.append(sampler)
        return open_sampler(sampler)

    monkeypatch.setattr(TableSampler, "open", note)
    yield
    for sampler in found:
        sampler.close()
