"""One target against many inputs in this process: limits, findings, and what is new."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from types import CodeType, FrameType

import haiprof
from tests.fuzz.mutate import LIMIT_BYTES, mutate
from tests.fuzz.sanitized import edge_counter
from tests.fuzz.targets import Target

CPU_LIMIT_S = 5.0
"""CPU time of one input of at most 64 KiB."""
MEMORY_LIMIT_BYTES = 512 << 20
"""What resident memory may grow by for one input."""
ADDRESS_SPACE_BYTES = 4 << 30
"""More address space than this, beyond what the process has, is refused."""
_POOL_LIMIT = 2000
_TELL_EVERY_S = 1.0
_HEADER_BYTES = 16  # of the shared page: length of the input, and how many there were
_Trace = Callable[[FrameType, str, object], "_Trace"]
_Handler = Callable[[int, FrameType | None], object] | int | None
_CLEAR_REFS = Path("/proc/self/clear_refs")
_PACKAGE = Path(haiprof.__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """An input that did what no input may."""

    kind: str
    """What it did and where: two inputs of one kind are one finding."""
    data: bytes
    details: str
    """A traceback, or what the sanitizer said."""


@dataclass(slots=True)
class Tally:
    """How far a target is; kept on disk between runs."""

    executions: int = 0
    seconds: float = 0.0
    findings: dict[str, str] = field(default_factory=dict)
    """Name of the input's file by kind."""


class TooSlow(BaseException):
    """Raised in the middle of a reader that takes too long; nothing catches it by mistake."""


class Workplace:
    """What one target keeps on disk: tally, inputs worth keeping, findings, the input at hand."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.corpus, self.findings = root / "corpus", root / "findings"
        for folder in (self.corpus, self.findings):
            folder.mkdir(parents=True, exist_ok=True)
        current = root / "current"
        with current.open("a+b") as file:
            file.truncate(_HEADER_BYTES + LIMIT_BYTES)
            self._current = mmap.mmap(file.fileno(), _HEADER_BYTES + LIMIT_BYTES)

    def tally(self) -> Tally:
        """As it was last told."""
        try:
            return Tally(**json.loads((self.root / "tally.json").read_text()))
        except (OSError, ValueError):
            return Tally()

    def tell(self, tally: Tally) -> None:
        """Keeps it, whole or not at all."""
        draft = self.root / "tally.tmp"
        draft.write_text(json.dumps(asdict(tally)))
        os.replace(draft, self.root / "tally.json")

    def begin(self, number: int, data: bytes) -> None:
        """Notes the input at hand where it outlives this process."""
        self._current[:_HEADER_BYTES] = len(data).to_bytes(8, "little") + number.to_bytes(
            8, "little"
        )
        self._current[_HEADER_BYTES : _HEADER_BYTES + len(data)] = data

    def at_hand(self) -> tuple[int, bytes]:
        """The input that was at hand, and its number."""
        length = int.from_bytes(self._current[:8], "little")
        number = int.from_bytes(self._current[8:_HEADER_BYTES], "little")
        return number, bytes(self._current[_HEADER_BYTES : _HEADER_BYTES + length])

    def keep(self, data: bytes) -> None:
        """An input with a new outcome."""
        (self.corpus / _name(data)).write_bytes(data)

    def report(self, finding: Finding, tally: Tally) -> None:
        """Keeps a finding: of each kind the shortest input."""
        known = tally.findings.get(finding.kind)
        if known and (self.findings / known).stat().st_size <= len(finding.data):
            return
        name = known or _name(finding.data)
        (self.findings / name).write_bytes(finding.data)
        (self.findings / f"{name}.txt").write_text(f"{finding.kind}\n\n{finding.details}")
        tally.findings[finding.kind] = name


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def limit_memory() -> None:
    """Refuses this process more address space; a sanitizer's own needs make that impossible."""
    if is_sanitized():
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ADDRESS_SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def is_sanitized() -> bool:
    """Whether this process runs with the sanitizers' libraries."""
    return "libasan" in os.environ.get("LD_PRELOAD", "")


def attempt(target: Target, data: bytes) -> tuple[Finding | None, str]:
    """Runs one input."""
    _forget_peak()
    before, began = _peak_bytes(), time.process_time()
    error: BaseException | None = None
    outcome = ""
    try:
        with _cpu_limit():
            outcome = repr(target.run(data))[:200]
    except target.refused as refusal:
        outcome = f"{type(refusal).__name__}{_place(refusal, exact=True)}"
    except KeyboardInterrupt:
        raise
    except BaseException as other:  # noqa: BLE001 - panics of polars are no Exceptions
        error = other
    took_s, grown = time.process_time() - began, _peak_bytes() - before
    if isinstance(error, TooSlow) or took_s > 2 * _cpu_limit_s():
        where = _place(error) if error else ""
        return Finding(kind=f"slow{where}", data=data, details=f"{took_s:.1f} s"), outcome
    if error is not None:
        kind = f"{type(error).__name__}{_place(error)}"
        details = "".join(traceback.format_exception(error))
        return Finding(kind=kind, data=data, details=details), kind
    if grown > MEMORY_LIMIT_BYTES:
        text = f"{grown >> 20} MiB; {outcome}"
        return Finding(kind="memory", data=data, details=text), outcome
    return None, outcome


