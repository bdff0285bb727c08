"""Drives an existing dynolog daemon by its RPC, as its own command `dyno gputrace` does.

Source: dynolog (c3a231a), rpc/SimpleJsonServer: TCP, int32 length in native byte order, JSON.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.run_format.messages import read_object

DEFAULT_ENDPOINT = "localhost:1778"
TIMEOUT_S = 10.0
"""The daemon serves one connection at a time, and a silent one blocks the rest."""
_LENGTH = struct.Struct("=i")
_ANSWER_LIMIT_BYTES = 1 << 20
_PORT_LIMIT = 65_535


class DynologError(HaiprofError):
    """A dynolog daemon cannot be reached, or sends an unknown answer."""


def parse_endpoint(text: str) -> tuple[str, int]:
    """`host:port`; a missing port is dynolog's own."""
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, DEFAULT_ENDPOINT.rpartition(":")[2]
    if not host or not port.isdecimal() or not 0 < int(port) <= _PORT_LIMIT:
        raise UsageError(f"{text!r}: expected the daemon's HOST:PORT, such as {DEFAULT_ENDPOINT}")
    return host.strip("[]"), int(port)


def call(endpoint: tuple[str, int], request: Mapping[str, Any]) -> dict[str, Any]:
    """One request and its answer."""
    shown = f"dynolog at {endpoint[0]}:{endpoint[1]}"
    data = json.dumps(request).encode()
    try:
        with socket.create_connection(endpoint, TIMEOUT_S) as connection:
            connection.sendall(_LENGTH.pack(len(data)) + data)
            (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
            if not 0 < length <= _ANSWER_LIMIT_BYTES:
                raise DynologError(f"{shown}: announces an answer of {length} bytes")
            text = _read(connection, length)
    except TimeoutError:
        raise DynologError(
            f"{shown}: no answer for {TIMEOUT_S:.0f} s",
            hint="another client may block the daemon: it serves one at a time",
        ) from None
    except OSError as error:
        raise DynologError(
            f"{shown}: {error.strerror or error}",
            hint="the daemon is started with --enable_ipc_monitor; --dynolog HOST:PORT names it",
        ) from None
    answer = read_object(text)
    if answer is None:
        raise DynologError(f"{shown}: its answer is no JSON object")
    return answer


def trigger(
    endpoint: tuple[str, int], config: str, *, job: int, pids: Sequence[int]
) -> tuple[set[int], set[int]]:
    """Asks the daemon to have processes traced."""
    request = {
        "fn": "setKinetOnDemandRequest",  # as dynolog spells it
        "config": config,
        "job_id": job,
        "pids": list(pids) or [0],
        "process_limit": max(len(pids), 1024 if not pids else 0),  # its own default is 3
    }
    answer = call(endpoint, request)
    found = [answer.get(name) for name in ("processesMatched", "activityProfilersTriggered")]
    if not all(isinstance(each, list) and all(type(p) is int for p in each) for each in found):
        raise DynologError(
            f"dynolog at {endpoint[0]}:{endpoint[1]}: its answer names no processes",
            hint=f"it said {json.dumps(answer)[:200]}",
        )
    matched, triggered = (set(each or []) for each in found)
    return matched, triggered


def _read(connection: socket.socket, length: int) -> bytes:
    parts, missing = [], length
    while missing:
        part = connection.recv(min(missing, 1 << 16))
        if not part:
            raise ConnectionError("it closed the connection early")
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
