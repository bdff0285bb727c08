"""Every sampler in its order, and each counter of this node read once: value, source, cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from haiprof.agent.samplers.cgroup import CgroupSampler
from haiprof.agent.samplers.filesystem import FilesystemSampler
from haiprof.agent.samplers.gpu import DcgmSampler, GpuHealthSampler, GpuSampler
from haiprof.agent.samplers.host import HostSampler, NumaSampler
from haiprof.agent.samplers.memory_traffic import MemoryBandwidthSampler, RemoteMemorySampler
from haiprof.agent.samplers.network import (
    EthernetSampler,
    InfinibandHealthSampler,
    InfinibandSampler,
)
from haiprof.agent.samplers.ranks import PlacementSampler, ProcessSampler
from haiprof.agent.samplers.table import ALL_METRICS, CounterState, Missing, Node, TableSampler
from haiprof.linux.readings import Status, Unavailable
from haiprof.run_format.schema import Column

SAMPLERS = (
    HostSampler,
    CgroupSampler,
    ProcessSampler,
    PlacementSampler,
    GpuSampler,
    GpuHealthSampler,
    DcgmSampler,
    InfinibandSampler,
    InfinibandHealthSampler,
    EthernetSampler,
    FilesystemSampler,
    NumaSampler,
    MemoryBandwidthSampler,
    RemoteMemorySampler,
)


_NOTHING = "nothing of this source is here"


def survey(node: Node, kinds: Iterable[type[TableSampler]] = SAMPLERS) -> list[CounterState]:
    """Opens every sampler, reads each of its sources once, and closes it."""
    return [state for kind in kinds for state in _of_kind(kind, node)]


def counter_row(state: CounterState) -> dict[str, Any]:
    """One counter as `haiprof doctor --json` prints it; `name` is `<sampler>.<metric>`."""
    return {
        "name": f"{state.source}.{state.metric}",
        "entity": state.entity,
        "status": state.status,
        "value": state.value,
        "unit": state.unit,
        "source": state.origin,
        "read_ns": state.read_ns,
        "reason": state.reason,
        "remedy": state.remedy,
    }


def _of_kind(kind: type[TableSampler], node: Node) -> list[CounterState]:
    missing: list[Missing] = []
    states: list[CounterState] = []
    try:
        sampler = kind(node)
        try:
            missing = sampler.open()
            if all(each.metric != ALL_METRICS for each in missing):
                states = sampler.states()
                missing = [*missing, *sampler.drain_missing()]
        finally:
            sampler.close()
    except Exception as error:  # noqa: BLE001  one sampler must not stop the others
        why = f"the sampler failed, please report it: {type(error).__name__}: {error}"
        missing, states = [Missing(ALL_METRICS, why, "unsupported")], []
    columns = {column.name: column for column in kind.table.metrics}
    whole = [each for each in missing if each.metric == ALL_METRICS]
    if whole and not states:
        return _none_of(kind.name, columns.values(), whole[0])
    return [*states, *_unread(kind.name, columns, states=states, missing=missing)]


def _unread(
    name: str, columns: Mapping[str, Column], *, states: Sequence[CounterState],
    missing: Sequence[Missing],
) -> Iterator[CounterState]:  # fmt: skip
    """Columns and entities without a state, with the reasons that the sampler gave."""
    entities = {state.entity for state in states}
    for each in missing:
        if each.metric not in columns and each.metric not in entities:
            entities.add(each.metric)
            yield from _none_of(name, columns.values(), each, entity=each.metric)
    spoken = {state.metric for state in states}
    if not states and entities:
        return
    reasons = {each.metric: each for each in reversed(missing)}
    general = next(iter(missing), Missing(ALL_METRICS, _NOTHING)) if not states else None
    for column in columns.values():
        if column.name not in spoken:
            why = reasons.get(column.name) or general or Missing(column.name, "not read here")
            yield from _none_of(name, [column], why)


def _none_of(
    name: str, columns: Iterable[Column], why: Missing, *, entity: str = ""
) -> list[CounterState]:
    """Rows without a value; where nothing was read, the column's meaning names the source."""
    status: Status = "absent" if why.status == "available" else why.status
    refusal = Unavailable(why.reason, status=status, remedy=why.remedy)
    return [CounterState.of(name, entity, c, refusal, origin=c.meaning) for c in columns]
