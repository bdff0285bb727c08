"""Requests to a running job and its replies: their schema, and their files."""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from haiprof.base.errors import RunFormatError
from haiprof.base.safe_files import PRIVATE, make_folder, make_private
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.reader import parse_object, try_read_json
from haiprof.run_format.writer import write_json

Check = Callable[[object], bool]
Schema = Mapping[str, Check]  # what each field must hold; a field that the message lacks is None

DEPTH_LIMIT = 32  # deeper JSON is refused: writing it again could exceed Python's recursion limit
TEXT_LIMIT = 4096
_ARGUMENT_LIMIT = 64
_RANK_LIMIT = 10_000_000
_INTEGER_LIMIT = 1 << 63

# Sets, as compiling patterns would take longer than the rest of this module when a job starts.
_DIGITS = frozenset("0123456789")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz")
_WORD = _LETTERS | frozenset("_-")
_ID = _LETTERS | _DIGITS | frozenset("-")


def read_object(data: bytes) -> dict[str, Any] | None:
    """Parses the JSON object of a message or line; None if it is not one, or nested too deep."""
    message = parse_object(data)
    return None if message is None or not _is_shallow(message) else message


def conform(content: object, schema: Schema) -> dict[str, Any] | None:
    """Takes the fields of a schema from any JSON value; None if one does not fit."""
    if not isinstance(content, dict):
        return None
    fields = {name: content.get(name) for name in schema}
    return fields if all(check(fields[name]) for name, check in schema.items()) else None


def _is_of(known: frozenset[str], *, limit: int) -> Check:
    """Text of these characters alone, one at least."""
    return lambda text: isinstance(text, str) and 0 < len(text) <= limit and known.issuperset(text)


def _is_below(limit: int) -> Check:
    """A whole number from 0 on; True and False are not numbers."""
    return lambda value: type(value) is int and 0 <= value < limit


is_id = _is_of(_ID, limit=64)  # the id of a request, which is also the name of a file
is_word = _is_of(_WORD, limit=32)  # a kind of request, or the state of a reply
is_count = _is_below(_INTEGER_LIMIT)  # it fits 64 bits
is_rank = _is_below(_RANK_LIMIT)  # the number of a rank
_is_rank_digits, _is_attempt_digits = _is_of(_DIGITS, limit=7), _is_of(_DIGITS, limit=4)


def is_name(value: object) -> bool:
    """A rank as it signs its replies (`3`, `3.1` for its second attempt); also a file's name."""
    rank, dot, attempt = value.partition(".") if isinstance(value, str) else ("", "", "")
    return _is_rank_digits(rank) and (not dot or _is_attempt_digits(attempt))


def is_string(value: object) -> bool:
    """Text as long as a message may be."""
    return isinstance(value, str)


def is_text(value: object) -> bool:
    """Text of a bounded length."""
    return isinstance(value, str) and len(value) <= TEXT_LIMIT


def is_none_or(check: Check) -> Check:
    """A field that may be left out."""
    return lambda value: value is None or check(value)


def is_ranks(value: object) -> bool:
    """A list of ranks."""
    return isinstance(value, list) and all(map(is_rank, value))


def is_arguments(value: object) -> bool:
    """Options of a request by name; each of them is one plain value."""
    return (
        isinstance(value, dict)
        and len(value) <= _ARGUMENT_LIMIT
        and all(is_text(name) and _is_plain(argument) for name, argument in value.items())
    )


REQUEST: Schema = {
    "id": is_id, "kind": is_word, "arguments": is_arguments, "expires_wall_ns": is_count,
    "ranks": is_none_or(is_ranks),
}  # fmt: skip
"""Asks ranks for something."""
QUESTION: Schema = {name: REQUEST[name] for name in ("id", "kind", "arguments")}
"""What a rank reads of a request; the agent has checked the rest."""
HELLO: Schema = {"rank": is_rank, "attempt": is_count}  # a rank says to its node's agent who it is
MEMBER: Schema = {
    "name": is_name, "rank": is_rank, "host": is_none_or(is_text), "pid": is_none_or(is_count),
}  # fmt: skip
"""An agent says to the controller which rank it has."""
REPLY: Schema = {"state": is_word, "reason": is_none_or(is_string)}
"""What every reply has. The rest depends on the request; whoever sent that reads it."""
REMOTE_REPLY: Schema = {**REPLY, "name": is_name}
"""A reply of a rank, as the agent of another node hands it to the controller."""


def _is_plain(value: object) -> bool:
    if isinstance(value, int | float):  # True and False too
        return math.isfinite(value) if isinstance(value, float) else abs(value) < _INTEGER_LIMIT
    return value is None or is_text(value)


def _is_shallow(message: dict[str, Any]) -> bool:
    level: list[Any] = [message]
    for _ in range(DEPTH_LIMIT):
        level = [
            value
            for holder in level
            for value in (holder.values() if type(holder) is dict else holder)
            if type(value) is dict or type(value) is list
        ]
        if not level:
            return True
    return False


MESSAGE_LIMIT_BYTES = 1 << 17
"""Longest request or reply, in a file or in one packet of a socket; a longer one is not read."""
ANSWERED = ("done", "refused", "failed")
"""States after which nothing more comes from a rank; `accepted` is followed by one of them."""
TOO_LATE = "the other ranks had begun to count before it heard of it"
"""Reason of a rank that refuses because the steps asked for had begun; another try may succeed."""
OVER = "was over before haiprof could start"
"""End of the reason of a rank that came unprepared to the step asked for; as with `TOO_LATE`."""

