"""The live Prometheus endpoint: the latest sample of every counter, on this machine.

Nothing here runs unless `--prometheus-port` was given; the port is on the loopback interface.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from haiprof.agent.samplers.loop import Stream
from haiprof.agent.samplers.table import RankReports
from haiprof.base import local_http
from haiprof.base.errors import RunFormatError
from haiprof.base.messages import print_message
from haiprof.base.options import ALL_USERS, Options, user_id
from haiprof.linux.readings import Clock
from haiprof.run_format.entities import ranks_by_key
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.otel_names import Family, Sample, families, instruments, series_labels
from haiprof.run_format.schema import counter_end, is_known
from haiprof.run_format.writer import note_line

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

LOOPBACK = "127.0.0.1"
_STALE_INTERVALS = 3  # a source without a sample for so long has no current value


class Scrape:
    """Serves `http://127.0.0.1:PORT/metrics` from daemon threads until `stop`."""

    def __init__(
        self, run: RunPaths, host: str, options: Options, streams: Callable[[], Sequence[Stream]]
    ) -> None:
        self._events = run.node(host).events
        self._options = options
        self._latest = Latest(run, host, streams)
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
            server = _server(self._latest, port, readers(self._options.prometheus_allow))
        except (ImportError, OSError) as error:
            why = getattr(error, "strerror", None) or str(error)
            self._note({"port": port, "status": "refused", "reason": why})
            print_message(f"port {port}: {why}: no live counters for Prometheus; all else goes on")
            return
        self._note({"port": port, "status": "serving"})
        if not self._options.quiet:
            named = ", ".join(["you", *self._options.prometheus_allow])
            whom = "every user of" if server.readers is None else f"{named} and root on"
            print_message(
                f"live counters for Prometheus at http://{LOOPBACK}:{port}/metrics "
                f"for {whom} this machine"
            )
        threading.Thread(
            target=server.serve_forever, name="haiprof-scrape-port", daemon=True
        ).start()
        self._stop.wait()
        server.shutdown()
        server.server_close()

    def _note(self, line: Mapping[str, object]) -> None:
        note_line(self._events, {"type": "scrape", "time_ns": time.perf_counter_ns(), **line})


class _Server(local_http.GuardedServer, WSGIServer):
    """The port; its errors are not the job's."""


class _Handler(local_http.GuardedHandler, WSGIRequestHandler):
    """One scrape."""

    def get_stderr(self) -> io.StringIO:
        """Discards wsgiref's tracebacks."""
        return io.StringIO()


def _server(latest: Latest, port: int, uids: frozenset[int] | None) -> _Server:
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry()
    registry.register(latest)
    metrics, hosts = make_wsgi_app(registry), local_http.allowed_hosts(LOOPBACK)

    def app(environ: dict[str, Any], start: Any) -> Iterable[bytes]:  # noqa: ANN401 - as WSGI has it
        if local_http.is_allowed(str(environ.get("HTTP_HOST", "")), hosts):
            answer: Iterable[bytes] = metrics(environ, start)
            return answer
        start("403 Forbidden", [("Content-Type", "text/plain")])
        return [b"unknown host\n"]  # DNS rebinding: another site's page under a name of its own

    server = make_server(LOOPBACK, port, app, server_class=_Server, handler_class=_Handler)
    server.readers = uids
    return server


def readers(allowed: Iterable[str]) -> frozenset[int] | None:
    """Users who may scrape: the job's, root, and those of `--prometheus-allow`; None: all may."""
    own, names = local_http.own_readers(LOOPBACK), tuple(allowed)
    return None if own is None or ALL_USERS in names else own | {user_id(name) for name in names}


@dataclass(eq=False)
class Latest:
    """The collector of prometheus-client: reads the latest samples of the sampling thread."""

    run: RunPaths
    host: str
    streams: Callable[[], Sequence[Stream]]
    clock: Clock = time.perf_counter_ns

    def __post_init__(self) -> None:
        self._reports = RankReports(self.run.ranks, clock=self.clock)

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
        found = []
        for rank, _, paths in self.run.rank_folders():
            with contextlib.suppress(RunFormatError):  # being written: the next scrape finds it
                found.append((rank, self._reports.content(paths.root.name)))
        reports = [(rank, report) for rank, report in found if report.get("host") == self.host]
        now = self.clock()
        return families(
            sample
            for stream in self.streams()
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
                value = row[column.name]
                meaning = meanings.get((table.name, column.name))
                damaged = counter_end(column.kind) is not None and value < 0
                if meaning is None or damaged or not is_known(value):
                    continue
                labels = series_labels(
                    meaning, run=self.run.root.name, host=self.host, keys=table.keys, key=key,
                    entity=entity, rank=rank,
                )  # fmt: skip
                value, time_ns = value / meaning.divisor, row["time_ns"]
                yield Sample(instrument=meaning, labels=labels, value=value, time_ns=time_ns)
