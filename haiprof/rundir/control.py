"""Requests to a running job, and its replies: files in the run directory, their owner's alone."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from haiprof.errors import RunFormatError
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.reader import read_json
from haiprof.rundir.writer import write_json

MESSAGE_LIMIT_BYTES = 1 << 17
"""Longest request or reply, in a file or in one packet of a socket; a longer one is not read."""
ANSWERED = ("done", "refused", "failed")
"""States after which nothing more comes from a rank; `accepted` is followed by one of them."""

_PRIVATE = 0o700
_ID = re.compile(r"[a-z0-9-]{1,64}\Z")
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Something asked of the ranks of a running job."""

    id: str
    kind: str
    """`status`, `trace` or `stacks`."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    expires_wall_ns: int
    """After this time nobody carries it out any more."""
    ranks: tuple[int, ...] | None = None
    """Which ranks are asked; null asks all."""

    def as_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return {
            "id": self.id,
            "kind": self.kind,
            "arguments": dict(self.arguments),
            "expires_wall_ns": self.expires_wall_ns,
            "ranks": None if self.ranks is None else list(self.ranks),
        }


def new_request(
    kind: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    valid_s: float,
    ranks: tuple[int, ...] | None = None,
) -> Request:
    """A request with an id of its own, valid for so many seconds from now."""
    now = time.time_ns()
    return Request(
        id=f"{now // 1_000_000:x}-{os.urandom(3).hex()}",
        kind=kind,
        arguments=arguments or {},
        expires_wall_ns=now + round(valid_s * _NS_PER_S),
        ranks=ranks,
    )


def post_request(run: RunPaths, request: Request) -> None:
    """Puts a request where the agents of all nodes find it.

    Raises:
        OSError: The run directory is gone, read-only or full.
    """
    make_private(run.control, run.control_requests, run.control_replies)
    folder = run.control_reply(request.id)
    folder.mkdir(mode=_PRIVATE)
    write_json(run.control_request(request.id), request.as_json())


def parse_request(content: Mapping[str, Any], origin: object) -> Request:
    """A request from JSON that may be anything.

    Raises:
        RunFormatError: It is none; the message names `origin`.
    """
    ranks = content.get("ranks")
    named = content.get("id")
    kind, arguments = content.get("kind"), content.get("arguments")
    expires = content.get("expires_wall_ns")
    fits = (
        isinstance(named, str)
        and _ID.match(named)
        and isinstance(kind, str)
        and isinstance(arguments, dict)
        and type(expires) is int
        and (ranks is None or (isinstance(ranks, list) and all(type(r) is int for r in ranks)))
    )
    if not fits:
        raise RunFormatError(f"{origin}: not a request of haiprof's")
    return Request(
        id=str(named),
        kind=str(kind),
        arguments=dict(arguments or {}),
        expires_wall_ns=int(expires or 0),
        ranks=None if ranks is None else tuple(ranks),
    )


def pending_requests(run: RunPaths, seen: set[str]) -> list[Request]:
    """Requests that are still valid and not among those seen, oldest first; `seen` gets them.

    Whatever else lies in the folder is passed over: a file that is no request harms nobody.
    """
    try:
        names = sorted(os.listdir(run.control_requests))
    except OSError:
        return []  # nothing was ever asked
    found = []
    for name in names:
        stem, dot, suffix = name.partition(".")
        if suffix != "json" or not dot or stem in seen:
            continue
        seen.add(stem)
        request = _read_request(run.control_requests / name)
        if request is not None and request.id == stem and request.expires_wall_ns > time.time_ns():
            found.append(request)
    return found


def _read_request(path: Path) -> Request | None:
    try:
        if path.stat().st_size > MESSAGE_LIMIT_BYTES:
            return None
        return parse_request(read_json(path), path)
    except (OSError, RunFormatError):
        return None


def post_reply(run: RunPaths, request_id: str, sender: str, reply: Mapping[str, Any]) -> None:
    """Keeps what a rank (`3`, `3.1` for its second attempt) answered; its earlier reply goes.

    Raises:
        OSError: The run directory is gone, read-only or full.
    """
    write_json(run.control_reply(request_id) / f"{sender}.json", reply)


def post_member(run: RunPaths, name: str, member: Mapping[str, Any]) -> None:
    """Keeps who a rank of another node is, where that node does not share the run directory.

    Raises:
        OSError: The run directory is gone, read-only or full.
    """
    make_private(run.control_members)
    write_json(run.control_members / f"{name}.json", member)


def read_members(run: RunPaths) -> dict[str, dict[str, Any]]:
    """Ranks that only an agent's TCP connection reaches, by the name with which they answer."""
    return _read_folder(run.control_members)


def read_replies(run: RunPaths, request_id: str) -> dict[str, dict[str, Any]]:
    """The latest reply of every sender that has answered."""
    return _read_folder(run.control_reply(request_id))


def _read_folder(folder: Path) -> dict[str, dict[str, Any]]:
    """The JSON files of a folder that are whole, by name."""
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    found = {}
    for name in names:
        if name.startswith(".") or not name.endswith(".json"):
            continue
        try:
            found[name.removesuffix(".json")] = read_json(folder / name)
        except RunFormatError:
            continue  # not whole: whoever looks again sees it
    return found


def make_private(*folders: Path) -> None:
    """Creates folders that only their owner may enter, and takes that right from others.

    Raises:
        OSError: They cannot be created, or belong to somebody else.
    """
    for folder in folders:
        folder.mkdir(mode=_PRIVATE, exist_ok=True)
        if folder.stat().st_mode & 0o077:
            folder.chmod(_PRIVATE)


def encode_message(message: Mapping[str, Any]) -> bytes:
    """One packet of a control socket; a message that is too long becomes one that says so."""
    data = json.dumps(message).encode()
    if len(data) <= MESSAGE_LIMIT_BYTES:
        return data
    kept = {key: message[key] for key in ("id", "state") if key in message}
    return json.dumps({**kept, "reason": "the answer was too long"}).encode()


def decode_message(packet: bytes) -> dict[str, Any] | None:
    """The JSON object of one packet; null if it is none."""
    try:
        message = json.loads(packet)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def control_socket(run: RunPaths, host: str) -> tuple[int, str]:
    """Where the agent of a host listens: an open folder, and a path through it that is short.

    A Unix socket's path may have 107 bytes; one in /proc/self/fd always fits.

    Returns:
        A descriptor that the caller closes once it has bound or connected, and the path.

    Raises:
        OSError: The folder is not there.
    """
    folder = os.open(run.control, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return folder, f"/proc/self/fd/{folder}/{host[:60]}.sock"
