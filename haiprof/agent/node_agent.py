"""The node agent: samples in a thread, relays requests to its ranks, tracks who reported in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import threading
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from haiprof.agent.job_environment import find_pod
from haiprof.agent.samplers.loop import SamplingLoop
from haiprof.base.errors import HaiprofError, RunFormatError
from haiprof.base.messages import print_message
from haiprof.base.options import Options
from haiprof.base.safe_files import make_folder, remove_file
from haiprof.base.units import shorten
from haiprof.linux import procfs
from haiprof.linux.processes import Process, ProcessTree, ranks_below
from haiprof.linux.procfs import process_exists, process_state, still_runs, strings, variables
from haiprof.run_format import control
from haiprof.run_format.boot import BOOT_FOLDER
from haiprof.run_format.layout import RankPaths, RunPaths
from haiprof.run_format.reader import read_records, try_read_json, try_read_lines
from haiprof.run_format.ring import NEVER, RING_BYTES, RING_CAPACITY, read_ring
from haiprof.run_format.schema import PHASES, SCHEMA_VERSION, TAG_BITS, ClockAnchor
from haiprof.run_format.secrets import mask_command
from haiprof.run_format.writer import add_records, append_line, note_line, write_json

if TYPE_CHECKING:
    from haiprof.agent.prometheus_endpoint import Scrape
    from haiprof.agent.reach import Controller, Uplink

_F_GET_SEALS = 1034  # of <linux/fcntl.h>; the module has it from Python 3.13 on
_SEALS = 0x0002 | 0x0004  # against shrinking and growing
_ROOT = Path("/")


class _HeldRing(NamedTuple):
    """A ring that a rank has given us: we hold a descriptor."""

    number: int
    pid: int  # 0 for a process of another PID namespace: its end is seen by that of the job alone
    start_ticks: int | None  # None where it had ended before we looked
    paths: RankPaths


def _is_ring(number: int) -> bool:
    """Whether it is sealed memory of a ring's size, whose owner we are: reading it cannot hang."""
    state = os.fstat(number)
    is_like_one = stat.S_ISREG(state.st_mode) and state.st_size == RING_BYTES
    if is_like_one and state.st_uid == os.geteuid():
        with contextlib.suppress(OSError):  # a file of a disk
            return fcntl.fcntl(number, _F_GET_SEALS) & _SEALS == _SEALS
    return False


def _keep(held: _HeldRing) -> None:
    """Adds to the file what it lacks, and says how the recording ended, if not by itself."""
    try:
        ring = read_ring(os.pread(held.number, RING_BYTES, 0))
    finally:
        os.close(held.number)
    if ring is None or ring.ended:
        return
    kept, reason = 0, None
    try:
        path = held.paths.phases
        spans = ring.lacking(read_records(path, first=-RING_CAPACITY).data)
        lacking = len(spans)
        if spans:
            data = array("q", [word for span in spans for word in span]).tobytes()
            kept = add_records(path, PHASES, data) // PHASES.record_bytes
        if kept < lacking:
            reason = "no space left"
    except (OSError, RunFormatError) as error:
        lacking, reason = len(ring.lacking(b"")), str(error)
    last_ns = ring.records[-1][1] >> TAG_BITS if ring.records else None
    note_line(held.paths.events, {
        "type": "unclean_end", "time_ns": time.perf_counter_ns(), "last_span_ns": last_ns,
        "open_ns": ring.open_ns, "optimizer_steps": ring.step_count,
        "recording": ring.opens_ns < NEVER, "added_span_count": kept,
        "lost_span_count": lacking - kept + ring.overwritten, "reason": reason,
    })  # fmt: skip


TELL_S = 15.0  # interval at which an agent announces its ranks to a controller: it may be a new one
_STEPS_ID = "steps"  # the id of the agent's own question for steps; ids of requests hold a time
_BACKLOG = 1024
_PACKETS_PER_TICK = 64
_ASKED_LIMIT = 1000  # requests whose replies are still accepted; older ones have timed out
_ELSEWHERE_LIMIT = 200_000  # maximum number of ranks of other nodes; each has a file per request
_FROM_BELOW_S = 0.25  # time per tick for replies of other nodes: the launcher has other work
_INT = struct.Struct("i")
_UCRED = struct.Struct("3i")


