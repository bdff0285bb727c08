"""Chakra's file format (MLCommons, et_def.proto): protobuf messages by hand, one file per rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_VARINT, _BYTES = 0, 2
_WRAP = 1 << 64


def varint(number: int) -> bytes:
    """A number in groups of seven bits; a negative one as 64 bits in two's complement."""
    number %= _WRAP
    groups = bytearray([number & 0x7F])
    while number := number >> 7:
        groups[-1] |= 0x80
        groups.append(number & 0x7F)
    return bytes(groups)


def number_field(field: int, number: int) -> bytes:
    """A field of a number, a truth value or an enumeration."""
    return varint(field << 3 | _VARINT) + varint(number)


def bytes_field(field: int, value: bytes) -> bytes:
    """A field of bytes, or of a message."""
    return varint(field << 3 | _BYTES) + varint(len(value)) + value


def text_field(field: int, text: str) -> bytes:
    """A field of text; half of a surrogate pair becomes a question mark."""
    return bytes_field(field, text.encode("utf-8", "replace"))


def packed_field(field: int, numbers: Iterable[int]) -> bytes:
    """A repeated field of numbers; nothing where there are none."""
    packed = b"".join(map(varint, numbers))
    return bytes_field(field, packed) if packed else b""


def delimit(message: bytes) -> bytes:
    """A message with its length before it, as Chakra puts them one after the other."""
    return varint(len(message)) + message


VERSION = "0.0.4"
METADATA, MEM_LOAD, MEM_STORE, COMP, COMM_SEND, COMM_RECV, COMM_COLL = range(1, 8)  # NodeType
COMMUNICATION = (COMM_COLL, COMM_SEND, COMM_RECV)
NODE_TYPES = {
    METADATA: "METADATA", MEM_LOAD: "MEM_LOAD", MEM_STORE: "MEM_STORE", COMP: "COMP",
    COMM_SEND: "COMM_SEND", COMM_RECV: "COMM_RECV", COMM_COLL: "COMM_COLL",
}  # fmt: skip
COLLECTIVES = {
    "all_reduce": 0, "reduce": 1, "all_gather": 2, "gather": 3, "scatter": 4, "broadcast": 5,
    "all_to_all": 6, "reduce_scatter": 7, "barrier": 9,
}  # fmt: skip
"""CollectiveCommType, by haiprof's name of the collective."""

Attribute = int | str | bool
_INT64, _BOOL, _STRING = 9, 27, 29


def attribute(name: str, value: Attribute) -> bytes:
    """An AttributeProto: a number as int64."""
    if isinstance(value, str):
        return text_field(1, name) + text_field(_STRING, value)
    kind = _BOOL if isinstance(value, bool) else _INT64
    return text_field(1, name) + number_field(kind, int(value))


def _attributes(field: int, values: Mapping[str, Attribute | None]) -> bytes:
    return b"".join(bytes_field(field, attribute(name, value)) for name, value in values.items()
                    if value is not None)  # fmt: skip


def global_metadata(values: Mapping[str, Attribute | None]) -> bytes:
    """A GlobalMetadata; None values are left out."""
    return text_field(1, VERSION) + _attributes(2, values)


def io_info(values: str, shapes: str, types: str) -> bytes:
    """An IOInfo: inputs or outputs as text."""
    return text_field(1, values) + text_field(2, shapes) + text_field(3, types)


def node(
    number: int, name: str, kind: int, *, control: Sequence[int], data: Sequence[int],
    start_us: int | None, duration_us: int | None, inputs: bytes, outputs: bytes,
    attributes: Mapping[str, Attribute | None],
) -> bytes:  # fmt: skip
    """A Node; None values are left out, which readers see as 0."""
    message = number_field(1, number) + text_field(2, name) + number_field(3, kind)
    message += packed_field(4, control) + packed_field(5, data)
    message += b"" if start_us is None else number_field(6, start_us)
    message += b"" if duration_us is None else number_field(7, duration_us)
    message += bytes_field(8, inputs) + bytes_field(9, outputs)
    return message + _attributes(10, attributes)
