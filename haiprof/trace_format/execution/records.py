"""One node of an execution trace as msgspec decodes it, of all schemas since 1.0.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

_NONE = msgspec.Raw(b"[]")
_NO_ATTRIBUTES = msgspec.Raw(b"null")


class Values(msgspec.Struct, gc=False):
    """Inputs or outputs of an operator; each is the JSON array of the file."""

    values: msgspec.Raw = _NONE
    shapes: msgspec.Raw = _NONE
    types: msgspec.Raw = _NONE
    strides: msgspec.Raw = _NONE


class Node(msgspec.Struct, gc=False):
    """A node of schema 1.0.2-chakra and later, with what `haiprof link` or Chakra's linker adds."""

    id: Any = None
    name: Any = None
    ctrl_deps: Any = None
    inputs: Values = msgspec.field(default_factory=Values)
    outputs: Values = msgspec.field(default_factory=Values)
    attrs: msgspec.Raw = _NO_ATTRIBUTES
    ts: Any = None
    inclusive_dur: Any = None
    exclusive_dur: Any = None
    cat: Any = None
    stream: Any = None
    pg_name: Any = None
    inter_thread_dep: Any = None
    sync_dep: Any = None
    haiprof: Any = None


class OldNode(msgspec.Struct, gc=False):
    """A node of schema 1.0.1 and before: attributes beside the name, one parent."""

    id: Any = None
    name: Any = None
    parent: Any = None
    rf_id: Any = None
    fw_parent: Any = None
    seq_id: Any = None
    scope: Any = None
    tid: Any = None
    fw_tid: Any = None
    op_schema: Any = None
    inputs: msgspec.Raw = _NONE
    input_shapes: msgspec.Raw = _NONE
    input_types: msgspec.Raw = _NONE
    outputs: msgspec.Raw = _NONE
    output_shapes: msgspec.Raw = _NONE
    output_types: msgspec.Raw = _NONE


class Attribute(msgspec.Struct, gc=False):
    """A named value of a node."""

    name: Any = None
    value: Any = None


class _Head(msgspec.Struct):
    schema: Any = None
    pid: Any = None
    time: Any = None
    start_ts: Any = None
    finish_ts: Any = None
    rank: Any = None
    haiprof: Any = None
    nodes: msgspec.Raw = _NO_ATTRIBUTES


_HEAD = msgspec.json.Decoder(_Head)
_NODES = msgspec.json.Decoder(list[Node])
_OLD_NODES = msgspec.json.Decoder(list[OldNode])
_RAW_NODES = msgspec.json.Decoder(list[msgspec.Raw])
_NODE, _OLD_NODE = msgspec.json.Decoder(Node), msgspec.json.Decoder(OldNode)
_ATTRIBUTES = msgspec.json.Decoder(list[Attribute])
ATTRIBUTE_NAMES = ("rf_id", "fw_parent", "seq_id", "scope", "tid", "fw_tid", "op_schema")
"""What every node has; a field of its own in old files."""
JsonError = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


class NoNodesError(Exception):
    """The text is JSON, but not an execution trace."""


def decode(text: bytes) -> tuple[dict[str, Any], Sequence[Node | OldNode], int]:
    """The header, the nodes, and how many nodes could not be read."""
    try:
        head = _HEAD.decode(text)
    except msgspec.ValidationError:
        raise NoNodesError from None
    if not bytes(head.nodes).lstrip().startswith(b"["):
        raise NoNodesError
    header = {name: getattr(head, name) for name in _Head.__struct_fields__ if name != "nodes"}
    return header, *_decode_nodes(head.nodes)


def _decode_nodes(text: msgspec.Raw) -> tuple[Sequence[Node | OldNode], int]:
    for decoder in (_NODES, _OLD_NODES):
        try:
            found: Sequence[Node | OldNode] = decoder.decode(text)
        except msgspec.ValidationError:
            continue
        if decoder is _OLD_NODES or not _is_old(text):
            return found, 0
    each = [_one(node) for node in _RAW_NODES.decode(text)]
    good = [node for node in each if node is not None]
    return good, len(each) - len(good)


def _is_old(text: msgspec.Raw) -> bool:
    """Nodes without values have the same form in both but for where their parent stands."""
    return b'"ctrl_deps"' not in bytes(text)


def _one(text: msgspec.Raw) -> Node | OldNode | None:
    decoder: Any = _OLD_NODE if _is_old(text) else _NODE
    try:
        found: Node | OldNode = decoder.decode(text)
    except msgspec.ValidationError:
        return None
    return found


def attributes(node: Node | OldNode) -> dict[str, Any]:
    """A node's named values; empty where they are of another form."""
    if isinstance(node, OldNode):
        return {name: getattr(node, name) for name in ATTRIBUTE_NAMES}
    try:
        return {each.name: each.value for each in _ATTRIBUTES.decode(node.attrs)
                if isinstance(each.name, str)}  # fmt: skip
    except (msgspec.ValidationError, UnicodeDecodeError):
        return {}


def values(node: Node | OldNode) -> tuple[Values, Values]:
    """Inputs and outputs in the new form."""
    if isinstance(node, Node):
        return node.inputs, node.outputs
    return (
        Values(values=node.inputs, shapes=node.input_shapes, types=node.input_types),
        Values(values=node.outputs, shapes=node.output_shapes, types=node.output_types),
    )
