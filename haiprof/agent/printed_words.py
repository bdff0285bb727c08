"""What a line that a job printed tells: a loss that is no number, an error, a rate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

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
