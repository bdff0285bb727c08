"""Energy of CPU packages and memory, as RAPL counts it (Intel and AMD, by the powercap driver)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from haiprof.linux.readings import Reading, Unavailable, Value

ENERGY_COLUMNS = ("cpu_energy_joules", "memory_energy_joules")
_REMEDY = "root may read it, or: chmod a+r /sys/class/powercap/*/energy_uj"
_UJ = 1e-6


def energy_reading(root: Path) -> Reading:
    """Joules of all CPU packages, and of their memory where RAPL counts it."""
    folder = root / "sys" / "class" / "powercap"
    return Reading(
        columns=ENERGY_COLUMNS,
        origin=str(folder / "*" / "energy_uj"),
        read=_Energy(folder),
        remedy=_REMEDY,
    )


class _Energy:
    """Sums that go on where a zone's counter wraps, as it does each hour or so under load.

    Source: Linux Documentation/power/powercap/powercap.rst. Zones of a package have the name
    `package-N`, its memory's `dram`; `psys` and `core` are in others or beside them. Two drivers
    may show the same package (`intel-rapl`, `intel-rapl-mmio`): it is counted once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._zones: list[tuple[Path, int, int]] | None = None
        """File, place in the columns, and the value after which it begins anew."""
        self._last: dict[Path, int] = {}
        self._totals = [0, 0]

    def __call__(self) -> Sequence[Value | Unavailable]:
        if self._zones is None:
            self._zones = list(self._find())
        if not self._zones:
            raise Unavailable(
                "no RAPL here: a virtual machine, or its driver is not loaded", lasting=True
            )
        for path, column, whole in self._zones:
            value = int(path.read_text())
            growth = value - self._last.get(path, 0)
            self._totals[column] += growth if growth >= 0 else growth + whole
            self._last[path] = value
        has_memory = any(column for _, column, _ in self._zones)
        memory = self._totals[1] * _UJ if has_memory else Unavailable("no zone of memory here")
        return self._totals[0] * _UJ, memory

    def _find(self) -> list[tuple[Path, int, int]]:
        found: dict[tuple[str, str], tuple[Path, int, int]] = {}
        for zone in sorted(self._folder.glob("intel-rapl*:*")):
            name = (zone / "name").read_text().strip()
            column = 0 if name.startswith("package-") else 1 if name == "dram" else None
            if column is not None:  # of memory the number of its package: intel-rapl:0:2
                package = zone.name.partition(":")[2].partition(":")[0]
                key = name, package if column else ""
                whole = int((zone / "max_energy_range_uj").read_text())
                found.setdefault(key, (zone / "energy_uj", column, whole + 1))
        return list(found.values())