def _cpu_limit_s() -> float:
    return CPU_LIMIT_S * (4 if is_sanitized() else 1)


@contextmanager
def _cpu_limit() -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, _cpu_limit_s(), 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _too_slow(_: int, __: FrameType | None) -> None:
    raise TooSlow


def arm() -> _Handler:
    """Makes CPU limits work in this process; what SIGPROF did before is returned."""
    return signal.signal(signal.SIGPROF, _too_slow)


def disarm(before: _Handler) -> None:
    """Takes that back."""
    signal.signal(signal.SIGPROF, before)


def _forget_peak() -> None:
    """Peak memory is counted from here on, at next to no cost."""
    with contextlib.suppress(OSError):  # /proc is read-only: only the highest peak is seen
        _CLEAR_REFS.write_bytes(b"5")


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _place(error: BaseException, *, exact: bool = False) -> str:
    """The innermost function of haiprof's in a traceback, and the line if it shall be exact."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).is_relative_to(_PACKAGE)]
    if not own:
        return ""
    line = f":{own[-1].lineno}" if exact else ""
    return f" in {Path(own[-1].filename).relative_to(_PACKAGE)}{line} {own[-1].name}"


def inputs(target: Target, place: Workplace) -> list[bytes]:
    """What mutations begin from."""
    kept = [path.read_bytes() for path in sorted(place.corpus.iterdir())[:_POOL_LIMIT]]
    return [*target.seeds(), *kept]


class Coverage:
    """Whether an input ran something that none before it did: lines of haiprof, edges in its C.

    Lines are told by `sys.settrace`, edges by a build of tests.fuzz.sanitized.
    """

    def __init__(self) -> None:
        self.lines: set[tuple[CodeType, int]] = set()
        self._is_own: dict[CodeType, bool] = {}
        self._fresh = False
        self._fresh_edges = edge_counter()

    def __enter__(self) -> Coverage:
        """Begins to watch."""
        self._fresh = False
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        """Ends it."""
        sys.settrace(None)

    def fresh(self) -> bool:
        """Whether the last input ran something new."""
        return bool(self._fresh_edges()) or self._fresh

    def _call(self, frame: FrameType, _: str, __: object) -> _Trace | None:
        code = frame.f_code
        is_own = self._is_own.get(code)
        if is_own is None:
            is_own = self._is_own[code] = code.co_filename.startswith(str(_PACKAGE))
        return self._line if is_own else None

    def _line(self, frame: FrameType, event: str, _: object) -> _Trace:
        if event == "line":
            at = frame.f_code, frame.f_lineno
            if at not in self.lines:
                self.lines.add(at)
                self._fresh = True
        return self._line


class Session:
    """One target for some time."""

    def __init__(self, target: Target, place: Workplace, seconds: float) -> None:
        self.target, self.place = target, place
        self.tally = place.tally()
        self._seconds, self._before_s = seconds, self.tally.seconds
        self._told_s = time.monotonic()
        self._began_s = time.process_time()  # a busy machine takes nothing off a target's time
        self.outcomes: set[str] = set()
        self.coverage = Coverage()

    @property
    def over(self) -> bool:
        """Whether its time is used up."""
        return self.tally.seconds >= self._seconds

    def try_one(self, data: bytes) -> bool:
        """Runs an input; whether it did something new."""
        data = data[:LIMIT_BYTES]
        self.tally.executions += 1
        self.place.begin(self.tally.executions, data)
        with self.coverage:
            finding, outcome = attempt(self.target, data)
        if finding is not None:
            self.place.report(finding, self.tally)
        now = time.monotonic()
        self.tally.seconds = self._before_s + time.process_time() - self._began_s
        if now - self._told_s > _TELL_EVERY_S or self.over or finding:
            self._told_s = now
            self.place.tell(self.tally)
        is_new = self.coverage.fresh() or outcome not in self.outcomes
        self.outcomes.add(outcome)
        return is_new and finding is None


def fuzz(session: Session, seed: int) -> None:
    """Mutates what it has, and keeps what does something new."""
    random, target = Random(f"{target_seed(seed, session)}"), session.target
    pool = inputs(target, session.place)
    for data in pool:
        session.try_one(data)
    while not session.over:
        data = mutate(random, random.choice(pool), pool, target.tokens)
        if session.try_one(data) and len(pool) < _POOL_LIMIT:
            pool.append(data)
            session.place.keep(data)


def target_seed(seed: int, session: Session) -> str:
    """Another sequence for each target and each start, the same for the same run."""
    return f"{seed} {session.target.name} {session.tally.executions}"
