"""How each process of the job ended, what it printed into files, and who else uses the cores."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import select
import shutil
import signal
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from haiprof.agent.node_agent import LiveRank
from haiprof.linux import cgroups
from haiprof.linux.processes import ProcessExit, ProcessTree, WatchedProcess
from haiprof.linux.procfs import command_line, environment, process_ids, read_stat, read_text
from haiprof.run_format.environment import RANK_VARIABLES, find_number
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.secrets import mask_text
from haiprof.run_format.writer import append_line, note_line

LINE_CHARS = 400  # so much of a line is kept, and looked at

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
_NEAR = 60  # a rate stands within so many characters of its sign
_OTHER_WORK = re.compile(
    r"(?<![a-z])(?:eval|val|test|predict|infer|generat|download|fetch|writ|sav(?:e|ing)|loading|map\b|tokeniz)",
    re.I,
)
_BEGIN = 40  # characters of a line that say what it is about
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

    kind: str  # `loss` (NaN or infinite), `traceback` (its last line), `nccl`, `memory`, or `rate`
    text: str
    step: int | None = None  # as it is printed
    per_second: float | None = None
    unit: str | None = None  # `tokens`, `samples`, `sequences`, `images`, or `steps`


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
    if not value or _OTHER_WORK.search(f"{line[:_BEGIN]} {name}"):
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
TURN_BYTES = 1 << 17  # so much of a file is read in a turn; of what is more, the end
TAIL_BYTES, FAILED_LINES, CLEAN_LINES = 1 << 14, 60, 5
MOST_FILES = 256
_MOST = {"loss": 1, "traceback": 8, "nccl": 8, "memory": 8, "rate": 200}
"""So many words of a kind of one rank in one file are written down: the first ones."""
_RATE_GAP_S = 10.0  # between rates that are written down; the last one always is


class OutputFile(NamedTuple):
    """A file that a process prints into."""

    path: str
    device: int
    inode: int
    begun: int  # how long it was when the process was first seen


class _Source:
    """What is known of one file."""

    def __init__(self, number: int, file: OutputFile) -> None:
        self.number, self.file = number, file
        self.offset, self.rest, self.skipped = file.begun, b"", 0
        self.told: dict[str, Any] = {}
        self.streams: dict[int | None, Stream] = {}
        self.counts: dict[tuple[str, int | None], int] = {}
        self.rate_at: dict[str, float] = {}
        self.last_rates: dict[str, tuple[Word, int | None]] = {}
        """By unit, where it is not written down yet."""


class JobOutput:
    """Reads the files that the processes of a node print into, in a thread of its own."""

    def __init__(self, events: Path, rank_of: Callable[[int], int | None]) -> None:
        self._events, self._rank_of = events, rank_of
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
            if stream not in known and (found := _open_file(pid, stream)):
                known[stream] = found
                number = len(self._sources)
                if number < MOST_FILES:
                    self._sources.setdefault(found[1:3], _Source(number, found))

    def last_lines(self, pid: int, rank: int | None, *, failed: bool) -> dict[str, list[str]]:
        """What a process printed last, by stream, as far as it is its own."""
        # In a file that others print to as well, only torch's `[rank1]:` tells whose a line is.
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
        for word, rank in list(source.last_rates.values()) if is_last else ():
            self._note(source, word, rank, is_last=True)
        ranks = sorted({rank for rank in self._ranks(source.file[1:3]) if rank is not None})
        told = {"file": Path(source.file.path).name, "ranks": ranks, "skipped": source.skipped}
        if told != source.told:  # the last one holds: ranks are known once they report in
            source.told = told
            self._write({"type": "output", "output": source.number, **told})

    def _note(
        self, source: _Source, word: Word, rank: int | None, *, is_last: bool = False
    ) -> None:
        """Writes a word down, unless there are enough of its kind; the last rate always."""
        place, now = (word.kind, rank), time.monotonic()
        is_full = source.counts.get(place, 0) >= _MOST[word.kind]
        if word.unit is not None:
            source.last_rates[word.unit] = word, rank
            is_full |= now < source.rate_at.get(word.unit, -_RATE_GAP_S) + _RATE_GAP_S
        if is_full and not is_last:
            return
        if word.unit is not None:
            source.rate_at[word.unit] = now
            del source.last_rates[word.unit]
        source.counts[place] = source.counts.get(place, 0) + 1
        self._write({"type": "printed", "output": source.number, "rank": rank, **word._asdict(),
                     "text": mask_text(word.text)})  # fmt: skip

    def _write(self, line: dict[str, Any]) -> None:
        note_line(self._events, {"wall_ns": time.time_ns(), **line})


def _open_file(pid: int, stream: int) -> OutputFile | None:
    """Of a process; None where it is no file (a terminal, a pipe), or cannot be seen."""
    link = f"/proc/{pid}/fd/{stream}"
    try:
        found, path = os.stat(link), os.readlink(link)
    except OSError:
        return None
    is_file = stat.S_ISREG(found.st_mode)
    return OutputFile(path, found.st_dev, found.st_ino, found.st_size) if is_file else None


def _read(file: OutputFile, offset: int | None, limit: int) -> tuple[bytes, int, int]:
    """Bytes from an offset on, or the end of what was printed; what was skipped; the new offset."""
    with contextlib.suppress(OSError):
        number = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(number)
            if (found.st_dev, found.st_ino) == (file.device, file.inode):
                start = file.begun if offset is None else offset
                start = 0 if start > found.st_size else start  # it was emptied meanwhile
                begin = max(start, found.st_size - limit)
                content = os.pread(number, limit, begin)
                return content, begin - start, begin + len(content)
        finally:
            os.close(number)
    return b"", 0, offset or 0


FIRST_SCAN_S, SCAN_GROWTH, MAX_SCAN_S = 0.5, 1.4, 10.0
WATCHED_LIMIT = 1024  # so many processes at the most: each takes a descriptor
OTHERS_LIMIT = 64  # so many lines about processes that are no ranks
TOGETHER_S = 0.03  # so soon after the job those have ended that were killed with it
SETTLE_S = 0.3  # so long the last ends may take to be read
OOM_WAIT_S = 0.2  # so long the kernel's log may be behind the death that it tells of
SLURM_WAIT_S = 3.0
_OF_KILL = ("anonymous_bytes", "file_bytes", "shared_bytes", "in_cgroup")
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ProcessEnds:
    """Watches the processes of the job on this node."""

    def __init__(
        self, run: RunPaths, host: str, job_pid: int, *,
        on_end: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:  # fmt: skip
        self._on_end = on_end
        self._events = run.node(host).events
        self._job_pid, self._tree = job_pid, ProcessTree()
        self._scan_at, self._scan_gap_s = 0.0, FIRST_SCAN_S
        self._watched: dict[int, WatchedProcess] = {}
        self._seen: set[int] = set()
        self._labels: dict[int, int] = {}
        self._reported: dict[int, tuple[int, int]] = {}
        self._cgroups: dict[int, cgroups.Cgroup] = {}
        self._output = JobOutput(self._events, self._rank_of)
        self._address_limits: dict[int, int | None] = {}
        """Bytes of address space that a process may have (`ulimit -v`), by process id; None where
        there is no limit, also where an earlier process of that id had one."""
        self._kills: dict[Path, int] = {}
        self._log = cgroups.KernelLog()
        self._others = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll = select.epoll()
        self._epoll.register(self._wake, select.EPOLLIN)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="haiprof-ends", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()
        self._output.start()

    def tick(self, ranks: Iterable[LiveRank]) -> None:
        """Takes up the ranks that have reported in, and looks for new processes now and then."""
        for rank in ranks:
            self._reported[rank.pid] = rank.rank, int(rank.name.partition(".")[2] or 0)
            self._watch(rank.pid)
        now = time.monotonic()
        if now >= self._scan_at:
            self._tree.refresh()
            found = self._tree.below(self._job_pid)
            for pid in found:
                if pid not in self._seen:
                    self._watch(pid)
            for pid in list(self._watched):  # a shell redirects its output before it runs the job
                self._output.find(pid)
                self._find_address_limit(pid)
            self._seen &= {*found, *self._watched}
            self._scan_at = now + self._scan_gap_s
            self._scan_gap_s = min(self._scan_gap_s * SCAN_GROWTH, MAX_SCAN_S)

    def close(self) -> None:
        """Ends it, once the ends that have happened are written."""
        self._stop.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(SETTLE_S + 1.0)
        self._output.close(SETTLE_S + 1.0)
        for process in self._watched.values():
            process.close()
        self._watched.clear()
        self._epoll.close()
        os.close(self._wake)
        self._log.close()

    def _watch(self, pid: int) -> None:
        if pid in self._watched or len(self._watched) >= WATCHED_LIMIT:
            return
        self._seen.add(pid)
        try:
            process = WatchedProcess(pid)
        except OSError:
            return
        if (label := find_number(environment(pid), RANK_VARIABLES)) is not None:
            self._labels[pid] = label
        self._output.find(pid)
        self._find_address_limit(pid)
        if (cgroup := cgroups.memory_cgroup(pid)) is not None:
            self._cgroups[pid] = cgroup
            self._kills.setdefault(cgroup.folder, cgroups.oom_kill_count(cgroup) or 0)
        self._watched[pid] = process
        self._epoll.register(process.fd, select.EPOLLIN | select.EPOLLONESHOT)

    def _find_address_limit(self, pid: int) -> None:
        with contextlib.suppress(OSError):
            limit, _ = resource.prlimit(pid, resource.RLIMIT_AS)
            self._address_limits[pid] = None if limit == resource.RLIM_INFINITY else limit

    def _wait(self) -> None:
        while not self._stop.is_set():
            self._take(None)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(self._wake)
        while self._watched and self._take(TOGETHER_S):
            pass

    def _take(self, wait_s: float | None) -> bool:
        """Writes down who ends within a time; whether somebody did."""
        ended: list[WatchedProcess] = []
        with contextlib.suppress(OSError, ValueError):
            ready = {fd for fd, _ in self._epoll.poll(wait_s)}
            ended = [process for process in list(self._watched.values()) if process.fd in ready]
            exits = [(process, process.read_exit(), time.time_ns(), time.perf_counter_ns())
                     for process in ended]  # fmt: skip
            for line in [self._line(*each) for each in exits]:
                if line is not None:
                    append_line(self._events, line)
                    if self._on_end is not None:
                        self._on_end(line)
            for process in ended:
                del self._watched[process.pid]
                process.close()
            if ended:
                self._scan_gap_s = FIRST_SCAN_S
        return bool(ended)

    def _line(
        self, process: WatchedProcess, how: ProcessExit, wall_ns: int, mono_ns: int
    ) -> dict[str, Any] | None:
        """The line about one end; None where it is of no interest."""
        pid = process.pid
        rank, attempt = self._rank_of(pid), self._reported.get(pid, (None, None))[1]
        helper = attempt is None and rank is not None and self._rank_of(process.parent or 0) == rank
        if (rank is None and pid != self._job_pid) or helper:
            if how.signal is None or self._others >= OTHERS_LIMIT:
                return None
            self._others += 1
        line: dict[str, Any] = {
            "type": "process_end", "time_ns": mono_ns, "wall_ns": wall_ns, "pid": pid,
            "start_ticks": process.start_ticks, "parent": process.parent,
            "rank": rank, "attempt": attempt, "helper": helper,
            "status": how.status, "signal": how.signal, "core": how.core, "source": how.source,
        }  # fmt: skip
        if how.signal == signal.SIGKILL or how.source == "gone":
            line["oom"] = self._oom(pid)
        failed = how.signal is not None or bool(how.status)
        if failed:
            line |= {"shm": None, "address_limit_bytes": self._address_limits.get(pid)}
            with contextlib.suppress(OSError):  # it is not there
                total, used, _ = shutil.disk_usage("/dev/shm")
                line["shm"] = {"used_bytes": used, "total_bytes": total}
        return line | self._output.last_lines(pid, rank, failed=failed)

    def _rank_of(self, pid: int) -> int | None:
        return self._reported.get(pid, (self._labels.get(pid),))[0]

    def _oom(self, pid: int) -> dict[str, Any] | None:
        """What the kernel says of a kill for want of memory; None where it says nothing of one."""
        cgroup = self._cgroups.get(pid)
        until = time.monotonic() + OOM_WAIT_S
        while True:
            own = next((kill for kill in self._log.new_oom_kills() if kill.pid == pid), None)
            count = cgroups.oom_kill_count(cgroup) if cgroup is not None else None
            grown = 0 if count is None or cgroup is None else count - self._kills[cgroup.folder]
            if own or grown > 0 or time.monotonic() > until:
                break
            time.sleep(OOM_WAIT_S / 10)
        if cgroup is not None and count is not None:
            self._kills[cgroup.folder] = count
        if own is None and grown <= 0:
            return None
        return {
            "limit_bytes": None if cgroup is None else _limit(cgroup),
            "cgroup": None if cgroup is None else str(cgroup.path), "kills": max(grown, 0),
            **{name: getattr(own, name) for name in _OF_KILL if own is not None}}  # fmt: skip


def note_job_end(
    run: RunPaths, host: str, *, pid: int, status: int | None, ended_by: int | None
) -> None:
    """How the job's first process on this node ended, as its launcher has it from the kernel."""
    note_line(run.node(host).events, {
        "type": "job_end", "time_ns": time.perf_counter_ns(), "wall_ns": time.time_ns(), "pid": pid,
        "launcher_pid": os.getppid(), "status": status, "signal": ended_by,
    })  # fmt: skip


