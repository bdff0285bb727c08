"""The memory controllers' and links' counters of each socket, opened and summed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from haiprof.agent.samplers.uncore import (
    READ,
    REMOTE,
    TOTAL,
    WRITE,
    Metric,
    Pmu,
    find_pmus,
    metrics_of,
    unit_events,
)
from haiprof.linux.cpu_sockets import no_core_pmu, read_cpu, socket_of_cpu
from haiprof.linux.perf_events import (
    Event,
    Kernel,
    ScaledSum,
    Share,
    close_all,
    open_counter,
    refusal,
)
from haiprof.linux.readings import Entity, Reading, Unavailable, Value

_EVERY_CPU = 0  # the kernel.perf_event_paranoid that allows counting a whole CPU


@dataclass(frozen=True, slots=True)
class _OpenColumn:
    """One column as it is counted on each socket."""

    sums: Mapping[int, Sequence[ScaledSum]]
    origin: str


class Uncore:
    """Opens the counters of a CPU model on every socket."""

    def __init__(self, root: Path, kernel: Kernel) -> None:
        self._root = root
        self._kernel = kernel
        self._sockets = socket_of_cpu(root)
        self._shares = {socket: Share() for socket in set(self._sockets.values())}

    def entities(self) -> list[Entity]:
        """One per socket; a column that cannot be counted says why."""
        cpu = read_cpu(self._root)
        try:
            metrics = metrics_of(cpu, self._root)
        except Unavailable as why:
            raise Unavailable(
                no_core_pmu(self._root, cpu) or why.reason, status="unsupported"
            ) from None
        columns = {column: self._column(column, metrics) for column in (READ, WRITE, TOTAL, REMOTE)}
        if all(isinstance(columns[column], Unavailable) for column in (READ, WRITE, TOTAL)):
            _close(columns.values())
            known = {metric.column for metric in metrics}
            raise worst([c for name, c in columns.items() if isinstance(c, Unavailable)
                         and name in known])  # fmt: skip
        return [self._entity(socket, columns) for socket in sorted(self._shares)]

    def _column(self, column: str, metrics: Sequence[Metric]) -> _OpenColumn | Unavailable:
        """Opens all counters of a column, or none, with the reason."""
        sums: dict[int, list[ScaledSum]] = {socket: [] for socket in self._shares}
        names: list[str] = []
        try:
            for metric in metrics:
                if metric.column == column:
                    for pmu in self._pmus(metric):
                        names.append(pmu.name)
                        self._open(metric, pmu, sums)
        except Unavailable as why:
            _close([_OpenColumn(sums, "")])
            return why
        if not names:
            reason = f"no event is known for {column} on {read_cpu(self._root)}"
            return Unavailable(reason, status="unsupported")
        if not all(sums.values()):
            _close([_OpenColumn(sums, "")])
            return Unavailable(f"{names[0]}: not on every socket", status="unsupported")
        return _OpenColumn(sums, f"perf_event_open of {len(names)} PMUs: {names[0]} to {names[-1]}")

    def _pmus(self, metric: Metric) -> list[Pmu]:
        try:
            pmus = find_pmus(self._root, metric.pmu)
        except (OSError, ValueError) as error:
            raise Unavailable(f"{metric.pmu}: {error}", status="unsupported") from None
        if pmus:
            return pmus
        name = metric.pmu.split("(")[0].removesuffix(r"\Z").replace(r"\d+", "*")
        if metric.column == REMOTE and len(self._shares) == 1:
            raise Unavailable("there is no other socket")
        cpu = read_cpu(self._root)
        where = "virtual machine" if cpu.virtual else "kernel"
        raise Unavailable(no_core_pmu(self._root, cpu) or f"this {where} shows no PMU {name}")

    def _open(self, metric: Metric, pmu: Pmu, sums: Mapping[int, list[ScaledSum]]) -> None:
        try:
            events = list(unit_events(metric, pmu))
        except ValueError as error:
            raise Unavailable(f"{pmu.name}: {error}", status="unsupported") from None
        for event, unit in events:
            for cpu in pmu.cpus:
                socket = self._sockets.get(cpu)
                if socket is None:
                    raise Unavailable(f"{pmu.name}: the socket of CPU {cpu} is not known")
                sums[socket].append(self._open_event(event, unit, cpu, self._shares[socket]))

    def _open_event(self, event: Event, unit: Fraction, cpu: int, share: Share) -> ScaledSum:
        try:
            return ScaledSum([open_counter(self._kernel, event, share, pid=-1, cpu=cpu)], unit)
        except OSError as error:
            raise refusal(error, event, self._root, allowing=_EVERY_CPU, virtual="") from None

    def _entity(self, socket: int, columns: Mapping[str, _OpenColumn | Unavailable]) -> Entity:
        share = self._shares[socket]
        origins = {n: each.origin for n, each in columns.items() if isinstance(each, _OpenColumn)}
        sums = [s for c in columns.values() if isinstance(c, _OpenColumn) for s in c.sums[socket]]
        return Entity(
            key=(socket,),
            name=f"socket {socket} (uncore)",
            readings=(
                Reading(
                    columns=(READ, WRITE, TOTAL, REMOTE, "counted_ratio"),
                    origin="perf_event_open, uncore PMUs",
                    read=lambda: (*_values(socket, columns), share.take()),
                    close=lambda: close_all(sums),
                ),
            ),
            details={"source": "uncore", "origins": origins},
        )


def _values(
    socket: int, columns: Mapping[str, _OpenColumn | Unavailable]
) -> tuple[Value | Unavailable, ...]:
    read, write, total, remote = (
        _value(socket, columns[column]) for column in (READ, WRITE, TOTAL, REMOTE)
    )
    if isinstance(columns[TOTAL], Unavailable) and isinstance(columns[READ], _OpenColumn):
        total = read if isinstance(read, Unavailable) else _plus(read, write)
    return read, write, total, remote


def _plus(read: int, write: int | Unavailable) -> int | Unavailable:
    return write if isinstance(write, Unavailable) else read + write


def _value(socket: int, counters: _OpenColumn | Unavailable) -> int | Unavailable:
    """The sum of a column's counters, or why there is none now."""
    if isinstance(counters, Unavailable):
        return counters
    try:
        return sum([each.read() for each in counters.sums[socket]])
    except OSError as error:
        return Unavailable(f"{counters.origin}: {error.strerror}", status="unsupported")
    except Unavailable as why:
        return why


def _close(columns: Iterable[_OpenColumn | Unavailable]) -> None:
    for column in columns:
        if isinstance(column, _OpenColumn):
            for sums in column.sums.values():
                close_all(sums)


def worst(reasons: Sequence[Unavailable]) -> Unavailable:
    """The reason with a remedy, else the first one."""
    return min(reasons, key=lambda why: ("denied", "unsupported", "absent").index(why.status))
