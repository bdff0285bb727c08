"""Every sample of every counter as OTLP/JSON, as an OpenTelemetry collector takes and writes it.

Source: opentelemetry-proto, metrics/v1/metrics.proto and "JSON Protobuf Encoding" of the OTLP
specification: 64-bit integers are strings, enumerations are numbers, names are lowerCamelCase.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from haiprof.run_analysis.raw_counters import RawSeries
from haiprof.run_format.entities import PROCESS_KEYS, Key
from haiprof.run_format.otel_names import SCHEMA_URL, Instrument, entity_attributes, instrument

_CUMULATIVE = 2  # AggregationTemporality

Attributes = Mapping[str, "str | int"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Attributes of a run's OpenTelemetry resources."""

    name: str
    """Name of the run directory."""
    version: str = ""
    """The haiprof that recorded it."""
    reports: Mapping[tuple[str, Key], Mapping[str, Any]] = field(default_factory=dict)
    """rank.json by host and process."""


def otlp_requests(series: Iterable[RawSeries], run: RunIdentity, *, lines: bool) -> Iterator[str]:
    """One ExportMetricsServiceRequest, or one per line and resource, in pieces.

    Resources are the nodes, and the rank processes on them. A counter that went back begins anew:
    its points from there on have a later `startTimeUnixNano`.
    """
    between = "]}\n" + '{"resourceMetrics":[' if lines else ","
    yield '{"resourceMetrics":['
    for at, ((host, process), own) in enumerate(_by_resource(series).items()):
        yield between if at else ""
        yield from _resource_metrics(_resource(run, host, process, own), own, run.version)
    yield "]}\n"


def _by_resource(series: Iterable[RawSeries]) -> dict[tuple[str, Key], list[RawSeries]]:
    """By host and process; an empty key is the node itself."""
    found: dict[tuple[str, Key], list[RawSeries]] = {}
    for each in series:
        process = each.key if each.keys == PROCESS_KEYS else ()
        found.setdefault((each.host, process), []).append(each)
    return found


def _resource(
    run: RunIdentity, host: str, process: Key, series: Sequence[RawSeries]
) -> dict[str, str | int]:
    found: dict[str, str | int | None] = {
        "service.name": "haiprof",
        "service.version": run.version,
        "host.name": host,
        "haiprof.run": run.name,
    }
    if process:
        report = run.reports.get((host, process), {})
        found["process.pid"] = process[0]
        found["process.runtime.version"] = report.get("python")
        found["haiprof.rank"] = series[0].rank
    return {name: value for name, value in found.items() if value not in (None, "")}


def _resource_metrics(
    resource: Attributes, series: Sequence[RawSeries], version: str
) -> Iterator[str]:
    by_name: dict[str, list[tuple[Instrument, RawSeries]]] = {}
    for each in series:
        meaning = instrument(each.source, each.column.name)
        by_name.setdefault(meaning.name, []).append((meaning, each))
    scope = {"name": "haiprof", "version": version}
    yield f'{{"resource":{_json({"attributes": _attributes(resource)})},"scopeMetrics":['
    yield f'{{"scope":{_json(scope)},"metrics":['
    for at, parts in enumerate(by_name.values()):
        yield ("," if at else "") + _json(_metric(parts))
    yield f'],"schemaUrl":"{SCHEMA_URL}"}}],"schemaUrl":"{SCHEMA_URL}"}}'


def _metric(parts: Sequence[tuple[Instrument, RawSeries]]) -> dict[str, Any]:
    meaning = parts[0][0]
    points = [point for own, series in parts for point in _points(own, series)]
    metric = {"name": meaning.name, "description": meaning.description, "unit": meaning.unit}
    if meaning.kind == "gauge":
        return {**metric, "gauge": {"dataPoints": points}}
    grows = meaning.kind == "counter"
    kind = {"aggregationTemporality": _CUMULATIVE, "isMonotonic": grows, "dataPoints": points}
    return {**metric, "sum": kind}


def _points(meaning: Instrument, series: RawSeries) -> Iterator[dict[str, Any]]:
    of_process = series.keys == PROCESS_KEYS
    own: dict[str, str | int] = {**meaning.attributes}
    if series.key and not of_process:
        own |= entity_attributes(series.source, series.keys, series.key, series.entity)
    if series.rank is not None and not of_process:
        own["haiprof.rank"] = series.rank
    attributes = _attributes(own)
    whole = series.values.dtype.kind == "i" and meaning.divisor == 1
    rows = zip(
        series.time_ns.tolist(), series.start_ns.tolist(), series.values.tolist(), strict=True
    )
    for time_ns, start_ns, value in rows:
        point = {"attributes": attributes, "timeUnixNano": str(time_ns)}
        if meaning.kind != "gauge":
            point["startTimeUnixNano"] = str(start_ns)
        if whole:
            yield {**point, "asInt": str(value)}
        else:
            yield {**point, "asDouble": value / meaning.divisor}


def _attributes(attributes: Attributes) -> list[dict[str, Any]]:
    return [
        {
            "key": name,
            "value": {"stringValue": value} if isinstance(value, str) else {"intValue": str(value)},
        }
        for name, value in attributes.items()
    ]


def _json(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
