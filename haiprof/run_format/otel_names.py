"""Names of counters elsewhere: OpenTelemetry's, and Prometheus' form in files and live."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from haiprof.base.version import read_data
from haiprof.run_format.entities import PROCESS_KEYS, Key, entity_name
from haiprof.run_format.schema import Column, Table, counter_end
from haiprof.run_format.tables import COUNTER_TABLES

SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""The semantic conventions that the names below were compared with."""

InstrumentKind = Literal["counter", "updown", "gauge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    """One column of a table as other systems know it."""

    name: str  # in OpenTelemetry's form
    unit: str  # in UCUM's form: `s`, `By`, `1`, `{packet}`
    kind: InstrumentKind  # `counter` only grows; `updown` adds up over attributes; `gauge` does not
    divisor: int  # from stored values to values in `unit`
    attributes: Mapping[str, str]  # what tells it from other columns of the same name
    description: str  # what all columns of that name are read from

    @property
    def prometheus_name(self) -> str:
        """With the unit as suffix; without `_total`, which only a counter's samples have."""
        stem = re.sub(r"[^a-zA-Z0-9_]", "_", self.name)
        shows_unit = self.unit != "1" or self.kind == "gauge"
        suffix = _DATA["prometheus_units"].get(self.unit, "") if shows_unit else ""
        return stem if not suffix or stem.endswith(f"_{suffix}") else f"{stem}_{suffix}"

    @property
    def prometheus_sample_name(self) -> str:
        """The name of a sample, as a query has it."""
        return self.prometheus_name + ("_total" if self.kind == "counter" else "")


_DATA: Mapping[str, Any] = read_data("run_format/otel_names.json")
"""`units`: stored unit -> (UCUM, divisor); other units are counts of what they name.
`prometheus_units`: the suffix of a UCUM unit.
`names`: source, pattern of its columns, and their name with its attributes, and a unit in place of
the column's own; the groups of the pattern become values of attributes.
`namespaces`: sources whose haiprof.* names are not their own.
`updown`: names of the semantic conventions that are UpDownCounters; all other gauges are gauges.
`entities`: what a source's entities are to OpenTelemetry: the detail of the entity by attribute,
and attributes that are the same for all."""
# Names outside haiprof.* are those of the semantic conventions, and stand there only where a reader
# who knows the convention would read the right thing. Left out on purpose: process.* (ours are sums
# over a rank and its descendants), system.memory.limit (virtual memory), hw.power for a mean over a
# second, aggregate ECC errors (they hold the volatile ones again).


def instrument(source: str, column: str) -> Instrument:
    """What one column of one table is called."""
    return instruments()[source, column]


@functools.cache
def instruments() -> Mapping[tuple[str, str], Instrument]:
    """Every metric of every table, by (source, column)."""
    found = {
        (table.name, column.name): _instrument(table, column)
        for table in COUNTER_TABLES
        for column in table.metrics
    }
    said: dict[str, list[str]] = {}  # by name: the sources of all its columns
    for each in found.values():
        words = f"{' '.join(each.attributes.values())}: {each.description}"
        said.setdefault(each.name, []).append(words)
    return {
        key: replace(each, description="; ".join(said[each.name]))
        if len(said[each.name]) > 1 else each
        for key, each in found.items()
    }  # fmt: skip


def entity_attributes(
    source: str, keys: tuple[str, ...], key: Key, entity: Mapping[str, object]
) -> dict[str, str | int]:
    """OpenTelemetry's attributes of an entity."""
    if not entity.get("name"):
        return {f"haiprof.{source}.{word}": value for word, value in zip(keys, key, strict=False)}
    words, fixed = _DATA["entities"].get(source, _DATA["other_entities"])
    found = {name: entity.get(detail) for name, detail in words.items()}
    texts = {
        name: str(value).encode("utf-8", "replace").decode()
        for name, value in found.items()
        if value not in (None, "")
    }
    return {**texts, **fixed}


def _instrument(table: Table, column: Column) -> Instrument:
    name, *more = _name(table.name, column).split()
    own_unit, divisor = _DATA["units"].get(column.unit, (f"{{{column.unit}}}", 1))
    end, ending = counter_end(column.kind), ""
    if end is not None and (end.bits < 64 or end.sticks):  # Prometheus takes a wrap for a reset
        ending = f" ({'stops' if end.sticks else 'goes on at 0'} after {end.bits} bits)"
    return Instrument(
        name=name, unit=next((word for word in more if "=" not in word), own_unit),
        kind="updown" if end is None and name in _DATA["updown"] else "counter" if end else "gauge",
        divisor=divisor, attributes=dict(word.split("=") for word in more if "=" in word),
        description=column.meaning + ending,
    )  # fmt: skip


def _name(source: str, column: Column) -> str:
    """As the data has it; what is not there is `haiprof.SOURCE.COLUMN`."""
    for of_source, pattern, name in _DATA["names"]:
        match = re.fullmatch(pattern, column.name)
        if match and of_source == source:
            return match.expand(name)
    stem = column.name.removesuffix(f"_{column.unit.replace('/', '_per_')}")
    if counter_end(column.kind) is not None:
        stem += {"ns": ".time", "bytes": ".io"}.get(column.unit, "")
    elif column.unit == "count" and stem != column.name:
        stem += ".count"
    return f"haiprof.{_DATA['namespaces'].get(source, source)}.{stem}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value of one series."""

    instrument: Instrument
    labels: Mapping[str, str]
    value: float  # in the instrument's unit
    time_ns: int  # when it was read


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All series of one name."""

    instrument: Instrument  # of one of them: name, kind and description are the same for all
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
    instrument: Instrument, *, run: str, host: str, keys: tuple[str, ...], key: Key,
    entity: Mapping[str, Any], rank: int | None,
) -> dict[str, str]:  # fmt: skip
    """Labels of one series, in order; what is not known is left out."""
    gpu = key[0] if keys == ("gpu",) and key else None
    words = (f"{word} {value}" for word, value in zip(keys, key, strict=False))
    is_rank = keys == PROCESS_KEYS and rank is not None  # which is told; the node has no keys
    own = "" if is_rank else entity_name(entity) or " ".join(words)
    named = {"run": run, "host": host, "rank": rank, "gpu": gpu, "entity": own}
    found = {name: str(value) for name, value in named.items() if value not in (None, "")}
    return {**found, **{label(name): value for name, value in instrument.attributes.items()}}


def label(attribute: str) -> str:
    """A label for an attribute of OpenTelemetry: `cpu.mode` as `cpu_mode`."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", attribute)
