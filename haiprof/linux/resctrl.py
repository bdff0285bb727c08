"""Memory traffic of each socket's CPUs through resctrl, where an administrator has mounted it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from haiprof.linux.cpu_sockets import socket_of_cache, socket_of_cpu
from haiprof.linux.readings import Entity, Reading, Unavailable, os_status

MOUNT = "mount -t resctrl resctrl /sys/fs/resctrl (root)"
_TOTAL, _LOCAL = "mbm_total_bytes", "mbm_local_bytes"
_NO_VALUE = {
    "Unavailable": "the hardware has no value now",
    "Error": "the hardware refused",
    "Unassigned": "no hardware counter is assigned to the group",
}
_NO_GROUP = ("info", "mon_data", "mon_groups")
_NO_DIRECTION = Unavailable("resctrl does not distinguish reads from writes", status="unsupported")


def resctrl_entities(root: Path) -> list[Entity]:
    """One entity per socket, from the sum over all control groups.

    The traffic is that of the socket's CPUs beyond their last-level cache, wherever the memory is,
    without transfers by devices (GPUs, network adapters).

    Source: Linux Documentation/filesystems/resctrl.rst.
    """
    folder = root / "sys/fs/resctrl"
    if not folder.is_dir():
        raise Unavailable(f"{folder}: the kernel or the CPU has no resctrl")
    caches = _caches(folder)
    if not caches:
        raise Unavailable(f"{folder}: not mounted, or without monitoring", remedy=MOUNT)
    of_socket: dict[int, list[str]] = {}
    sockets = socket_of_cache(root, socket_of_cpu(root))
    for cache, name in caches.items():
        if cache not in sockets:
            raise Unavailable(f"{folder}: the socket of {name} is not known", status="unsupported")
        of_socket.setdefault(sockets[cache], []).append(name)
    entities = [_entity(folder, socket, names) for socket, names in sorted(of_socket.items())]
    try:
        for entity in entities:
            entity.readings[0].read()  # without the total another source is better
    except OSError as error:
        reason = f"{error.filename}: {error.strerror} (no memory bandwidth monitoring)"
        raise Unavailable(reason, status=os_status(error)) from None
    return entities


def mbm_value(path: Path) -> int:
    """The bytes in a file of mon_data."""
    text = path.read_text().strip()
    if text.isdecimal():
        return int(text)
    raise Unavailable(f"{path}: {text} ({_NO_VALUE.get(text, 'not a number')})")


@dataclass(slots=True)
class MonitoredBytes:
    """Sums files that come and go with their groups; restarts at 0 when one of them does."""

    files: Callable[[], Iterable[Path]]
    total: int = 0
    restarts: int = 0
    """How often a file decreased or vanished: what was counted in between is lost."""
    _last: dict[Path, int] = field(default_factory=dict)

    def read(self) -> int:
        """The sum; raises as `mbm_value`."""
        now = {path: mbm_value(path) for path in self.files()}
        if any(now.get(path, -1) < value for path, value in self._last.items()):
            self.total = 0
            self.restarts += 1
        elif self._last:
            self.total += sum(value - self._last.get(path, value) for path, value in now.items())
        else:
            self.total = sum(now.values())
        self._last = now
        return self.total


@dataclass(slots=True)
class RemoteBytes:
    """Total minus local traffic.

    The two are read one after the other, so the difference could decrease by what passed in
    between: it keeps its highest value, unless one of them restarted.
    """

    local: MonitoredBytes
    whole: MonitoredBytes
    _base: int = 0
    _highest: int = 0
    _restarts: int = 0

    def read(self) -> int:
        """Bytes to and from the memory of other sockets; raises as `mbm_value`."""
        local = self.local.read()
        remote = self.whole.read() - local
        restarts = self.local.restarts + self.whole.restarts
        if restarts != self._restarts:
            self._restarts, self._base, self._highest = restarts, remote, 0
        self._highest = max(self._highest, remote - self._base)
        return self._highest


def _caches(folder: Path) -> dict[int, str]:
    """The monitored caches: id and folder name, such as 0 and `mon_L3_00`."""
    try:
        names = sorted(each.name for each in (folder / "mon_data").iterdir())
    except OSError:
        return {}
    ids = {name: name.removeprefix("mon_L3_") for name in names if name.startswith("mon_L3_")}
    return {int(number): name for name, number in ids.items() if number.isdecimal()}


def _files(folder: Path, caches: Sequence[str], name: str) -> list[Path]:
    """The file in each control group; a group's own sum includes its monitoring groups."""
    groups = [folder, *(each for each in sorted(folder.iterdir()) if each.name not in _NO_GROUP)]
    groups = [group for group in groups if (group / "mon_data").is_dir()]
    return [group / "mon_data" / cache / name for group in groups for cache in caches]


def _entity(folder: Path, socket: int, caches: Sequence[str]) -> Entity:
    def sum_files(name: str) -> MonitoredBytes:
        return MonitoredBytes(lambda: _files(folder, caches, name))

    total, remote = sum_files(_TOTAL), RemoteBytes(sum_files(_LOCAL), sum_files(_TOTAL))
    origin = f"{folder}/*/mon_data/{','.join(caches)}"
    return Entity(
        key=(socket,),
        name=f"socket {socket} (resctrl)",
        readings=(
            Reading(
                columns=("total_bytes",), origin=f"{origin}/{_TOTAL}", read=lambda: (total.read(),)
            ),
            Reading(
                columns=("remote_bytes",),
                origin=f"{origin}/{_TOTAL} less {_LOCAL}",
                read=lambda: (remote.read(),),
                lacking="the CPU does not monitor it",
            ),
            Reading(
                columns=("read_bytes", "write_bytes", "counted_ratio"),
                origin=str(folder),
                read=lambda: (_NO_DIRECTION, _NO_DIRECTION, 1.0),
            ),
        ),
        details={"source": "resctrl", "caches": list(caches)},
    )
