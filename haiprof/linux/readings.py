"""One read of a file or a call: the values it gives, or why it gives none."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Clock = Callable[[], int]  # reads CLOCK_MONOTONIC in ns

Status = Literal["available", "unsupported", "denied", "absent"]
"""`unsupported`: this hardware, driver or kernel cannot; `denied`: this user may not; `absent`:
what it is read from is not here."""


class Unavailable(Exception):  # noqa: N818  not an error of ours: the machine's answer
    """Raised by a read that knows more about the cause than an errno says."""

    def __init__(
        self, reason: str, *, status: Status = "absent", remedy: str = "", lasting: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.status: Status = status
        self.remedy, self.lasting = remedy, lasting


def os_status(error: OSError) -> Status:
    """The status of a failed system call."""
    if error.errno in (errno.EACCES, errno.EPERM):
        return "denied"
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENXIO, errno.ESRCH):
        return "absent"
    return "unsupported"


Value = int | float | None


class EntityGone(Exception):  # noqa: N818  not an error: processes end
    """Raised by a read whose entity has ended: it is dropped, without another record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One read and the columns that it fills."""

    columns: tuple[str, ...]
    origin: str  # the file or call, as `haiprof doctor` shows it
    read: Callable[[], Sequence[Value | Unavailable]]
    """One value per column; None or `Unavailable`, with the reason, if missing. Raises OSError,
    ValueError, IndexError, KeyError (unexpected content), `Unavailable` or `EntityGone`."""
    lacking: str = ""  # why the file may be absent, or a value in it
    remedy: str = ""  # what an administrator would have to set where it is absent or denied
    close: Callable[[], None] | None = None  # closes what the read keeps open


@dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """The subject of a record: a GPU, a port, a mount; or the node, with an empty key and name."""

    key: tuple[int, ...] = ()  # values of the table's key columns
    name: str = ""  # a short, distinct name for people
    readings: tuple[Reading, ...]
    details: Mapping[str, object] = field(default_factory=dict)  # more for the header: a UUID


def refused_reading(columns: Iterable[str], origin: str, why: Unavailable) -> Reading:
    """A reading that is known to fail; it is tried once, for its reason."""

    def read() -> Sequence[Value]:
        raise Unavailable(why.reason, status=why.status, remedy=why.remedy, lasting=True)

    return Reading(columns=tuple(columns), origin=origin, read=read)