class LiveRank(NamedTuple):
    """A rank of this node that can be asked."""

    rank: int
    pid: int
    paths: RankPaths
    reported_steps: int | None = None  # optimizer steps, as last answered to `ask_steps`

    @property
    def name(self) -> str:
        """`3`, `3.1` for its second attempt."""
        return self.paths.root.name


@dataclass(slots=True)
class Peer:
    """A rank's connection."""

    connection: socket.socket
    pid: int  # its process id, from the kernel
    member: LiveRank | None = None  # None until it has introduced itself
    given: int = -1  # a descriptor that came with its last message: its ring; -1 where none did


@dataclass
class Relay:
    """The agent's end of the control sockets; all work is done in the launcher's tick."""

    run: RunPaths
    host: str
    peers: list[Peer] = field(default_factory=list)
    controller: Controller | None = None  # sends requests to agents of other run directories
    uplink: Uplink | None = None  # receives requests where the run directory is not shared
    _rings: list[_HeldRing] = field(default_factory=list)
    _announced_s: float = 0.0
    _listener: socket.socket | None = None
    _requests: int = -1
    _seen: set[str] = field(default_factory=set)
    _asked: dict[str, control.Request] = field(default_factory=dict)
    _remote: set[str] = field(default_factory=set)
    _elsewhere: set[str] = field(default_factory=set)

    def start(self) -> None:
        """Listens for the ranks of this node; requests from before its start are not for it."""
        self._requests = control.open_requests(self.run)
        control.pending_requests(self._requests, self._seen)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._at_socket(listener.bind)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            self._close_requests()
            raise
        self._listener = listener

    def _at_socket(self, act: Callable[[str], object]) -> None:
        folder, path = control.control_socket(self.run, self.host)
        try:
            act(path)
        finally:
            os.close(folder)

    def tick(self) -> None:
        """Accepts ranks, relays new requests, and stores replies."""
        self._accept()
        for peer in list(self.peers):
            self._read(peer)
        self._end_rings()
        for request in control.pending_requests(self._requests, self._seen):
            self._pass_on(request)
            if self.controller is not None:
                self.controller.broadcast(request.as_json())
        if self.uplink is not None:
            self._from_above(self.uplink)
        if self.controller is not None:
            self._from_below(self.controller)

    def _pass_on(self, request: control.Request) -> None:
        self._asked[request.id] = request
        if len(self._asked) > _ASKED_LIMIT:
            oldest = next(iter(self._asked))
            del self._asked[oldest]
            self._remote.discard(oldest)
        for peer in self.peers:  # one that is gone is dropped meanwhile, from a new list
            self._ask(peer, request)

    def _from_above(self, uplink: Uplink) -> None:
        """Relays requests from the controller, and announces this node's ranks to it."""
        while uplink.requests:
            with contextlib.suppress(RunFormatError):  # not of ours
                asked = control.read_object(uplink.requests.popleft())
                request = control.parse_request(asked, "controller")
                if request.id not in self._asked and request.expires_wall_ns > time.time_ns():
                    self._remote.add(request.id)
                    self._pass_on(request)
        if time.monotonic() - self._announced_s > TELL_S:
            self._announced_s = time.monotonic()
            for peer in self.peers:
                self._introduce(peer)

    def _introduce(self, peer: Peer) -> None:
        if self.uplink is not None and (own := peer.member) is not None:
            member = {"name": own.name, "rank": own.rank, "host": self.host, "pid": own.pid}
            self.uplink.send({"member": member})

    def _from_below(self, controller: Controller) -> None:
        """Stores messages of other nodes' agents; within a tick only for a limited time."""
        until_s = time.monotonic() + _FROM_BELOW_S
        while time.monotonic() < until_s:
            if (data := controller.take()) is None:
                return
            with contextlib.suppress(OSError):  # full disk: the rank seems silent
                self._note_agent(control.read_object(data) or {})

    def _note_agent(self, message: dict[str, Any]) -> None:
        """Stores a member or a reply that conforms to the schema, and nothing else."""
        member = control.conform(message.get("member"), control.MEMBER)
        request_id, reply = message.get("id"), message.get("reply")
        if member is not None and self._has_room(member["name"]):
            control.post_member(self.run, member["name"], member)
        elif control.is_id(request_id) and request_id in self._asked and isinstance(reply, dict):
            signed = control.conform(reply, control.REMOTE_REPLY)
            if signed is not None and self._has_room(signed["name"]):
                control.post_reply(self.run, str(request_id), signed["name"], reply)

    def _has_room(self, name: str) -> bool:
        """Whether that rank of another node is known, or there is room for it."""
        if len(self._elsewhere) < _ELSEWHERE_LIMIT:
            self._elsewhere.add(name)
        return name in self._elsewhere

    def live_ranks(self) -> list[LiveRank]:
        """Each rank that is connected."""
        return [peer.member for peer in self.peers if peer.member is not None]

    def ask_steps(self, pids: Collection[int]) -> None:
        """Asks some processes how many optimizer steps there were; `live_ranks` has the answers."""
        question = control.encode_message({"id": _STEPS_ID, "kind": "status", "arguments": {}})
        for peer in list(self.peers):
            if peer.pid in pids:
                self._send(peer, question)

    def stop(self) -> None:
        """Closes everything and takes the socket out of the run directory."""
        for line in (self.controller, self.uplink):
            if line is not None:
                line.stop()
        if self._listener is None:
            return
        with contextlib.suppress(OSError):
            self._accept()  # a job that ended soon after it connected has left its ring there
            for peer in list(self.peers):
                self._read(peer)  # messages before the end of the connection
        listener, self._listener = self._listener, None
        self._end_rings(job_is_over=True)
        for peer in self.peers:
            peer.connection.close()
        self.peers.clear()
        listener.close()
        self._close_requests()
        with contextlib.suppress(OSError):
            self._at_socket(lambda path: remove_file(Path(path), below=Path(path).parent))

    def _end_rings(self, *, job_is_over: bool = False) -> None:
        """Adds what the files of processes that have ended lack; at the end lets go of the rest."""
        for held in list(self._rings):
            is_over = not still_runs(_ROOT, held.pid, held.start_ticks) if held.pid else job_is_over
            if is_over or job_is_over:
                self._rings.remove(held)
            if is_over:
                _keep(held)
            elif job_is_over:
                os.close(held.number)

    def _close_requests(self) -> None:
        number, self._requests = self._requests, -1
        if number >= 0:
            os.close(number)

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            pid, uid, _ = _UCRED.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            )
            if uid != os.getuid():
                connection.close()
                continue
            connection.setblocking(False)
            self.peers.append(Peer(connection, pid))

    def _ask(self, peer: Peer, request: control.Request) -> None:
        own = peer.member
        if own is None or (request.ranks is not None and own.rank not in request.ranks):
            return
        if request.kind == "stacks":  # a stopped process cannot answer
            self._keep(own, request.id, {"state": "asked", "process": process_state(peer.pid)})
        if not self._send(peer, control.encode_message(request.as_json())):
            self._keep(own, request.id, {"state": "refused", "reason": "its requests pile up"})

    def _send(self, peer: Peer, packet: bytes) -> bool:
        """Sends without waiting; False where the rank has not read the last packets yet."""
        try:
            peer.connection.send(packet)
        except BlockingIOError:
            return False
        except OSError:
            self._drop(peer)
        return True

    def _read(self, peer: Peer) -> None:
        for _ in range(_PACKETS_PER_TICK):
            try:
                packet, peer.given = _receive(peer.connection)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if packet:
                self._take(peer, control.read_object(packet) or {})
            if peer.given >= 0:
                os.close(peer.given)
                peer.given = -1
            if not packet:
                self._drop(peer)
                return

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        hello, request_id = control.conform(message.get("hello"), control.HELLO), message.get("id")
        if peer.member is None:
            if hello is None:
                return
            paths = self.run.rank(hello["rank"], hello["attempt"])
            peer.member = LiveRank(hello["rank"], peer.pid, paths)
            if peer.given >= 0 and _is_ring(peer.given):
                ticks = procfs.read_start_ticks(_ROOT, peer.pid) if peer.pid else None
                self._rings.append(_HeldRing(peer.given, peer.pid, ticks, paths))
                peer.given = -1
            # Drops an older connection of the same process, whose descriptor the job has closed.
            for other in [p for p in self.peers if p is not peer and p.member is not None]:
                if other.member is not None and other.member[:3] == peer.member[:3]:
                    self._drop(other)
            self._introduce(peer)
        elif request_id == _STEPS_ID:
            steps = message.get("step")
            peer.member = peer.member._replace(reported_steps=steps if type(steps) is int else None)
        elif control.is_id(request_id) and request_id in self._asked:
            content = {name: value for name, value in message.items() if name != "id"}
            if control.conform(content, control.REPLY) is not None:
                self._keep(peer.member, str(request_id), content)

    def _keep(self, own: LiveRank, request_id: str, content: dict[str, Any]) -> None:
        said = {"rank": own.rank, "host": self.host, "pid": own.pid, **content}
        if request_id in self._remote and self.uplink is not None:
            above = {**said, "name": own.name, "run": str(self.run.root)}
            self.uplink.send({"id": request_id, "reply": above})
            return
        with contextlib.suppress(OSError):  # full disk: the rank seems silent
            control.post_reply(self.run, request_id, own.name, said)

    def _drop(self, peer: Peer) -> None:
        peer.connection.close()
        self.peers = [other for other in self.peers if other is not peer]


