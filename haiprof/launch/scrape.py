"""The live scrape: the latest sample of every counter, for a Prometheus on this machine.

Nothing here runs unless `--prometheus-port` was given; the port is on the loopback interface.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from haiprof.config import Options
from haiprof.errors import RunFormatError
from haiprof.launch.say import say
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.otel import Instrument, instruments
from haiprof.rundir.owners import ranks_by_key
from haiprof.rundir.prometheus import Family, Sample, families, series_labels
from haiprof.rundir.reader import read_json
from haiprof.rundir.schema import NULL_I64, counter_end
from haiprof.rundir.writer import LineWriter
from haiprof.samplers.base import Clock
from haiprof.samplers.loop import SamplingLoop
from haiprof.samplers.stream import Stream

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOOPBACK = "127.0.0.1"
_STALE_INTERVALS = 3  # a source that has been silent for so long has no present value


class Scrape:
    """Serves `http://127.0.0.1:PORT/metrics` from daemon threads, until it is told to stop.

    Args:
        run: The run directory.
        host: This node's name, as ranks report it.
        options: They name the port.
        loop: Whose samples are shown.
    """

    def __init__(self, run: RunPaths, host: str, options: Options, loop: SamplingLoop) -> None:
        self._run = run
        self._host = host
        self._options = options
        self._latest = Latest(run, host, lambda: loop.streams)
        self._stop = threading.Event()

    def start(self) -> None:
        """Opens the port, in a thread of its own: names may be slow to look up."""
        threading.Thread(target=self._serve, name="haiprof-scrape", daemon=True).start()

    def stop(self) -> None:
        """Closes the port within a second; does not wait for it."""
        self._stop.set()

    def _serve(self) -> None:
        port = self._options.prometheus_port
        try:
            from prometheus_client import CollectorRegistry, start_http_server

            registry = CollectorRegistry()
            registry.register(self._latest)
            server, _ = start_http_server(port, addr=LOOPBACK, registry=registry)
        except (ImportError, OSError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            self._note({"port": port, "status": "refused", "reason": reason})
            say(f"port {port}: {reason}: no live counters for Prometheus; the job goes on")
            return
        self._note({"port": port, "status": "serving"})
        if not self._options.quiet:
            say(f"live counters for Prometheus at http://{LOOPBACK}:{port}/metrics")
        self._stop.wait()
        server.shutdown()
        server.server_close()

    def _note(self, line: Mapping[str, object]) -> None:
        """A line in the node's events file; a disk that is full or gone keeps it."""
        try:
            writer = LineWriter(self._run.node(self._host).events)
        except OSError:
            return
        writer.append({"type": "scrape", "time_ns": time.perf_counter_ns(), **line})
        writer.close()


class Latest:
    """What prometheus-client asks at each scrape; reads what the sampling thread has put down.

    Args:
        run: The run directory.
        host: This node's name.
        streams: Gives those whose samples are shown.
        clock: CLOCK_MONOTONIC in ns.
    """

    def __init__(
        self,
        run: RunPaths,
        host: str,
        streams: Callable[[], Sequence[Stream]],
        *,
        clock: Clock = time.perf_counter_ns,
    ) -> None:
        self._run = run
        self._host = host
        self._streams = streams
        self._clock = clock
        self._reports: dict[str, tuple[int, Mapping[str, Any]]] = {}

    def collect(self) -> Iterator[Metric]:
        """The metrics of one scrape."""
        from prometheus_client.metrics_core import Metric

        for family in self.families():
            meaning = family.instrument
            kind = "counter" if meaning.kind == "counter" else "gauge"
            metric = Metric(meaning.prometheus_name, meaning.description, kind)
            for sample in family.samples:
                metric.add_sample(meaning.prometheus_sample_name, dict(sample.labels), sample.value)
            yield metric

    def families(self) -> list[Family]:
        """The latest samples; a source that has fallen silent is left out."""
        reports = self._own_reports()
        now = self._clock()
        return families(
            sample
            for stream in self._streams()
            if now - stream.latest[0] <= _STALE_INTERVALS * stream.pace.interval_ns
            for sample in self._of_stream(stream, reports)
        )

    def _of_stream(
        self, stream: Stream, reports: Iterable[tuple[int, Mapping[str, Any]]]
    ) -> Iterator[Sample]:
        table = stream.sampler.table
        entities, (_, data) = stream.entities, stream.latest
        ranks = ranks_by_key(reports, table.keys, entities)
        meanings = instruments()
        for record in table.struct.iter_unpack(data):
            row = dict(zip((column.name for column in table.columns), record, strict=True))
            key = tuple(row[name] for name in table.keys)
            entity, rank = entities.get(key, {}), ranks.get(key)
            for column in table.metrics:
                value = _known(row[column.name], column.kind)
                meaning = meanings.get((table.name, column.name))
                if value is None or meaning is None:
                    continue
                labels = self._labels(meaning, table.keys, key, entity, rank)
                yield Sample(
                    instrument=meaning,
                    labels=labels,
                    value=value / meaning.divisor,
                    time_ns=row["time_ns"],
                )

    def _labels(
        self,
        meaning: Instrument,
        keys: tuple[str, ...],
        key: tuple[int, ...],
        entity: Mapping[str, Any],
        rank: int | None,
    ) -> dict[str, str]:
        return series_labels(
            meaning,
            run=self._run.root.name,
            host=self._host,
            keys=keys,
            key=key,
            entity=entity,
            rank=rank,
        )

    def _own_reports(self) -> list[tuple[int, Mapping[str, Any]]]:
        """Ranks of this node; each rank.json of the job is read once."""
        for rank, _, paths in self._run.rank_folders():
            name = paths.root.name
            if name not in self._reports:
                try:
                    self._reports[name] = (rank, read_json(paths.report))
                except RunFormatError:
                    continue  # it is being written: the next scrape will find it
        found = list(self._reports.values())
        return [(rank, report) for rank, report in found if report.get("host") == self._host]


def _known(value: float, kind: str) -> float | None:
    """The value, unless it is missing; a count below 0 is damage."""
    if value == NULL_I64 or not math.isfinite(value):
        return None
    return None if counter_end(kind) is not None and value < 0 else value
