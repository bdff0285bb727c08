"""A run for other tools: tables as CSV and Parquet, counters for Prometheus and OpenTelemetry."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from haiprof.base.errors import UsageError, convert_os_errors
from haiprof.base.safe_files import make_named_folder, output_file
from haiprof.base.units import NS_PER_MS, NS_PER_S, SPACES, visible
from haiprof.run_analysis.counter_sources import RawSeries, raw_counters
from haiprof.run_analysis.run_files import RunFiles
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format import otel_names as otel
from haiprof.run_format.entities import PROCESS_KEYS, Key, process_key

_LIST_SEPARATOR = "; "
_ROWS_AT_ONCE = 100_000


def write_csv(frame: pl.DataFrame, file: BinaryIO) -> None:
    """Writes a header line and one line per row; lists of words are joined by semicolons."""
    lists = [name for name, dtype in frame.schema.items() if isinstance(dtype, pl.List)]
    joined = [pl.col(name).list.join(_LIST_SEPARATOR) for name in lists]
    table = frame.with_columns(joined)
    file.write(table.clear().write_csv().encode())
    for part in table.iter_slices(_ROWS_AT_ONCE):
        file.write(part.write_csv(include_header=False).encode())


def write_parquet(frame: pl.DataFrame, file: BinaryIO) -> None:
    """Writes the frame with its types; times are integers in ns of Unix time."""
    frame.write_parquet(file)


def print_text(write: Callable[[BinaryIO], None], stdout: BinaryIO) -> None:
    """Writes text to a pipe or file byte for byte, to a terminal without what would steer that."""
    if stdout.isatty():
        shown = io.BytesIO()
        write(shown)
        text = shown.getvalue().decode("utf-8", "replace")
        stdout.write(visible(text, keep=SPACES).encode())
    else:
        write(stdout)
    stdout.flush()


def write_tables(tables: Mapping[str, pl.DataFrame], folder: Path, *, force: bool) -> list[Path]:
    """Writes one file per table, named after it."""
    with convert_os_errors(UsageError, f"{folder}: cannot be made"):
        make_named_folder(folder)
    paths = {name: folder / f"{name}.csv" for name in tables}
    for path in paths.values():  # before anything is written
        if path.exists() and not force:
            raise UsageError(f"{path}: already exists", hint="--force replaces it")
    for name, path in paths.items():
        with output_file(path, force=force, below=folder) as file:
            write_csv(tables[name], file)
    return list(paths.values())


_CUMULATIVE = 2  # AggregationTemporality

Attributes = Mapping[str, "str | int"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """Attributes of a run's OpenTelemetry resources."""

    name: str  # Name of the run directory
    version: str = ""  # The haiprof that recorded it
    reports: Mapping[tuple[str, Key], Mapping[str, Any]] = field(default_factory=dict)
    """rank.json by host and process."""
    processes: Mapping[tuple[object, object], tuple[str, Key]] = field(default_factory=dict)
    """Host and process by rank and attempt."""


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


