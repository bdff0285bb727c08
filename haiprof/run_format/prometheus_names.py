"""Counters in Prometheus' form: labels, and samples gathered into families; in files and live."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from haiprof.run_format.entities import PROCESS_KEYS, Key, entity_name
from haiprof.run_format.otel_names import Instrument


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of one series."""

    instrument: Instrument
    labels: Mapping[str, str]
    value: float
    """In the instrument's unit."""
    time_ns: int
    """When it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All series of one name."""

    instrument: Instrument
    """Of one of them: name, kind and description are the same for all."""
    samples: tuple[Sample, ...]


def families(samples: Iterable[Sample]) -> list[Family]:
    """Samples by name; of two with the same labels (a rank that was started again), the newer."""
    found: dict[str, dict[tuple[tuple[str, str], ...], Sample]] = {}
    for sample in sorted(samples, key=lambda sample: sample.time_ns):
        series = found.setdefault(sample.instrument.prometheus_sample_name, {})
        series[tuple(sample.labels.items())] = sample
    return [
        Family(instrument=next(iter(series.values())).instrument, samples=tuple(series.values()))
        for _, series in sorted(found.items())
    ]


def series_labels(
    instrument: Instrument,
    *,
    run: str,
    host: str,
    keys: tuple[str, ...],
    key: Key,
    entity: Mapping[str, Any],
    rank: int | None,
) -> dict[str, str]:
    """Labels of one series, in order; what is not known is left out."""
    gpu = key[0] if keys == ("gpu",) and key else None
    named = {
        "run": run,
        "host": host,
        "rank": rank,
        "gpu": gpu,
        "entity": _entity_label(keys, key, entity, rank),
    }
    found = {name: str(value) for name, value in named.items() if value not in (None, "")}
    return {**found, **{label(name): value for name, value in instrument.attributes.items()}}


def label(attribute: str) -> str:
    """A label for an attribute of OpenTelemetry: `cpu.mode` as `cpu_mode`."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", attribute)


def _entity_label(
    keys: tuple[str, ...], key: Key, entity: Mapping[str, Any], rank: int | None
) -> str:
    """Its name, or its keys; nothing for the node, and for a process whose rank is known."""
    if keys == PROCESS_KEYS and rank is not None:
        return ""
    words = (f"{word} {value}" for word, value in zip(keys, key, strict=False))
    return entity_name(entity) or " ".join(words)
