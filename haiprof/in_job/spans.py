"""Where wrappers put spans: a buffer that the drain thread empties, and the ring that outlives us.

`SpanBuffer` is plain Python. Where the package was built with a C compiler, `_spans.SpanBuffer`
does the same at a fraction of the price; tests hold the two against each other.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import itertools
import mmap
import os
import struct
import time
from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from haiprof.base.descriptors import Descriptor
from haiprof.in_job.threads import hold_size_signal
from haiprof.run_format import ring
from haiprof.run_format.schema import DATA, DATA_END, OPTIMIZER, TAG_BITS, TAG_MASK

_OPEN_MASK = ring.OPEN_COUNT - 1
_SLOT_MASK = ring.RING_CAPACITY - 1
_RECORD = struct.Struct("<qq")
_RECORD_BYTES, _pack_record = _RECORD.size, _RECORD.pack_into
_FIRST_BYTE = ring.HEADER_BYTES
_OPEN_WORD = tuple(ring.OPEN + (DATA if k == DATA_END else k) for k in range(ring.OPEN_COUNT))
_F_ADD_SEALS = 1033  # of <linux/fcntl.h>; the module has it from Python 3.13 on
_SEALS = 0x0001 | 0x0002 | 0x0004  # against more seals, shrinking and growing
_VERSION = 2  # of spans.h; one that was built of older text is not used
_FAILED = ctypes.c_void_p(-1).value

try:
    from haiprof.in_job import _spans
except ImportError:  # not built, or another interpreter than it was built for
    _compiled = None
else:
    _compiled = _spans if getattr(_spans, "VERSION", 0) == _VERSION else None

_now = time.perf_counter_ns


def make_spans() -> SpanBuffer:
    """The compiled one where there is one that this interpreter can load, else the plain one."""
    made: Any = SpanBuffer if _compiled is None else _compiled.SpanBuffer
    found: SpanBuffer = made()
    return found


def time_call(
    kind: int, original: Callable[..., Any], *others: Any, wrapper: Callable[..., Any], gate: Any,
    spans: SpanBuffer,
) -> Callable[..., Any]:  # fmt: skip
    """What takes spans of a function: `wrapper`, or its compiled form that calls it when needed."""
    if _compiled is None or not isinstance(spans, _compiled.SpanBuffer):
        return wrapper
    timed = _compiled.TimedCall(kind, original, wrapper, gate, spans, *others)
    timed = functools.update_wrapper(timed, original)
    vars(timed)["__code__"] = getattr(original, "__code__", None)
    return timed


def step_ends(
    gate: Any, spans: SpanBuffer, entries: dict[int, Any]
) -> tuple[Callable[[], int], Callable[[Any, int], bool]]:
    """Both ends of an optimizer's step, compiled; 0 and False where Python is to do it."""
    # The first gives the time in ns, which the second takes.
    if _compiled is None or not isinstance(spans, _compiled.SpanBuffer):
        return _do_not, _do_not
    ends = _compiled.StepEnds(gate, spans, entries)
    return ends.begin, ends.end


def _do_not(*_: Any) -> bool:
    return False


class _PlainGate:
    """As the compiled one: what wrappers look at first at every call."""

    __slots__ = (
        "busy", "idle", "loading", "optimizer_count", "owner", "owner_seen_ns", "slow",
    )  # fmt: skip