def _receive(connection: socket.socket) -> tuple[bytes, int]:
    """One message, and the descriptor that came with it, or -1."""
    # The kernel closes what there is no room for. Python's `recv_fds` passes no flags on (3.11).
    packet, extras, _, _ = connection.recvmsg(
        control.MESSAGE_LIMIT_BYTES, socket.CMSG_LEN(_INT.size), socket.MSG_CMSG_CLOEXEC
    )
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS)
    numbers = [_INT.unpack(data)[0] for *kind, data in extras if tuple(kind) == rights]
    return packet, numbers[0] if numbers else -1


_RANK_VARIABLES = ("RANK", "LOCAL_RANK")
_COMMAND_CHARS = 120
_NOTHING, _LABELLED, _REPORTED = range(3)  # what a part of the process tree holds

_TAKES_VALUE = "WX"  # python -W ARG, -X OPT
_ENDS_OPTIONS = "cm"  # python -c CODE, -m MODULE
_BLOCKING_FLAGS = {
    "I": ("python -I ignores PYTHONPATH, which carries haiprof", "start it without -I"),
    "E": ("python -E ignores PYTHONPATH, which carries haiprof", "start it without -E"),
    "S": ("python -S never imports sitecustomize, haiprof's way in", "start it without -S"),
}
_KEEP_PYTHONPATH = "add to the variable instead of replacing it: PYTHONPATH=yours:$PYTHONPATH"
_PUT_FIRST = "put yours behind haiprof's, which runs it too: PYTHONPATH=$PYTHONPATH:yours"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreported:
    """One process that haiprof could not enter."""

    pid: int
    command: str  # its command line, shortened
    reason: str  # why haiprof could not enter
    remedy: str  # what to change


