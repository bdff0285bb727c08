"""What the job prints into files, read from beside: last lines, errors, losses, rates.

A pipe or a terminal is somebody else's: nothing is read there, and the job's own is never changed.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from haiprof.run_format.secrets import mask_text
from haiprof.run_format.writer import note_line

LINE_CHARS = 400
"""So much of a line is kept, and looked at."""

_NUMBER = r"(?P<number>\d[\d,]{0,15}(?:\.\d{1,9})?)"
_THING = (
    r"(?P<thing>tokens?|toks?|samples?|sequences?|seqs?|images?|imgs?|examples?|steps?|iterations?|"
    r"iters?|it|batch(?:es)?)"
)
_A_SECOND = r"[ _]?(?:/|per)[ _]?s(?:ec(?:onds?)?)?"
_RATES = tuple(re.compile(pattern, re.I) for pattern in (
    rf"(?<![a-z]){_THING}{_A_SECOND}[\"')\]]{{0,2}} ?[:=] ?[\"']?{_NUMBER}",
    rf"(?<![\w.,]){_NUMBER} ?(?P<scale>[kM]?) ?{_THING}{_A_SECOND}\b",
    rf"(?<!\w)(?P<thing>t)ps[\"']? ?[:=] ?{_NUMBER}",
    rf"(?<![\w.,]){_NUMBER} ?s(?P<each>)(?:ec)?/{_THING}\b",
))  # fmt: skip
"""`train_samples_per_second: 41`, `12.5k tok/s`, `tps: 5,432`, `4.0s/it`."""
_RATE_SIGN = re.compile(r"/ ?s|per[ _]s|tps|s/[a-z]|sec/")
_NEAR = 60
"""A rate stands within so many characters of its sign."""
_EVALUATES = re.compile(r"(?<![a-z])(?:eval|val|test|predict|infer|generat|download)", re.I)
_BEGIN = 40
"""Characters of a line that say what it is about."""
_UNITS = {"t": "tokens", "se": "sequences", "sa": "samples", "im": "images", "e": "samples"}
"""By how a word begins; all others are steps."""
_LOSS = re.compile(
    r"(?:loss|perplexity|ppl)(\w{0,20})[\"')\]]{0,2}\s{0,4}(?:[:=]|\bis\b)?\s{0,4}(?:tensor\()?"
    r"[-+]?(?:nan|inf(?:inity)?)\b", re.I,
)  # fmt: skip
_NO_LOSS = re.compile(
    r"(?:best|min|minimum|lowest|prev|previous|initial|early\w{0,12})(?:[ _]\w{1,12}){0,2}[ _]?$",
    re.I,
)
"""Words before a loss that is infinite in any healthy job: the best one before the first."""
_STEP = re.compile(
    r"(?<![a-z])(?:global[_ ]?step|step|iteration|iter|it|batch)s?[\"'\]]?\s{0,4}[:=#]?\s{0,4}"
    r"\[?(\d{1,12})\b|(?<!\d)(\d{1,12})/\d{1,12} \[", re.I,
)  # fmt: skip
_TRACEBACK = "Traceback (most recent call last)"
_PLACE = re.compile(r'\s{1,8}File "([^"]{1,300})", line (\d{1,9})')
_ERROR = re.compile(r"[A-Za-z_][\w.]{0,100}(?::|$)")
_KINDS = (
    ("nccl", re.compile(
        r"NCCL (?:WARN|ERROR)|nccl(?:System|Internal|UnhandledCuda|Remote|InvalidUsage)Error|"
        r"Watchdog caught collective operation timeout")),
    ("memory", re.compile(
        r"(?:CUDA|HIP) (?:error: )?out of memory|OutOfMemoryError|std::bad_alloc|oom[_-]kill|"
        r"DefaultCPUAllocator: (?:can't|not enough)|Out of memory: Killed|Cannot allocate memory")),
)  # fmt: skip
_OF_KINDS = re.compile(r"NCCL|nccl|Watch|emory|OOM|oom|alloc")
_MARK = re.compile(r"\[(?:(rank)|[a-z_]{1,20})(\d{1,7})\]: ?")
"""Torch's own `[rank1]:`, and `[trainer1]:` of torchrun, whose number is not the rank's."""
_NCCL_PROCESS = re.compile(r"[\w.-]{1,100}:(\d{1,10}):\d{1,10} \[\d{1,4}\] ")


class Word(NamedTuple):
    """What one line tells."""

    kind: str
    """`loss` (NaN or infinite), `traceback` (its last line), `nccl`, `memory`, or `rate`."""
    text: str
    step: int | None = None
    """As it is printed."""
    per_second: float | None = None
    unit: str | None = None
    """`tokens`, `samples`, `sequences`, `images`, or `steps`."""


class Stream:
    """The lines of one rank in one file; it knows whether it is within a traceback."""

    def __init__(self) -> None:
        self._place: str | None = None

    def read_line(self, line: str) -> list[Word]:
        """What a line without its mark tells."""
        line = line[:LINE_CHARS]
        if line.lstrip().startswith(_TRACEBACK):
            self._place = ""
            return []
        if self._place is not None:
            if place := _PLACE.match(line):
                self._place = f" ({place[1].rpartition('/')[2]}:{place[2]})"
            if line[:1].isspace() or not line:
                return []
            place_text, self._place = self._place, None
            if _ERROR.match(line):
                return [Word("traceback", line.rstrip() + place_text)]
        return list(find_words(line))


def find_words(line: str) -> Iterator[Word]:
    """What a line by itself tells: most tell nothing, and that is found out fast."""
    if _OF_KINDS.search(line):
        yield from (Word(kind, line.strip()) for kind, pattern in _KINDS if pattern.search(line))
    low = line.lower()
    loss = _LOSS.search(line) if "nan" in low or "inf" in low else None
    before = line[max(loss.start() - 40, 0) : loss.start()] if loss else ""
    if loss and "scale" not in loss[1].lower() and not _NO_LOSS.search(before):
        said = _STEP.search(line)
        yield Word("loss", line.strip(), int(said[1] or said[2]) if said else None)
    at = _RATE_SIGN.search(low)
    rate = _find_rate(line, line[max(at.start() - _NEAR, 0) : at.end() + _NEAR]) if at else None
    if rate:
        yield rate


def _find_rate(line: str, near: str) -> Word | None:
    said = next(filter(None, (pattern.search(near) for pattern in _RATES)), None)
    if said is None:
        return None
    parts = said.groupdict()
    value = float(parts["number"].replace(",", ""))
    value *= {"k": 1e3, "m": 1e6}.get((parts.get("scale") or "").lower(), 1.0)
    name = near[: said.start()].rpartition(" ")[2]
    if not value or _EVALUATES.search(f"{line[:_BEGIN]} {name}"):
        return None
    thing = parts["thing"].lower()
    unit = next((unit for begin, unit in _UNITS.items() if thing.startswith(begin)), "steps")
    return Word("rate", line.strip(), None, 1 / value if "each" in parts else value, unit)


def take_mark(line: str) -> tuple[str, int | None, int | None]:
    """A line without the mark of whoever put it there: (line, rank, process), None: not said."""
    mark = _MARK.match(line)
    rank = int(mark[2]) if mark and mark[1] else None
    line = line[mark.end() :] if mark else line
    process = _NCCL_PROCESS.match(line) if "NCCL" in line else None
    return line, rank, int(process[1]) if process else None


STDOUT, STDERR = 1, 2
TURN_S = 2.0
TURN_BYTES = 1 << 17
"""So much of a file is read in a turn; of what is more, the end."""
TAIL_BYTES, FAILED_LINES, CLEAN_LINES = 1 << 14, 60, 5
MOST_FILES = 256
_MOST = {"loss": 1, "traceback": 8, "nccl": 8, "memory": 8, "rate": 200}
"""So many words of a kind of one rank in one file are written down: the first ones."""
_RATE_GAP_S = 10.0


class OutputFile(NamedTuple):
    """A file that a process prints into."""

    path: str
    device: int
    inode: int
    begun: int
    """How long it was when the process was first seen."""


class _Source:
    """What is known of one file."""

    def __init__(self, number: int, file: OutputFile) -> None:
        self.number, self.file = number, file
        self.offset, self.rest, self.skipped = file.begun, b"", 0
        self.told: dict[str, Any] = {}
        self.streams: dict[int | None, Stream] = {}
        self.counts: dict[tuple[str, int | None], int] = {}
        self.rate_at: dict[str, float] = {}


class JobOutput:
    """Reads the files that the processes of a node print into, in a thread of its own."""

    def __init__(self, events: Path, proc: Path, rank_of: Callable[[int], int | None]) -> None:
        self._events, self._proc, self._rank_of = events, proc, rank_of
        self._files: dict[int, dict[int, OutputFile]] = {}
        self._sources: dict[tuple[int, int], _Source] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="haiprof-output", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def close(self, wait_s: float) -> None:
        """Reads what is left, and ends."""
        self._stop.set()
        self._thread.join(wait_s)

    def find(self, pid: int) -> None:
        """Notes the files that a process prints into: a shell may have put them there later."""
        known = self._files.setdefault(pid, {})
        for stream in (STDOUT, STDERR):
            if stream not in known and (found := _open_file(pid, stream, self._proc)):
                known[stream] = found
                number = len(self._sources)
                if number < MOST_FILES:
                    self._sources.setdefault(found[1:3], _Source(number, found))

    def last_lines(self, pid: int, rank: int | None, *, failed: bool) -> dict[str, list[str]]:
        """What a process printed last, by stream, as far as it is its own.

        In a file that others print to as well, only torch's `[rank1]:` tells whose a line is.
        """
        found, own = {}, self._files.get(pid, {})
        same = own.get(STDOUT, ())[1:3] == own.get(STDERR, ())[1:3]
        for stream, name in ((STDOUT, "stdout"), (STDERR, "stderr")):
            if stream not in own or (stream == STDOUT and same):
                continue  # in the one file errors stand, too
            ranks = self._ranks(own[stream][1:3], but=pid)
            shared = any(rank is None or other not in (None, rank) for other in ranks)
            text = _read(own[stream], None, TAIL_BYTES)[0].decode(errors="replace")
            lines = [line[:LINE_CHARS] for line in text.splitlines()]
            if shared:
                mark = f"[rank{rank}]:"
                lines = [line.removeprefix(mark).removeprefix(" ")
                         for line in lines if line.startswith(mark)]  # fmt: skip
            lines = [line for line in lines if not line.startswith("haiprof: ")]
            kept = lines[-(FAILED_LINES if failed else CLEAN_LINES) :]
            found[name] = [mask_text(line) for line in kept]
        return found

    def _ranks(self, file: tuple[int, ...], but: int | None = None) -> list[int | None]:
        """Of all other processes that print into a file; None for one that is no rank."""
        return [
            self._rank_of(pid)
            for pid, own in list(self._files.items())
            if pid != but and any(each[1:3] == file for each in list(own.values()))
        ]

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._stop.wait(TURN_S)
            for source in list(self._sources.values()):
                with contextlib.suppress(OSError):
                    self._read_on(source, is_last)

    def _read_on(self, source: _Source, is_last: bool) -> None:
        """Reads whole lines that were added; at the end also one that nobody ended."""
        new, begin, source.offset = _read(source.file, source.offset, TURN_BYTES)
        if begin:
            source.skipped, source.rest = source.skipped + begin, b""
        *lines, rest = (source.rest + new).replace(b"\r", b"\n").split(b"\n")
        source.rest = b"" if is_last else rest[:LINE_CHARS]
        for raw in [*lines, rest] if is_last else lines:
            line, rank, process = take_mark(raw[: 2 * LINE_CHARS].decode(errors="replace"))
            if line.startswith("haiprof: "):
                continue
            rank = self._rank_of(process) if rank is None and process is not None else rank
            for word in source.streams.setdefault(rank, Stream()).read_line(line):
                self._note(source, word, rank)
        ranks = sorted({rank for rank in self._ranks(source.file[1:3]) if rank is not None})
        told = {"file": Path(source.file.path).name, "ranks": ranks, "skipped": source.skipped}
        if told != source.told:  # the last one holds: ranks are known once they report in
            source.told = told
            self._write({"type": "output", "output": source.number, **told})

    def _note(self, source: _Source, word: Word, rank: int | None) -> None:
        """Writes a word down, unless there are enough of its kind."""
        place, now = (word.kind, rank), time.monotonic()
        if source.counts.get(place, 0) >= _MOST[word.kind]:
            return
        if word.unit is not None:
            if now < source.rate_at.get(word.unit, 0.0) + _RATE_GAP_S:
                return
            source.rate_at[word.unit] = now
        source.counts[place] = source.counts.get(place, 0) + 1
        self._write({"type": "printed", "output": source.number, "rank": rank, **word._asdict(),
                     "text": mask_text(word.text)})  # fmt: skip

    def _write(self, line: dict[str, Any]) -> None:
        note_line(self._events, {"wall_ns": time.time_ns(), **line})


def _open_file(pid: int, stream: int, proc: Path) -> OutputFile | None:
    """Of a process; None where it is no file (a terminal, a pipe), or cannot be seen."""
    link = proc / str(pid) / "fd" / str(stream)
    try:
        found = link.stat()
        path = os.readlink(link)
    except OSError:
        return None
    is_file = stat.S_ISREG(found.st_mode)
    return OutputFile(path, found.st_dev, found.st_ino, found.st_size) if is_file else None


def _read(file: OutputFile, offset: int | None, limit: int) -> tuple[bytes, int, int]:
    """Bytes from an offset on, or the end of what was printed; what was skipped; the new offset."""
    try:
        number = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b"", 0, offset or 0
    try:
        found = os.fstat(number)
        if (found.st_dev, found.st_ino) != (file.device, file.inode):
            return b"", 0, offset or 0
        start = file.begun if offset is None else offset
        start = 0 if start > found.st_size else start  # it was emptied meanwhile
        begin = max(start, found.st_size - limit)
        content = os.pread(number, limit, begin)
        return content, begin - start, begin + len(content)
    except OSError:
        return b"", 0, offset or 0
    finally:
        os.close(number)
