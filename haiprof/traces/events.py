"""One event of a Chrome trace as msgspec decodes it: only the fields that a table has."""

from __future__ import annotations

from typing import Any

import msgspec

from haiprof.traces.tables import NULL

Number = int | float | str | None
Text = str | int | float | None


def _named(name: str, default: Any = NULL) -> Any:  # noqa: ANN401 - as msgspec declares it
    return msgspec.field(name=name, default=default)


class Args(msgspec.Struct, gc=False, frozen=True):
    """The arguments that some table keeps; missing ones are NULL, NaN or empty."""

    external_id: Number = _named("External id")
    correlation: Number = NULL
    device: Number = NULL
    stream: Number = NULL
    bytes: Number = NULL
    bandwidth_gb: Number = _named("memory bandwidth (GB/s)", float("nan"))
    blocks_per_sm: Number = _named("blocks per SM", float("nan"))
    warps_per_sm: Number = _named("warps per SM", float("nan"))
    occupancy: Number = _named("est. achieved occupancy %", float("nan"))
    graph_node: Number = _named("graph node id")
    record_function: Number = _named("Record function id")
    sequence_number: Number = _named("Sequence number")
    forward_tid: Number = _named("Fwd thread id")
    input_dims: msgspec.Raw = _named("Input Dims", msgspec.Raw())
    input_types: msgspec.Raw = _named("Input type", msgspec.Raw())
    python_id: Number = _named("Python id")
    python_parent: Number = _named("Python parent id")
    python_module: Number = _named("Python module id")
    memory_bytes: Number = _named("Bytes")
    address: Number = _named("Addr")
    device_type: Number = _named("Device Type")
    device_id: Number = _named("Device Id")
    total_allocated: Number = _named("Total Allocated")
    total_reserved: Number = _named("Total Reserved")
    collective: Text = _named("Collective name", "")
    dtype: Text = ""
    in_nelems: Number = _named("In msg nelems")
    out_nelems: Number = _named("Out msg nelems")
    group_size: Number = _named("Group size")
    process_group: Text = _named("Process Group Name", "")
    group_ranks: msgspec.Raw = _named("Process Group Ranks", msgspec.Raw())
    collective_seq: Number = _named("Seq")
    sync_kind: Text = _named("cuda_sync_kind", "")
    wait_on_stream: Number = NULL
    wait_on_event: Number = _named("wait_on_cuda_event_id")
    wait_on_correlation: Number = _named("wait_on_cuda_event_record_corr_id")
    old_external_id: Number = _named("external id")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    """One event; `ts` and `dur` in us."""

    ph: str = ""
    cat: str = ""
    name: Text = ""
    pid: Number = NULL
    tid: Number = NULL
    ts: Number = float("nan")
    dur: Number = 0
    id: Number = NULL
    args: Args | None = NO_ARGS


class ExactEvent(msgspec.Struct, gc=False):
    """The same with times as they are written, for stamps that a float cannot hold to 1 ns."""

    ph: str = ""
    cat: str = ""
    name: Text = ""
    pid: Number = NULL
    tid: Number = NULL
    ts: msgspec.Raw = msgspec.Raw(b"nan")
    dur: msgspec.Raw = msgspec.Raw(b"0")
    id: Number = NULL
    args: Args | None = NO_ARGS


EVENTS: msgspec.json.Decoder[list[Event]] = msgspec.json.Decoder(list[Event])
EXACT_EVENTS: msgspec.json.Decoder[list[ExactEvent]] = msgspec.json.Decoder(list[ExactEvent])