def find_unreported(
    root_pid: int, reported_pids: Collection[int], boot_dir: Path, *, root: Path = Path("/")
) -> list[Unreported]:
    """Walks the job's process tree once, as it is now."""
    # Listed are Python processes that cannot load the hook and that have libtorch mapped or are
    # labelled as a rank in their environment. Not listed are: processes that could load the hook
    # (they have not trained yet), what runs below one that reported in (DataLoader workers) or
    # below a listed one (its forks), and launchers of ranks that reported in or are labelled.
    tree = ProcessTree(root).refresh()

    def visit(pid: int) -> tuple[int, list[Unreported]]:
        """What is at or below a process: nothing, a label, a report; and the findings there."""
        if pid in reported_pids:
            return _REPORTED, []
        visited = [visit(child) for child in sorted(tree.children.get(pid, ()))]
        met = max((held for held, _ in visited), default=_NOTHING)
        found = [each for _, below in visited for each in below]
        folder = root / "proc" / str(pid)
        try:
            if not os.path.basename(os.readlink(folder / "exe")).startswith("python"):
                return met, found
            argv, environ = strings(folder / "cmdline"), variables(strings(folder / "environ"))
        except OSError:
            return met, found  # it has ended, or belongs to another user
        label = _LABELLED if any(name in environ for name in _RANK_VARIABLES) else _NOTHING
        blocked = _why_blocked(argv, environ, root, boot_dir) if met <= label else None
        if blocked and (label or procfs.has_mapped(pid, b"libtorch", proc=root / "proc")):
            command = shorten(" ".join(mask_command(argv)), _COMMAND_CHARS)
            found = [Unreported(pid=pid, command=command, reason=blocked[0], remedy=blocked[1])]
        return max(met, label), found

    return visit(root_pid)[1]


