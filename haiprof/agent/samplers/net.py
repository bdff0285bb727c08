"""Traffic of a node's network interfaces and TCP's troubles, from /proc/net."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from haiprof.agent.samplers.growing_counters import SummedCounters
from haiprof.linux.sysfs import list_names

Values = tuple[int | None, ...]

NETWORK_COLUMNS = (
    "network_receive_bytes",
    "network_transmit_bytes",
    "network_receive_packet_count",
    "network_transmit_packet_count",
    "network_receive_error_count",
    "network_transmit_error_count",
    "network_receive_drop_count",
    "network_transmit_drop_count",
)
_FIELDS = (0, 8, 1, 9, 2, 10, 3, 11)

TCP_COLUMNS = ("tcp_transmit_segment_count", "tcp_retransmit_segment_count")
TCP_FIELDS = ("OutSegs", "RetransSegs")
TCP_TROUBLE_COLUMNS = ("tcp_timeout_count", "tcp_listen_drop_count")
TCP_TROUBLE_FIELDS = ("TCPTimeouts", "ListenDrops")


class NetworkTotals:
    """Parses /proc/net/dev into NETWORK_COLUMNS, without lo.

    Left out: interfaces stacked on others that are counted (bonds, bridges, VLANs), ports of a
    bridge without hardware (the host's ends of containers), and ifb, which only delays what
    others carry. Where the default route leads out through hardware, nothing else counts: other
    ends of containers are routed to it (Calico, Cilium). In a container it leads through the
    container's end, which has none. RDMA traffic is not in these counters.
    """

    def __init__(self, root: Path) -> None:
        self._net = root / "sys" / "class" / "net"
        self._routes = root / "proc" / "net" / "route"
        self._hardware_leads: bool | None = None
        self._hardware: set[bytes] = set()
        self._sums = SummedCounters([64] * len(_FIELDS))

    def __call__(self, content: bytes) -> Values:
        """The sums over all interfaces, None without any interface."""
        counts = {}
        for line in content.splitlines()[2:]:
            name, _, numbers = line.rpartition(b":")
            if self._counts(name.strip()):
                words = numbers.split()
                counts[name.strip()] = [int(words[field]) for field in _FIELDS]
        return self._sums.add(counts) if counts else (None,) * len(_FIELDS)

    def _counts(self, name: bytes) -> bool:
        return name in self._hardware or self._is_lowest(name)

    def _is_lowest(self, name: bytes) -> bool:
        """Checked each time where there is no hardware: a bridge may get its first port later."""
        if name == b"lo" or name.startswith(b"ifb"):
            return False
        links = list_names(self._net / os.fsdecode(name))
        if any(link.startswith("lower_") for link in links):
            return False
        if "device" in links:
            self._hardware.add(name)
            return True
        if self._hardware_leads is None:
            outward = _default_interfaces(self._routes)
            self._hardware_leads = any(self._has_hardware(each) for each in outward)
        return "brport" not in links and not self._hardware_leads

    def _has_hardware(self, name: str, *, deep: int = 4) -> bool:
        """Whether an interface, or one that it is stacked on, is a device."""
        links = list_names(self._net / name)
        lower = (link.removeprefix("lower_") for link in links if link.startswith("lower_"))
        stacked = deep > 0 and any(self._has_hardware(each, deep=deep - 1) for each in lower)
        return "device" in links or stacked


def _default_interfaces(routes: Path) -> set[str]:
    """Interfaces of default routes; none where the list cannot be read.

    Source: Linux net/ipv4/fib_trie.c, fib_route_seq_show(): destination and mask are in hex.
    """
    try:
        lines = routes.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    except OSError:
        return set()
    fields = (line.split() for line in lines)
    return {each[0] for each in fields if len(each) > 7 and each[1] == each[7] == "00000000"}


class ProtocolNumbers:
    """Parses /proc/net/snmp or netstat: pairs of a line of names and one of numbers.

    Source: Linux Documentation/networking/snmp_counter.rst.
    """

    def __init__(self, protocol: str, fields: Sequence[str]) -> None:
        self._head = b"\n" + protocol.encode() + b": "
        self._fields = [field.encode() for field in fields]
        self._names = b""
        self._places: list[int | None] = []

    def __call__(self, content: bytes) -> Values:
        """One number per field; None where the kernel does not count it."""
        content = b"\n" + content
        at = content.index(self._head)
        values_at = content.index(self._head, at + 1)
        names = content[at:values_at]
        if names != self._names:
            words = names.split()
            self._places = [words.index(f) if f in words else None for f in self._fields]
            self._names = names
        end = content.find(b"\n", values_at + 1)
        values = content[values_at : end if end >= 0 else None].split()
        return tuple(None if place is None else int(values[place]) for place in self._places)
