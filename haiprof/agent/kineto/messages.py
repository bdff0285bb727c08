"""Messages of Kineto's daemon protocol, decoded as hostile input; and haiprof's own.

Source: dynolog's ipcfabric (one Unix datagram each: `uint64 size, char type[32]`, payload), and
libkineto's IpcFabricConfigClient, as torch 2.13 sends them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONTEXT = b"ctxt"
"""A process states which GPU it uses; the answer is how many do."""
REQUEST = b"req"
"""A process asks for a configuration; an empty answer requests nothing."""
OURS = b"haiprof"
"""A question to the agent itself; JSON both ways."""

DATAGRAM_LIMIT_BYTES = 1 << 16
_HEAD = struct.Struct("=Q32s")
_CONTEXT = struct.Struct("=iiq")
_ASK = struct.Struct("=iiq")
_PID = struct.Struct("=i")
_COUNT = struct.Struct("=i")
_PID_LIMIT = 64
_ACTIVITIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One datagram."""

    type: bytes
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A process's request for a configuration."""

    free: bool
    """Whether it can trace now: no profiler runs or is scheduled in it."""
    job: int
    """SLURM_JOB_ID, else 0."""
    pids: tuple[int, ...]
    """Itself first, then its parents, as its own namespace numbers them."""


def encode(kind: bytes, payload: bytes) -> bytes:
    """One datagram."""
    return _HEAD.pack(len(payload), kind) + payload


def decode(datagram: bytes) -> Message | None:
    """The message of a datagram; None if it is malformed."""
    if len(datagram) < _HEAD.size:
        return None
    size, kind = _HEAD.unpack_from(datagram)
    payload = datagram[_HEAD.size :]
    if size != len(payload):
        return None
    return Message(type=kind.rstrip(b"\0"), payload=payload)


def decode_ask(payload: bytes) -> Ask | None:
    """Decodes a process's request; None if it is malformed."""
    if len(payload) < _ASK.size:
        return None
    kinds, count, job = _ASK.unpack_from(payload)
    if not 1 <= count <= _PID_LIMIT or len(payload) != _ASK.size + count * _PID.size:
        return None
    pids = tuple(pid for (pid,) in _PID.iter_unpack(payload[_ASK.size :]))
    return Ask(free=bool(kinds & _ACTIVITIES), job=job, pids=pids)


def encode_ask(ask: Ask) -> bytes:
    """The datagram that a process sends."""
    kinds = 1 | (_ACTIVITIES if ask.free else 0)
    payload = _ASK.pack(kinds, len(ask.pids), ask.job)
    return encode(REQUEST, payload + b"".join(map(_PID.pack, ask.pids)))


def is_context(payload: bytes) -> bool:
    """Whether the payload states which GPU a process uses."""
    return len(payload) == _CONTEXT.size


def encode_count(count: int) -> bytes:
    """The answer to that: how many processes use it."""
    return encode(CONTEXT, _COUNT.pack(count))


def encode_ours(content: Mapping[str, Any]) -> bytes:
    """A question to the agent, or its answer."""
    return encode(OURS, json.dumps(content).encode())


def decode_ours(payload: bytes) -> dict[str, Any] | None:
    """The JSON object of a message of haiprof's own; None if it is not one."""
    try:
        content = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
