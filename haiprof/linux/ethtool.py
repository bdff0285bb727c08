"""The statistics of a network driver, as `ethtool -S` lists them, through one ioctl."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import socket
import struct
from collections.abc import Callable

SIOCETHTOOL = 0x8946
GSTRINGS, GSTATS, GSSET_INFO = 0x1B, 0x1D, 0x37
STATISTICS_SET = 1  # ETH_SS_STATS
_NAME_BYTES = 32  # ETH_GSTRING_LEN
_INTERFACE_BYTES = 16  # IFNAMSIZ
_HEAD = struct.Struct("=II")  # command, number of statistics
_STRINGS_HEAD = struct.Struct("=III")  # command, set, number
_SET_INFO = struct.Struct("=IIQI")  # command, reserved, mask of sets, size of the first
# Kernels before 2026 write as many values as there are by now, whatever the caller has room for
# (`net: ethtool: Don't overflow user buffers`), and the number grows with the channels of a device.
# Pages that are not written cost nothing.
_BUFFER_BYTES = 4 << 20

Ioctl = Callable[[int, int, bytes], object]


class Ethtool:
    """Reads the statistics of network drivers; needs no privilege.

    Source: Linux include/uapi/linux/ethtool.h, net/ethtool/ioctl.c.
    """

    def __init__(self, ioctl: Ioctl = fcntl.ioctl) -> None:
        self._ioctl = ioctl
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._buffer = mmap.mmap(-1, _BUFFER_BYTES)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._buffer))

    def names(self, interface: str) -> list[str]:
        """The names of an interface's statistics; none where its driver has none."""
        _SET_INFO.pack_into(self._buffer, 0, GSSET_INFO, 0, 1 << STATISTICS_SET, 0)
        self._ask(interface)
        _, _, mask, count = _SET_INFO.unpack_from(self._buffer)
        if not mask or not count:
            return []
        _STRINGS_HEAD.pack_into(self._buffer, 0, GSTRINGS, STATISTICS_SET, count)
        self._ask(interface)
        count = min(_STRINGS_HEAD.unpack_from(self._buffer)[2], _BUFFER_BYTES // _NAME_BYTES - 1)
        begin = _STRINGS_HEAD.size
        raw = self._buffer[begin : begin + count * _NAME_BYTES]
        cut = [raw[at : at + _NAME_BYTES] for at in range(0, len(raw), _NAME_BYTES)]
        return [name.partition(b"\0")[0].decode(errors="replace") for name in cut]

    def values(self, interface: str, count: int) -> tuple[int, ...]:
        """The present values, of 64 bits each; none if their number has changed a lot."""
        _HEAD.pack_into(self._buffer, 0, GSTATS, count)
        self._ask(interface)
        found = min(_HEAD.unpack_from(self._buffer)[1], _BUFFER_BYTES // 8 - 1)
        return struct.unpack_from(f"={found}Q", self._buffer, _HEAD.size)

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()

    def _ask(self, interface: str) -> None:
        name = interface.encode()[: _INTERFACE_BYTES - 1]
        request = struct.pack(f"={_INTERFACE_BYTES}sQ16x", name, self._address)
        self._ioctl(self._socket.fileno(), SIOCETHTOOL, request)