MOST_POINTS = 20_000  # Of one request that is pushed: about 4 MB as JSON, before it is compressed


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One ExportMetricsServiceRequest."""

    text: str  # As JSON
    point_count: int


def otlp_batches(
    series: Iterable[RawSeries], run: RunIdentity, *, most: int = MOST_POINTS
) -> Iterator[Batch]:
    """The same requests in pieces that a collector takes, in the order of time of each series."""
    for (host, process), own in _by_resource(series).items():
        resource = _resource(run, host, process, own)
        held: list[RawSeries] = []
        count = 0
        parts = (each.take(slice(start, start + most)) for each in own
                 for start in range(0, each.time_ns.size, most))  # fmt: skip
        for part in parts:
            if held and count + part.time_ns.size > most:
                yield _batch(_resource_metrics(resource, held, run.version), count)
                held, count = [], 0
            held, count = [*held, part], count + part.time_ns.size
        if held:
            yield _batch(_resource_metrics(resource, held, run.version), count)


def step_batches(
    steps: pl.DataFrame, run: RunIdentity, *, most: int = MOST_POINTS
) -> Iterator[Batch]:
    """How long each step of each rank took, at its end (`haiprof.step.duration`)."""
    columns = ("rank", "attempt", "start_ns", "step_ns")
    for (rank, attempt), own in (
        steps.select(columns).drop_nulls().group_by("rank", "attempt", maintain_order=True)
    ):
        host, process = run.processes.get((rank, attempt), ("", ()))
        more = {"haiprof.rank": int(str(rank))} | ({"process.pid": process[0]} if process else {})
        resource = {"attributes": _attributes(_node_resource(run, host) | more)}
        scope = {"name": "haiprof", "version": run.version}
        for part in own.iter_slices(most):
            points = [
                {"timeUnixNano": str(start + took), "asDouble": took / NS_PER_S}
                for start, took in part.select("start_ns", "step_ns").rows()
            ]
            metric = {"name": "haiprof.step.duration", "unit": "s",
                      "description": "how long a training step took, at its end",
                      "gauge": {"dataPoints": points}}  # fmt: skip
            metrics = [{"scope": scope, "metrics": [metric]}]
            yield _batch([_json({"resource": resource, "scopeMetrics": metrics})], len(points))


def _batch(resource_metrics: Iterable[str], count: int) -> Batch:
    return Batch(text=f'{{"resourceMetrics":[{"".join(resource_metrics)}]}}', point_count=count)


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
    found = _node_resource(run, host)
    if process:
        python = run.reports.get((host, process), {}).get("python")
        own = {"process.pid": process[0], "process.runtime.version": python,
               "haiprof.rank": series[0].rank}  # fmt: skip
        found |= {name: value for name, value in own.items() if value not in (None, "")}
    return found


def _node_resource(run: RunIdentity, host: str) -> dict[str, str | int]:
    found = {"service.name": "haiprof", "service.version": run.version, "host.name": host,
             "haiprof.run": run.name}  # fmt: skip
    return {name: value for name, value in found.items() if value}


def _resource_metrics(
    resource: Attributes, series: Sequence[RawSeries], version: str
) -> Iterator[str]:
    by_name: dict[str, list[tuple[otel.Instrument, RawSeries]]] = {}
    for each in series:
        meaning = otel.instrument(each.source, each.column.name)
        by_name.setdefault(meaning.name, []).append((meaning, each))
    scope = {"name": "haiprof", "version": version}
    yield f'{{"resource":{_json({"attributes": _attributes(resource)})},"scopeMetrics":['
    yield f'{{"scope":{_json(scope)},"metrics":['
    for at, parts in enumerate(by_name.values()):
        yield ("," if at else "") + _json(_metric(parts))
    yield f'],"schemaUrl":"{otel.SCHEMA_URL}"}}],"schemaUrl":"{otel.SCHEMA_URL}"}}'


def _metric(parts: Sequence[tuple[otel.Instrument, RawSeries]]) -> dict[str, Any]:
    meaning = parts[0][0]
    points = [point for own, series in parts for point in _points(own, series)]
    metric = {"name": meaning.name, "description": meaning.description, "unit": meaning.unit}
    if meaning.kind == "gauge":
        return {**metric, "gauge": {"dataPoints": points}}
    grows = meaning.kind == "counter"
    kind = {"aggregationTemporality": _CUMULATIVE, "isMonotonic": grows, "dataPoints": points}
    return {**metric, "sum": kind}


def _points(meaning: otel.Instrument, series: RawSeries) -> Iterator[dict[str, Any]]:
    of_process = series.keys == PROCESS_KEYS
    own: dict[str, str | int] = {**meaning.attributes}
    if series.key and not of_process:
        own |= otel.entity_attributes(series.source, series.keys, series.key, series.entity)
    if series.rank is not None and not of_process:
        own["haiprof.rank"] = series.rank
    attributes = _attributes(own)
    whole = series.values.dtype.kind == "i" and meaning.divisor == 1
    rows = (series.time_ns.tolist(), series.start_ns.tolist(), series.values.tolist())
    for time_ns, start_ns, value in zip(*rows, strict=True):
        begin = {} if meaning.kind == "gauge" else {"startTimeUnixNano": str(start_ns)}
        number = {"asInt": str(value)} if whole else {"asDouble": value / meaning.divisor}
        yield {"attributes": attributes, "timeUnixNano": str(time_ns), **begin, **number}


def _attributes(attributes: Attributes) -> list[dict[str, Any]]:
    return [
        {"key": name,
         "value": {"stringValue" if isinstance(value, str) else "intValue": str(value)}}
        for name, value in attributes.items()
    ]  # fmt: skip


def _json(value: Any) -> str:  # noqa: ANN401 - any JSON value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def last_values(series: Iterable[RawSeries], *, run: str) -> list[otel.Family]:
    """The samples that Prometheus would have scraped last."""
    samples = []
    for each in series:
        meaning = otel.instrument(each.source, each.column.name)
        labels = otel.series_labels(
            meaning, run=run, host=each.host, keys=each.keys, key=each.key, entity=each.entity,
            rank=each.rank,
        )  # fmt: skip
        value, time_ns = each.values[-1].item() / meaning.divisor, int(each.time_ns[-1])
        samples.append(otel.Sample(instrument=meaning, labels=labels, value=value, time_ns=time_ns))
    return otel.families(samples)


def exposition(found: Iterable[otel.Family]) -> Iterator[str]:
    """The text format, family by family."""
    for family in found:
        name = family.instrument.prometheus_sample_name
        kind = "counter" if family.instrument.kind == "counter" else "gauge"
        yield f"# HELP {name} {_escape(family.instrument.description)}\n# TYPE {name} {kind}\n"
        for sample in family.samples:
            labels = ",".join(f'{k}="{_quote(v)}"' for k, v in sample.labels.items())
            yield f"{name}{{{labels}}} {sample.value!r} {sample.time_ns // NS_PER_MS}\n"


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quote(text: str) -> str:
    return _escape(text).replace('"', r"\"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """How much was written."""

    count: int
    unit: str  # `rows` or `series`
    notes: tuple[str, ...]  # Notes on what was cut, damaged or missing in the run


def write_export(
    analyzer: RunFrames, form: str, path: Path | None, *,
    what: str = "counters", lines: bool = False, force: bool, stdout: BinaryIO,
) -> Exported:  # fmt: skip
    """Writes one export, as `csv`, `parquet`, `prometheus` or `otlp-json`.

    The first two hold `counters`, `steps`, `phases` or `ranks`, the others counters only. With
    `lines` OTLP has one request per line, node and process.
    """
    if form in ("csv", "parquet"):
        frames: dict[str, Callable[[], pl.DataFrame]] = {
            "counters": analyzer.counters, "steps": analyzer.steps,
            "phases": analyzer.phases, "ranks": analyzer.ranks,
        }  # fmt: skip
        frame = frames[what]()
        write = partial(write_csv if form == "csv" else write_parquet, frame)
        exported = Exported(count=frame.height, unit="rows", notes=tuple(analyzer.notes()))
    else:
        files = analyzer.files
        series, notes = raw_counters(files)
        if form == "prometheus":
            text = exposition(last_values(series, run=_run_name(files)))
        else:
            text = otlp_requests(series, run_identity(files), lines=lines)
        write = partial(_write_text, text)
        exported = Exported(count=len(series), unit="series", notes=notes)
    if path is None:
        print_text(write, stdout)
        return exported
    with output_file(path, force=force) as file:
        write(file)
    return exported


def _write_text(pieces: Iterable[str], file: BinaryIO) -> None:
    file.writelines(piece.encode("utf-8", "replace") for piece in pieces)


def _run_name(run: RunFiles) -> str:
    return run.paths.root.resolve().name.encode("utf-8", "replace").decode()


def run_identity(run: RunFiles) -> RunIdentity:
    """What a run's resources are called."""
    version = run.manifest.haiprof_version if run.manifest is not None else ""
    processes: dict[tuple[object, object], tuple[str, Key]] = {
        (rank.rank, rank.attempt): (str(rank.report.get("host")), process_key(rank.report))
        for rank in run.ranks
    }
    reports = {processes[rank.rank, rank.attempt]: rank.report for rank in run.ranks}
    return RunIdentity(name=_run_name(run), version=version, reports=reports, processes=processes)
