"""Labels of counters, and of missing sources by reason; without plotly."""

from __future__ import annotations

from collections.abc import Mapping

OWNER = ["host", "rank", "gpu", "entity"]
"""Columns of `Analyzer.counters()` that identify a series."""


def by_reason(missing: Mapping[str, str]) -> list[tuple[str, str]]:
    """(what, why), with all that is missing for one reason together."""
    titles: dict[str, list[str]] = {}
    for title, reason in missing.items():
        titles.setdefault(reason, []).append(title)
    return [(", ".join(names), reason) for reason, names in titles.items()]


def entity_label(
    host: object, rank: object, gpu: object, entity: object, *, many_hosts: bool = False
) -> str:
    """The label of a counter: the rank if known, else GPU or entity, else the host."""
    if rank is not None:
        return f"rank {rank}"
    name = f"GPU {gpu}" if gpu is not None else entity
    if name is None:
        return str(host)
    return f"{host} {name}" if many_hosts else str(name)
