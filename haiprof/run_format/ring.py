"""The ring: the newest spans of a rank in shared memory, which a death of its process leaves whole.

The rank makes it (`in_job/spans.py`) and hands its descriptor to the agent of its node with the
first message (`in_job/commands.py`). When the process has ended, the agent adds to phases.rec what
never came there (`agent/node_agent.py`). All is in words of 64 bits, little-endian: a header, then
records as in phases.rec, the oldest of which is overwritten by the next.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass

from haiprof.run_format.schema import KIND_NAMES, MARK, OPTIMIZER, TAG_BITS, TAG_MASK

RING_MAGIC = int.from_bytes(b"haiprofR", "little")
RING_VERSION = 1
RING_CAPACITY = 1 << 15
"""Records: of the last second, which the file may lack, and much more where steps are long."""
WORDS_PER_RECORD = 2
_WORD_BYTES = 8

# Places of words in the header.
MAGIC, VERSION, CAPACITY = range(3)
COUNT = 3  # spans put in so far; the next goes to this one modulo the capacity
SETTLED = 4  # spans that the file has, or that were left out of it on purpose; they come first
OPENS_NS = 5  # spans that began before this are not kept: warm-up. `NEVER` until that is over
CLOSES_NS = 6  # the recording ends with the first optimizer or marked step that ends then or later
STATE = 7
STEPS = 8  # optimizer steps among the spans put in so far
OPEN = 16  # from here on by kind: when the span began that is open now, or 0
OPEN_COUNT = 16
HEADER_WORDS = 32
HEADER_BYTES = HEADER_WORDS * _WORD_BYTES
RING_BYTES = HEADER_BYTES + RING_CAPACITY * WORDS_PER_RECORD * _WORD_BYTES

RECORDING, ENDED = 1, 2  # values of STATE
NEVER = (1 << 57) - 1  # as large as a time in a record can be


@dataclass(frozen=True, slots=True, kw_only=True)
class Ring:
    """What a ring held when it was read."""

    records: tuple[tuple[int, int], ...]  # the two words of sound records, in order of their ends
    count: int  # spans that were ever put in
    settled: int
    opens_ns: int
    closes_ns: int
    ended: bool  # whether the recording had come to its own end, and the file has all of it
    step_count: int
    open_ns: dict[str, int]  # by name of the phase that was under way: when it began

    @property
    def overwritten(self) -> int:
        """Spans that neither the file nor the ring has: the disk had not answered for long."""
        return max(self.count - self.settled - RING_CAPACITY, 0)

    def lacking(self, written: bytes) -> list[tuple[int, int]]:
        """The newest records of the recording, those that the file lacks."""
        words = array("q", written)
        have = set(zip(words[::2], words[1::2], strict=True))
        newest = max(words[1::2], default=0) >> TAG_BITS  # what it lacks before, the disk refused
        found = []
        for start, end in self.records:
            if start >> TAG_BITS < self.opens_ns:
                continue
            if end >> TAG_BITS >= newest and (start, end) not in have:
                found.append((start, end))
            if start & TAG_MASK in (OPTIMIZER, MARK) and end >> TAG_BITS >= self.closes_ns:
                break
        return found


def read_ring(data: bytes) -> Ring | None:
    """What a ring holds; None where these bytes are none.

    Whatever they say is checked: a record that was being overwritten has an end before its start.
    """
    if len(data) != RING_BYTES or sys.byteorder != "little":
        return None
    words = memoryview(data).cast("q")
    if (words[MAGIC], words[VERSION], words[CAPACITY]) != (RING_MAGIC, RING_VERSION, RING_CAPACITY):
        return None
    if words[STATE] not in (RECORDING, ENDED) or any(words[w] < 0 for w in range(COUNT, STEPS + 1)):
        return None
    filled = min(words[COUNT] + 1, RING_CAPACITY)  # one may be whole that was not counted yet
    body = words[HEADER_WORDS : HEADER_WORDS + WORDS_PER_RECORD * filled]
    sound = [
        (start, end)
        for start, end in zip(body[::2], body[1::2], strict=True)
        if 0 < start >> TAG_BITS <= end >> TAG_BITS and start & TAG_MASK in KIND_NAMES
    ]
    return Ring(
        records=tuple(sorted(sound, key=lambda pair: pair[1] >> TAG_BITS)), count=words[COUNT],
        settled=min(words[SETTLED], words[COUNT]), opens_ns=words[OPENS_NS],
        closes_ns=words[CLOSES_NS], ended=words[STATE] == ENDED, step_count=words[STEPS],
        open_ns={
            name: words[OPEN + kind]
            for kind, name in KIND_NAMES.items()
            if 0 < words[OPEN + kind] < NEVER
        },
    )  # fmt: skip