def _why_blocked(
    argv: Sequence[str], environ: Mapping[str, str], root: Path, boot_dir: Path
) -> tuple[str, str] | None:
    """Why a process cannot load the hook, and what to do; None when it can."""
    for flag in interpreter_flags(argv):
        if flag in _BLOCKING_FLAGS:
            return _BLOCKING_FLAGS[flag]
    if "PYTHONPATH" not in environ:
        return "its environment has no PYTHONPATH: it was dropped on the way", _KEEP_PYTHONPATH
    for entry in environ["PYTHONPATH"].split(os.pathsep):
        if entry and os.path.realpath(entry) == os.path.realpath(boot_dir):
            return None
        if entry and (root / entry.lstrip("/") / "sitecustomize.py").exists():
            return f"{entry}/sitecustomize.py comes before haiprof's on PYTHONPATH", _PUT_FIRST
    return "its PYTHONPATH was overwritten: haiprof's entry is gone", _KEEP_PYTHONPATH


def interpreter_flags(argv: Sequence[str]) -> str:
    """The single-letter flags that the interpreter itself took, in order."""
    # They end at the script, `-`, `--`, `-c` or `-m`; `-uI` is two of them, `-Wignore` is one.
    flags = ""
    words = iter(argv[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            next(words, None)
            continue
        if not word.startswith("-") or word.startswith("--") or word == "-":
            return flags
        for at, letter in enumerate(word[1:], start=1):
            flags += letter
            if letter in _ENDS_OPTIONS:
                return flags
            if letter in _TAKES_VALUE:
                if at == len(word) - 1:
                    next(words, None)
                break
    return flags


FIRST_SCAN_S = 0.5
SCAN_GROWTH = 1.6
MAX_SCAN_S = 60.0
STOP_WAIT_S = 5.0
SETTLE_S = 0.05
REACH_AGAIN_S = 2.0  # the controller, which may write the token, starts at about the same time
TOKEN_NAME = "reach.token"


@dataclass
class Agent:
    """The agent beside the job on this node, in the launcher's companion process."""

    run: RunPaths
    options: Options
    job_pid: int | None = None
    host: str = field(default_factory=socket.gethostname)
    unreported: dict[int, Unreported] = field(default_factory=dict)
    elected: bool = False  # whether this launcher is the one that samples this node
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _scrape: Scrape | None = None
    _reach_at: float | None = None
    _scan_at: float = 0.0
    _scan_gap_s: float = FIRST_SCAN_S
    _started_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._relay = Relay(self.run, self.host)
        self.live_ranks, self.ask_steps = self._relay.live_ranks, self._relay.ask_steps

    def start(self) -> None:
        """Starts sampling, unless another launcher on this node already does."""
        self.elected = self._elect()
        if not self.elected:
            return
        try:
            self._relay.start()
        except OSError as error:
            line = {"type": "control", "state": "unavailable", "reason": str(error)}
            append_line(self.run.node(self.host).events, line)
        else:
            if self.options.reach:
                self._reach()
        loop = SamplingLoop(self.run, self.host, self.options)

        def sample() -> None:
            if not self._stop.wait(SETTLE_S):  # a command that ends at once is over before
                loop.run(self._stop)

        self._thread = threading.Thread(target=sample, name="haiprof-sampler", daemon=True)
        self._thread.start()
        if self.options.prometheus_port:
            from haiprof.agent.prometheus_endpoint import Scrape

            self._scrape = Scrape(self.run, self.host, self.options, lambda: loop.streams)
            self._scrape.start()

    def serve(self) -> None:
        """Relays requests to the ranks and their replies back while the job runs."""
        if self._reach_at is not None and time.monotonic() >= self._reach_at:
            self._reach()
        self._relay.tick()

    def starting(self) -> list[Process]:
        """Processes that have loaded torch and haiprof's hook, and have not begun to train."""
        if "phases" not in self.options.recorder or self.job_pid is None:
            return []  # nobody reports in
        known = self._reported_pids() | self.unreported.keys()
        return [p for p in ranks_below(self.job_pid) if p.pid not in known]

    def tick(self) -> None:
        """Looks for ranks that never report in, at growing intervals."""
        now = time.monotonic()
        if now < self._scan_at or self.job_pid is None:
            return
        self._scan_at = now + self._scan_gap_s
        self._scan_gap_s = min(self._scan_gap_s * SCAN_GROWTH, MAX_SCAN_S)
        found = find_unreported(self.job_pid, self._reported_pids(), BOOT_FOLDER)
        ended = {pid: p for pid, p in self.unreported.items() if not process_exists(pid)}
        self.unreported = {**ended, **{process.pid: process for process in found}}

    def _reach(self) -> None:
        """Joins the agents of nodes that do not share this run directory, now or later."""
        from haiprof.agent.reach import Controller, join

        options = self.options
        token_file = options.reach_token or options.log_dir / TOKEN_NAME
        again, self._reach_at = self._reach_at is not None, None
        try:
            end = join(options.reach, token_file)
        except (HaiprofError, OSError) as error:
            self._reach_at = time.monotonic() + REACH_AGAIN_S
            hint = f" ({error.hint})" if isinstance(error, HaiprofError) and error.hint else ""
            said = f"{error}{hint}; trying again: until then requests do not reach this node"
            if not again:
                print_message(said)
            return
        if isinstance(end, Controller):
            self._relay.controller = end
        else:
            self._relay.uplink = end

    def recording_is_over(self) -> bool:
        """Whether the time is up in some rank, and every other one has ended or is gone."""
        options = self.options
        if time.monotonic() - self._started_s < options.time_s + options.warmup_s:
            return False  # it cannot be: nothing is read while a long recording goes on
        endings = [_ending(paths.events) for _, _, paths in self.run.rank_folders()]
        return "time" in endings and not any(
            ending is None and report.get("host") == self.host and process_exists(report.get("pid"))
            for report, ending in zip(self.reports(), endings, strict=False)
        )

    def close(self) -> None:
        """Ends sampling, and listening to the ranks."""
        self.stop()
        self._relay.stop()

    def stop(self) -> None:
        """Ends sampling."""
        self._stop.set()
        if self._scrape is not None:
            self._scrape.stop()
        if self._thread is not None:
            self._thread.join(STOP_WAIT_S)
            self._thread = None

    def note_unreported(self) -> list[dict[str, object]]:
        """Writes down, once, who should have reported in and did not."""
        reported = [report.get("pid") for report in self.reports()]
        missing = [asdict(each) for pid, each in self.unreported.items() if pid not in reported]
        self.unreported.clear()
        for process in missing:
            append_line(self.run.node(self.host).events, {"type": "unreported", **process})
        return missing

    def _elect(self) -> bool:
        node = self.run.node(self.host)
        try:
            make_folder(node.root, below=self.run.root, new=True, trusted=True)
        except FileExistsError:
            return False
        clock = ClockAnchor.now()
        content = {
            "version": SCHEMA_VERSION, "host": self.host, "pid": os.getpid(),
            "job_pid": self.job_pid,
            "clock": {"wall_ns": clock.wall_ns, "mono_ns": clock.mono_ns},
            "pod": find_pod(os.environ), "slurm_node": os.environ.get("SLURMD_NODENAME"),
        }  # fmt: skip
        write_json(node.agent, content, below=self.run.root)
        return True

    def reports(self) -> list[dict[str, Any]]:
        """rank.json of every rank that reported in, on any node; empty where it is not whole."""
        return [try_read_json(paths.report) for _, _, paths in self.run.rank_folders()]

    def reported_ranks(self) -> list[dict[str, Any]]:
        """Which rank reported in from where, for the manifest."""
        keys = ("rank", "attempt", "host", "pid")
        return [{key: report.get(key) for key in keys} for report in self.reports() if report]

    def _reported_pids(self) -> set[int]:
        mine = [report for report in self.reports() if report.get("host") == self.host]
        return {report["pid"] for report in mine if isinstance(report.get("pid"), int)}


def _ending(events: Path) -> str | None:
    """How a rank's recording ended: `time`, `exit`, `hook_error`; None while it goes on."""
    for line in reversed(try_read_lines(events)):
        if line.get("type") == "hook_error":
            return "hook_error"
        if line.get("type") == "record_end":
            return str(line.get("reason"))
    return None