_NS_PER_S = 1_000_000_000
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request to the ranks of a running job."""

    id: str
    kind: str  # `status`, `trace` or `stacks`
    arguments: Mapping[str, Any] = field(default_factory=dict)
    expires_wall_ns: int  # it is not carried out after this Unix time
    ranks: tuple[int, ...] | None = None  # which ranks are asked; None asks all

    def as_json(self) -> dict[str, Any]:
        """The request as plain JSON values."""
        return {**asdict(self), "ranks": None if self.ranks is None else list(self.ranks)}


def new_request(
    kind: str, arguments: Mapping[str, Any] | None = None, *, valid_s: float,
    ranks: tuple[int, ...] | None = None,
) -> Request:  # fmt: skip
    """A request with an id of its own, valid for so many seconds from now."""
    now = time.time_ns()
    return Request(
        id=f"{now // 1_000_000:x}-{os.urandom(3).hex()}", kind=kind, arguments=arguments or {},
        expires_wall_ns=now + round(valid_s * _NS_PER_S), ranks=ranks,
    )  # fmt: skip


def post_request(run: RunPaths, request: Request) -> None:
    """Puts a request where the agents of all nodes find it."""
    make_control(run)
    make_folder(run.control_reply(request.id), below=run.root, mode=PRIVATE, new=True)
    write_json(run.control_request(request.id), request.as_json(), below=run.root)


def parse_request(content: object, origin: object) -> Request:
    """Parses a request from untrusted JSON."""
    if (fields := conform(content, REQUEST)) is None:
        raise RunFormatError(f"{origin}: not a request of haiprof's")
    ranks = fields.pop("ranks")
    return Request(**fields, ranks=None if ranks is None else tuple(ranks))


def pending_requests(folder: int, seen: set[str]) -> list[Request]:
    """Requests that are still valid and not among those seen, oldest first; `seen` gets them.

    Anything else in the folder is ignored: files that are not requests, and files that somebody
    other than the folder's owner wrote.
    """
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []  # the run directory is gone
    found = []
    for name in names:
        stem, dot, suffix = name.partition(".")
        if suffix != "json" or not dot or stem in seen:
            continue
        seen.add(stem)
        request = _read_request(folder, name)
        if request is not None and request.id == stem and request.expires_wall_ns > time.time_ns():
            found.append(request)
    return found


def open_requests(run: RunPaths) -> int:
    """A descriptor of the folder of requests: it stays if others rename the run directory."""
    make_control(run)
    return os.open(run.control_requests, _FOLDER)


def _read_request(folder: int, name: str) -> Request | None:
    try:
        number = os.open(name, _READ, dir_fd=folder)
        with os.fdopen(number, "rb") as file:
            state = os.fstat(number)
            plain = stat.S_ISREG(state.st_mode) and state.st_size <= MESSAGE_LIMIT_BYTES
            if not plain or state.st_uid != os.fstat(folder).st_uid:
                return None
            content = read_object(file.read())
        return None if content is None else parse_request(content, name)
    except (OSError, RunFormatError):
        return None


def post_reply(run: RunPaths, request_id: str, sender: str, reply: Mapping[str, Any]) -> None:
    """Stores the reply of a rank (`3`, `3.1` for its second attempt) in place of an earlier one."""
    write_json(run.control_reply(request_id) / f"{sender}.json", reply, below=run.root)


def post_member(run: RunPaths, name: str, member: Mapping[str, Any]) -> None:
    """Stores who a rank of another node is, where that node does not share the run directory."""
    make_private(run.control_members, below=run.root)
    write_json(run.control_members / f"{name}.json", member, below=run.root)


def read_members(run: RunPaths) -> dict[str, dict[str, Any]]:
    """Ranks that only an agent's TCP connection reaches, by the name with which they answer."""
    return _read_folder(run.control_members, MEMBER)


def read_replies(run: RunPaths, request_id: str) -> dict[str, dict[str, Any]]:
    """The latest reply of every sender."""
    return _read_folder(run.control_reply(request_id), REPLY)


def _read_folder(folder: Path, schema: Schema) -> dict[str, dict[str, Any]]:
    """The JSON files of a folder that are whole and conform, by name."""
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    found = {}
    for name in names:
        if name.startswith(".") or not name.endswith(".json"):
            continue
        content = try_read_json(folder / name)  # not complete yet: the next look reads it
        if conform(content, schema) is not None:
            found[name.removesuffix(".json")] = content
    return found


def make_control(run: RunPaths) -> None:
    """Creates the folders for requests and replies, which only their owner may enter."""
    for folder in (run.control, run.control_requests, run.control_replies):
        make_private(folder, below=run.root)


def encode_message(message: Mapping[str, Any]) -> bytes:
    """One packet of a control socket; a message that is too long is replaced by an error."""
    data = json.dumps(message).encode()
    if len(data) <= MESSAGE_LIMIT_BYTES:
        return data
    kept = {key: message[key] for key in ("id", "state") if key in message}
    return json.dumps({**kept, "reason": "the answer was too long"}).encode()


def control_socket(run: RunPaths, host: str) -> tuple[int, str]:
    """The agent's socket on a host: an open folder, and a short path through it.

    A Unix socket's path may have 107 bytes; one in /proc/self/fd always fits.
    """
    folder = os.open(run.control, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return folder, f"/proc/self/fd/{folder}/{host[:60]}.sock"