def note_signal(run: RunPaths, host: str, said: Mapping[str, Any], *, ask_slurm: bool) -> None:
    """A signal that came to the launcher: which, and who sent it."""
    sender = said.get("pid") or 0
    command = " ".join(command_line(sender))[:200] if sender else ""
    job = os.environ.get("SLURM_JOB_ID")
    state = _slurm_state(job) if job and ask_slurm and said.get("arrived") in _ENDING else None
    note_line(run.node(host).events, {
        "type": "signal", "wall_ns": said.get("wall_ns"),
        "signal": said.get("arrived"), "code": said.get("code"), "to_group": said.get("to_group"),
        "from_pid": sender or None, "from_uid": said.get("uid"), "from_command": command or None,
        "slurm_job": job, "slurm_state": state,
        "slurm_end_s": find_number(os.environ, ("SLURM_JOB_END_TIME",)),
    })  # fmt: skip


def _slurm_state(job: str) -> str | None:
    """What Slurm says of a job that it ends: `TIMEOUT`, `REQUEUED`, `PREEMPTED`, ...; or None."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "job", job, "-o"],
            capture_output=True, text=True, timeout=SLURM_WAIT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    ran, limit = (_slurm_seconds(done.stdout, name) for name in ("RunTime", "TimeLimit"))
    if ran is not None and limit is not None and ran >= limit:
        return "TIMEOUT"  # a job that is being ended is `COMPLETING`, whatever the reason
    restarts = re.search(r"\bRestarts=(\d+)", done.stdout)  # counted before the job is ended
    if restarts and int(restarts[1]) > int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        return "REQUEUED"
    match = re.search(r"\bJobState=([A-Z_]+)", done.stdout)
    return match[1] if match else None


def _slurm_seconds(said: str, name: str) -> int | None:
    """`1-02:03:04` of a field in seconds; None where it holds something else."""
    match = re.search(rf"\b{name}=(?:(\d{{1,6}})-)?(\d\d):(\d\d):(\d\d)\b", said)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def note_launcher_gone(run: RunPaths, host: str) -> None:
    """The launcher was killed; the job goes on."""
    times = {"time_ns": time.perf_counter_ns(), "wall_ns": time.time_ns()}
    note_line(run.node(host).events, {"type": "launcher_gone", **times})


def _limit(place: cgroups.Cgroup) -> float | None:
    """The tightest limit of a control group and those above it; None where there is none."""
    limit = cgroups.tightest_limit(cgroups.MEMORY_LIMIT, place)
    with contextlib.closing(limit), contextlib.suppress(OSError, ValueError):
        return limit.read()
    return None


_FIRST_S, _LONGEST_S = 5.0, 60.0
"""The first look at others; each later one waits twice as long as the one before, 60 s at most."""
_LEAST_CORES, _MOST_NAMED = 0.1, 4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class OtherProcesses:
    """Notes names and cores of the busiest processes of the node that are no ranks of the job.

    Those that a rank has started, its loader's workers among them, are `started`; what is neither
    the job's nor started by it is in `processes`.

    A look reads a file for each process of the node: 25 us each, less than 0.01 % of a core.
    """

    def __init__(
        self, run: RunPaths, host: str, job_pid: int, *, root: Path = Path("/"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._events, self._root, self._clock = run.node(host).events, root, clock
        self._own = os.getpid(), job_pid
        self._tree = ProcessTree(root)
        self._wait_s = _FIRST_S / 2
        self._looked_s: float | None = None
        self._ticks: dict[tuple[int, bytes], int] = {}  # CPU time by process and when it started

    def tick(self, ranks: Iterable[LiveRank]) -> None:
        """Looks, where it is time to."""
        now = self._clock()
        if self._looked_s is not None and now - self._looked_s < self._wait_s:
            return
        before, elapsed_s = self._ticks, now - (self._looked_s or now)
        self._tree.refresh()
        main = {rank.pid for rank in ranks}
        started = {pid for rank in main for pid in self._tree.below(rank)} - main
        own = {pid for each in (*self._own, *main) for pid in self._tree.below(each)}  # torchrun's
        self._ticks = {(pid, fields[19]): int(fields[11]) + int(fields[12])
                       for pid in process_ids(self._root / "proc")
                       if (pid not in own or pid in started)
                       and (fields := read_stat(self._root, pid))}  # fmt: skip
        self._looked_s, self._wait_s = now, min(2 * self._wait_s, _LONGEST_S)
        if not before:
            return
        cores = {pid: (ticks - before.get((pid, began), 0)) / _TICKS_PER_S / elapsed_s
                 for (pid, began), ticks in self._ticks.items()}  # fmt: skip
        note_line(self._events, {
            "type": "other_processes", "time_ns": time.monotonic_ns(),
            "elapsed_ns": round(elapsed_s * 1e9),
            "processes": self._name_busiest({p: n for p, n in cores.items() if p not in started}),
            "started": self._name_busiest({p: n for p, n in cores.items() if p in started}),
        })  # fmt: skip

    def _name_busiest(self, cores: Mapping[int, float]) -> list[dict[str, Any]]:
        return [
            {"pid": pid, "name": name.strip(), "cores": round(cores[pid], 3)}
            for pid in sorted(cores, key=lambda pid: -cores[pid])[:_MOST_NAMED]
            if cores[pid] >= _LEAST_CORES
            and (name := read_text(self._root / f"proc/{pid}/comm")) is not None
        ]