class SpanBuffer:
    """Takes spans on the job's threads. Each call is whole under the interpreter lock.

    This is the plain one: a list of numbers, which costs least between the job's own work.
    """

    def __init__(self) -> None:
        self._words: list[int] = []  # start ns, end ns, kind | tag << TAG_BITS
        self._make_header()

    def _make_header(self) -> None:
        self._ring: Any = None
        self._header: Any = array("q", bytes(ring.HEADER_BYTES))
        self._numbers = itertools.count()

    def begin(self, code: int) -> int:
        """A span of that kind begins; the time in ns."""
        start = _now()
        self._header[ring.OPEN + (code & _OPEN_MASK)] = start
        return start

    def end(self, start_ns: int, code: int) -> int:
        """It is over, and is put in; the time in ns."""
        end = _now()
        self.put(start_ns, end, code)
        self._header[_OPEN_WORD[code & _OPEN_MASK]] = 0
        return end

    def put(self, start_ns: int, end_ns: int, code: int) -> None:
        """Puts in one that was not announced."""
        self._words.extend((start_ns, end_ns, code))
        kind = code & TAG_MASK
        if kind == OPTIMIZER:
            self._header[ring.STEPS] += 1
        if self._ring is not None:
            number = next(self._numbers)  # packed here: a call costs more than it does
            _pack_record(
                self._ring, _FIRST_BYTE + (number & _SLOT_MASK) * _RECORD_BYTES,
                start_ns << TAG_BITS | kind, end_ns << TAG_BITS | code >> TAG_BITS,
            )  # fmt: skip
            self._header[ring.COUNT] = number + 1

    def take(self) -> bytes:
        """All since the last time, as in phases.rec; on the drain thread, while others put in."""
        count = len(self._words) // 3 * 3
        words = self._words[:count]
        del self._words[:count]
        return _pack_words(words)

    def clear(self) -> None:
        """Forgets what is in the buffer."""
        self._words.clear()

    def attach(self, address: int) -> None:
        """From now on into the ring at that address, too, and what is in the buffer now."""
        before, waiting = self._header, _pack_words(self._words)[-ring.RING_BYTES // 2 :]
        shared = memoryview((ctypes.c_char * ring.RING_BYTES).from_address(address)).cast("B")
        header = shared.cast("q")
        header[ring.OPEN : ring.HEADER_WORDS] = before[ring.OPEN : ring.HEADER_WORDS]
        header[ring.STEPS] = before[ring.STEPS]
        shared[ring.HEADER_BYTES : ring.HEADER_BYTES + len(waiting)] = waiting
        header[ring.COUNT] = len(waiting) // _RECORD.size
        self._numbers = itertools.count(header[ring.COUNT])
        self._ring, self._header = shared, header

    def detach(self) -> None:
        """No longer into the ring: in a forked child it is the parent's."""
        self._make_header()

    def __len__(self) -> int:
        """Spans in the buffer."""
        return len(self._words) // 3


def _pack_words(words: list[int]) -> bytes:
    packed = array("q", bytes(len(words) // 3 * _RECORD.size))
    codes = words[2::3]
    packed[::2] = array(
        "q", [t << TAG_BITS | c & TAG_MASK for t, c in zip(words[::3], codes, strict=True)]
    )
    packed[1::2] = array(
        "q", [t << TAG_BITS | c >> TAG_BITS for t, c in zip(words[1::3], codes, strict=True)]
    )
    return packed.tobytes()


class RingMemory:
    """The shared memory of a ring, and its descriptor until the agent has been given it."""

    def __init__(self, *, warm: bool) -> None:
        # Its pages are there from the start and the file is sealed, so that no write of ours can
        # raise SIGBUS in the job, as it could where a disk is full. It is never unmapped: a thread
        # may be writing to it.
        number = os.memfd_create("haiprof-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._descriptor: Descriptor | None = Descriptor(number)
        try:
            with hold_size_signal():
                os.posix_fallocate(self._descriptor.check(), 0, ring.RING_BYTES)
            fcntl.fcntl(self._descriptor.check(), _F_ADD_SEALS, _SEALS)
            self.address = _map_shared(self._descriptor.check(), ring.RING_BYTES)
        except OSError:
            self.close()
            raise
        self._header = (ctypes.c_int64 * ring.HEADER_WORDS).from_address(self.address)
        self._settled = 0
        header = self._header
        header[ring.OPENS_NS], header[ring.CLOSES_NS] = 0 if warm else ring.NEVER, ring.NEVER
        header[ring.CAPACITY], header[ring.VERSION] = ring.RING_CAPACITY, ring.RING_VERSION
        header[ring.STATE], header[ring.MAGIC] = ring.RECORDING, ring.RING_MAGIC

    def settle(self, count: int, *, opens_ns: int, closes_ns: int) -> None:
        """So many more spans are in the file, or were left out on purpose."""
        self._settled += count
        self._header[ring.OPENS_NS], self._header[ring.CLOSES_NS] = opens_ns, closes_ns
        self._header[ring.SETTLED] = self._settled

    def end(self) -> None:
        """The recording is over: the file has all of it."""
        self._header[ring.STATE] = ring.ENDED

    def descriptor(self) -> int | None:
        """What the agent is to be given; None once it has been, or where the job has closed it."""
        own = self._descriptor
        return own.number if own is not None and own.is_ours() else None

    def close(self) -> None:
        """Lets go of the descriptor: the memory stays."""
        own, self._descriptor = self._descriptor, None
        if own is not None:
            own.close()


def _map_shared(number: int, size: int) -> int:
    """Address of a file's content. Python's own mmap would keep another descriptor of it."""
    library = ctypes.CDLL(None, use_errno=True)
    map_file: Callable[..., int | None] = library.mmap
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [
        ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
    ]  # fmt: skip
    address = map_file(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, number, 0)
    if address is None or address == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return address


if TYPE_CHECKING:
    from haiprof.in_job._spans import Gate as Gate
else:
    Gate = _PlainGate if _compiled is None else _compiled.Gate
