"""Kineto's daemon protocol, its client, and a daemon in place of dynolog's: of a job, or alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, UsageError, convert_os_errors
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_KINETO_DAEMON, ENV_KINETO_FOLDER
from haiprof.base.safe_files import MadeFolder, make_private, remove_file
from haiprof.run_format.control import Schema, conform, is_count, read_object
from haiprof.run_format.layout import RunPaths

CONTEXT = b"ctxt"  # a process states which GPU it uses; the answer is how many do
REQUEST = b"req"  # a process asks for a configuration; an empty answer requests nothing
OURS = b"haiprof"  # a question to the agent itself; JSON both ways

DATAGRAM_LIMIT_BYTES = 1 << 16
_HEAD = struct.Struct("=Q32s")
CONTEXT_STATED = struct.Struct("=iiq")
_ASK = struct.Struct("=iiq")
_PID = struct.Struct("=i")
COUNT = struct.Struct("=i")
_PID_LIMIT = 64
_ACTIVITIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A process's request for a configuration."""

    free: bool  # whether it can trace now: no profiler runs or is scheduled in it
    job: int  # SLURM_JOB_ID, else 0
    pids: tuple[int, ...]  # itself first, then its parents, as its own namespace numbers them


def encode(kind: bytes, payload: bytes) -> bytes:
    """One datagram."""
    return _HEAD.pack(len(payload), kind) + payload


def decode(datagram: bytes) -> tuple[bytes, bytes]:
    """Kind and payload of a datagram; both empty if it is malformed."""
    head, payload = datagram[: _HEAD.size], datagram[_HEAD.size :]
    size, kind = _HEAD.unpack(head) if len(head) == _HEAD.size else (-1, b"")
    return (kind.rstrip(b"\0"), payload) if size == len(payload) else (b"", b"")


def decode_ask(payload: bytes) -> Ask | None:
    """Decodes a process's request; None if it is malformed."""
    if len(payload) < _ASK.size:
        return None
    kinds, count, job = _ASK.unpack_from(payload)
    if not 1 <= count <= _PID_LIMIT or len(payload) != _ASK.size + count * _PID.size:
        return None
    pids = tuple(pid for (pid,) in _PID.iter_unpack(payload[_ASK.size :]))
    return Ask(free=bool(kinds & _ACTIVITIES), job=job, pids=pids)


def encode_ours(content: Mapping[str, Any]) -> bytes:
    """A question to the agent, or its answer."""
    return encode(OURS, json.dumps(content).encode())


NAME = "dynolog"  # what Kineto calls the daemon
ABSTRACT = f"\0{NAME}\0"
"""Its address where no folder is named; Kineto counts the null byte behind a name as part of it."""


@dataclass(slots=True)
class PrivateFolder:
    """A folder for the sockets of one job, which its owner alone may enter."""

    made: MadeFolder
    _fd: int = -1

    @classmethod
    def create(cls, wanted: Path) -> PrivateFolder:
        """Makes the wanted folder, or a temporary one where its file system supports no sockets."""
        try:
            make_private(wanted.parent, below=wanted.parent.parent)
            made = cls(MadeFolder.make(wanted, below=wanted.parent))
            made._try()
        except OSError:
            made = cls(MadeFolder.temporary("haiprof-kineto-"))
            made._try()
        return made

    @property
    def path(self) -> Path:
        """The folder."""
        return self.made.path

    def _try(self) -> None:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            probe = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            with probe:
                probe.bind(f"{self.as_seen}/probe")
            remove_file(self.path / "probe", below=self.path)
        except OSError:
            self.remove()
            raise

    @property
    def as_seen(self) -> str:
        """Its path for every process of the job."""
        # The job gets a path through the launcher's open descriptor: that is short enough for any
        # socket, and it vanishes with the launcher, however that ended. A socket without a listener
        # would delay `import torch` by ten seconds.
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def remove(self) -> None:
        """Removes it, with the sockets of killed processes."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.made.remove()


def address_for(environ: Mapping[str, str]) -> str | None:
    """The address that a process with this environment asks; None without KINETO_USE_DAEMON."""
    if ENV_KINETO_DAEMON not in environ:  # its being set counts, not its value
        return None
    folder = environ.get(ENV_KINETO_FOLDER)
    return f"{folder}/{NAME}" if folder else ABSTRACT


def is_alive(address: str) -> bool:
    """Whether a process listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return False
    return True


_UNREADABLE = "\n\r#"  # Kineto's parser: lines, and comments
SWITCHES = {
    "stacks": "PROFILE_WITH_STACK", "shapes": "PROFILE_REPORT_INPUT_SHAPES",
    "memory": "PROFILE_PROFILE_MEMORY", "flops": "PROFILE_WITH_FLOPS",
    "modules": "PROFILE_WITH_MODULES", "sync": "ACTIVITIES_DISPLAY_CUDA_SYNC_WAIT_EVENTS",
}  # fmt: skip
"""Options of a trace by name, with Kineto's key. Source: libkineto Config.cpp; dynolog's client."""
WARMUP_S = 1
WARMUP_STEPS = 3  # Kineto's own thread needs some steps to start: else the first ones are missing


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One window for some processes."""

    steps: int = 5  # optimizer steps
    time_s: float = 0.0  # seconds in place of steps
    options: Mapping[str, Any] = field(default_factory=dict)
    """Switches: `stacks`, `shapes`, `memory`, `flops`, `modules`, `sync`."""
    timeout_s: float | None = None
    endpoint: tuple[str, int] | None = None  # of a dynolog daemon; None asks haiprof's own agent
    start_wall_ns: int = 0  # Unix time from which on it begins, the same on all nodes; 0 is at once
    roundup: int = 0
    """Steps begin at a multiple of this iteration, so that ranks begin at the same one; 0 lets
    haiprof choose."""

    @property
    def backend(self) -> str:
        """Who passes it on to the processes."""
        return "dynolog" if self.endpoint else "kineto"

    def text(self, log: str) -> str:
        """As Kineto reads it."""
        if any(character in log for character in _UNREADABLE):
            raise UsageError(f"{log!r}: Kineto cannot take a path with a line break or a '#' in it")
        lines = [f"ACTIVITIES_LOG_FILE={log}"]
        if self.time_s:
            lines += [
                f"PROFILE_START_TIME={self.start_wall_ns // 1_000_000}",
                f"ACTIVITIES_WARMUP_PERIOD_SECS={WARMUP_S}",
                f"ACTIVITIES_DURATION_MSECS={max(round(self.time_s * 1000), 1)}",
            ]
        else:
            lines += [
                "PROFILE_START_ITERATION=0",
                f"PROFILE_START_ITERATION_ROUNDUP={self.roundup or 1}",
                f"ACTIVITIES_WARMUP_ITERATIONS={WARMUP_STEPS}",
                f"ACTIVITIES_ITERATIONS={self.steps}",
            ]
        lines += [f"{key}=true" for name, key in SWITCHES.items() if self.options.get(name)]
        return "\n".join(lines) + "\n"


_TIMEOUT_S = 2.0
_ANSWER_LIMIT_BYTES = 1 << 18


class NoAgentError(HaiprofError):
    """No Kineto agent answers, or it is not haiprof's."""


def ask_agent(address: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Sends a question and waits for the answer."""
    shown = shown_address(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ours:
        ours.bind("")  # the kernel finds an abstract address for the answer
        ours.settimeout(_TIMEOUT_S)
        try:
            ours.connect(address)
            ours.send(encode_ours(question))
            kind, payload = decode(ours.recv(_ANSWER_LIMIT_BYTES))
        except TimeoutError:
            raise NoAgentError(
                f"{shown}: what listens there is not haiprof's agent",
                hint="a dynolog daemon is driven with --backend dynolog",
            ) from None
        except OSError as error:
            raise NoAgentError(
                f"{shown}: no agent listens there ({error.strerror or error})",
                hint="haiprof trace kineto-agent listens for jobs that run without haiprof",
            ) from None
    answer = read_object(payload) if kind == OURS else None
    if answer is None:
        raise NoAgentError(f"{shown}: its answer cannot be read")
    if "error" in answer:
        raise NoAgentError(f"{shown}: {answer['error']}")
    return answer


def shown_address(address: str) -> str:
    """An address for people: `@dynolog` for an abstract one."""
    return f"@{address.strip(chr(0))}" if address.startswith("\0") else address


SILENT_NS = 60_000_000_000  # a process asks every 5 s; then it is gone (dynolog's own limit)
CLIENT_LIMIT = 512
REQUEST_LIMIT = 64
_ID_LIMIT = 64
_TEXT_LIMIT = 8192


def _is_text(value: object) -> bool:
    """Whether it can be sent: not with undecodable bytes of a path (surrogates in Python)."""
    with contextlib.suppress(UnicodeEncodeError):
        return isinstance(value, str) and 0 < len(value) <= _TEXT_LIMIT and bool(os.fsencode(value))
    return False


_TRACE: Schema = {
    "text": _is_text,
    "pids": lambda pids: isinstance(pids, list) and 0 < len(pids) <= CLIENT_LIMIT
    and all(type(pid) is int for pid in pids),
    "expires_wall_ns": is_count,
}  # fmt: skip
"""The question for a trace."""


@dataclass(slots=True)
class Pending:
    """A configuration for some processes."""

    text: str
    expires_wall_ns: int
    states: dict[int, str]
    """By process: `waiting`, `busy` (its own profiler runs), `delivered`, `over` (it has asked
    again since: its trace is written, or it dropped the request)."""
    delivered_wall_ns: dict[int, int] = field(default_factory=dict)


@dataclass
class PendingRequests:
    """Clients and requests, by process id and by request id."""

    mono_ns: Callable[[], int] = time.monotonic_ns
    wall_ns: Callable[[], int] = time.time_ns
    clients: dict[int, tuple[Ask, int]] = field(default_factory=dict)
    """What each process said last, by its process id in this namespace, and when."""
    requests: dict[str, Pending] = field(default_factory=dict)

    def note_client(self, pid: int, ask: Ask) -> tuple[str, str]:
        """Notes that a process asks: its answer, and the request, to be noted once it is sent."""
        self._forget()
        if pid in self.clients or len(self.clients) < CLIENT_LIMIT:
            self.clients[pid] = (ask, self.mono_ns())
        for name, pending in self.requests.items():
            if pending.states.get(pid) == "delivered" and ask.free:
                pending.states[pid] = "over"
            if pending.states.get(pid) in ("waiting", "busy"):
                if not ask.free:  # it would drop a configuration now
                    pending.states[pid] = "busy"
                    return "", ""
                return pending.text, name
        return "", ""

    def note_delivery(self, pid: int, name: str) -> None:
        """Notes that a process has received its configuration."""
        pending = self.requests[name]
        pending.states[pid] = "delivered"
        pending.delivered_wall_ns[pid] = self.wall_ns()

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answers a question to the agent itself."""
        self._forget()
        what = question.get("do")
        if what == "clients":
            return {"clients": [
                {"pid": pid, "pids": list(ask.pids), "job": ask.job, "free": ask.free,
                 "silent_ns": self.mono_ns() - seen_ns}
                for pid, (ask, seen_ns) in self.clients.items()
            ]}  # fmt: skip
        name = question.get("id")
        if not isinstance(name, str) or not 0 < len(name) <= _ID_LIMIT:
            return {"error": "no such question"}
        if what == "trace":
            return self._take(name, question)
        if what == "cancel":
            return {"cancelled": self.requests.pop(name, None) is not None}
        pending = self.requests.get(name)
        if what != "state" or pending is None:
            return {"error": "no such request"}
        return {
            "states": {str(pid): state for pid, state in pending.states.items()},
            "delivered_wall_ns": {str(p): ns for p, ns in pending.delivered_wall_ns.items()},
        }

    def _take(self, name: str, question: Mapping[str, Any]) -> dict[str, Any]:
        asked = conform(question, _TRACE)
        if asked is None or name in self.requests:
            return {"error": "not a request"}
        if len(self.requests) >= REQUEST_LIMIT:
            return {"error": "too many requests wait already"}
        states = dict.fromkeys(asked["pids"], "waiting")
        self.requests[name] = Pending(asked["text"], asked["expires_wall_ns"], states)
        return {"taken": sorted(states)}

    def _forget(self) -> None:
        """Removes silent processes and expired requests."""
        oldest, now = self.mono_ns() - SILENT_NS, self.wall_ns()
        self.clients = {pid: known for pid, known in self.clients.items() if known[1] >= oldest}
        self.requests = {n: r for n, r in self.requests.items() if r.expires_wall_ns > now}


_UCRED = struct.Struct("3i")
_ANCILLARY_BYTES = socket.CMSG_SPACE(_UCRED.size) + socket.CMSG_SPACE(256)
_STOP_S = 2.0

Address = str | bytes


class KinetoAgent:
    """Answers processes that run with KINETO_USE_DAEMON."""

    def __init__(
        self, address: str, failed: Callable[[str], None] = lambda _: None,
        folder: PrivateFolder | None = None,
    ) -> None:  # fmt: skip
        self.address = address
        self.folder = folder  # of a job's own agent; it goes with it
        self.pending = PendingRequests()
        self.ignored_count = 0  # datagrams that were malformed, or another user's
        self._failed = failed
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()

    @property
    def environment(self) -> dict[str, str]:
        """What the job of a job's own agent needs in its environment."""
        seen = "" if self.folder is None else self.folder.as_seen
        return {ENV_KINETO_DAEMON: "1", ENV_KINETO_FOLDER: seen}

    def bind(self) -> None:
        """Takes the address; messages wait until `start`."""
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            bound.bind(self.address)
        except OSError:
            bound.close()
            raise
        self._socket = bound

    def start(self) -> None:
        """Begins to answer."""
        self._thread = threading.Thread(target=self._run, name="haiprof-kineto", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread, and removes the socket and its folder."""
        self._ending.set()
        if (bound := self._socket) is not None:
            with contextlib.suppress(OSError):
                bound.shutdown(socket.SHUT_RDWR)  # wakes the thread
            if self._thread is None:
                self._close()
            else:
                self._thread.join(_STOP_S)
        if self.folder is not None:
            self.folder.remove()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                assert self._socket is not None, "bind() comes first"
                datagram, ancillary, flags, sender = self._socket.recvmsg(
                    DATAGRAM_LIMIT_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
                )
                pid, answered = _sender_pid(ancillary), False
                if pid is not None and sender and not flags & socket.MSG_TRUNC:
                    answered = self._answer(pid, datagram, sender)
                self.ignored_count += not answered
        except OSError as error:
            self._failed(str(error.strerror or error))
        finally:
            self._close()

    def _close(self) -> None:
        """Closes the socket, also after an error: a socket without a reader is worse than none."""
        bound, self._socket = self._socket, None
        if bound is not None:
            bound.close()
            remove_socket(self.address)

    def _answer(self, pid: int, datagram: bytes, sender: Address) -> bool:
        """Answers one message; False for a malformed one."""
        # A process waits 0.1 s for an answer, so this thread does nothing else. libkineto
        # terminates its process on an answer from a path that does not begin with its configured
        # folder: such a process gets no answer.
        kind, payload = decode(datagram)
        if kind == OURS:
            if (question := read_object(payload)) is None:
                return False
            self._send(encode_ours(self.pending.answer(question)), sender)
            return True
        if not self._is_below_us(sender):
            return False
        ask = decode_ask(payload) if kind == REQUEST else None
        if ask is not None:
            text, request = self.pending.note_client(pid, ask)
            if self._send(encode(REQUEST, os.fsencode(text)), sender) and request:
                self.pending.note_delivery(pid, request)
            return True
        if kind == CONTEXT and len(payload) == CONTEXT_STATED.size:
            self._send(encode(CONTEXT, COUNT.pack(max(len(self.pending.clients), 1))), sender)
            return True
        return False

    def _send(self, answer: bytes, receiver: Address) -> bool:
        """Sends an answer without waiting; whether the receiver took it."""
        assert self._socket is not None, "bind() comes first"
        try:
            self._socket.sendto(answer, socket.MSG_DONTWAIT, receiver)
        except OSError:
            return False
        return True

    def _is_below_us(self, sender: Address) -> bool:
        """Whether a process uses the same path for the folder as this agent."""
        name = os.fsdecode(sender)
        if self.address.startswith("\0"):
            return name.startswith("\0")
        return name.startswith(os.path.dirname(self.address) + "/")


def _sender_pid(ancillary: list[tuple[int, int, bytes]]) -> int | None:
    """The sender's process id from the kernel; None for another user, or if not known."""
    # Descriptors that were sent along are closed.
    sender: int | None = None
    for level, kind, data in ancillary:
        if level != socket.SOL_SOCKET:
            continue
        if kind == socket.SCM_RIGHTS:
            for (fd,) in struct.iter_unpack("=i", data[: len(data) // 4 * 4]):
                os.close(fd)
        elif kind == socket.SCM_CREDENTIALS and len(data) == _UCRED.size:
            pid, uid, _ = _UCRED.unpack(data)
            sender = pid if uid == os.getuid() and pid > 0 else None
    return sender


def remove_socket(address: str) -> None:
    """Removes a socket from its folder; an abstract one vanishes by itself."""
    if address.startswith("\0"):
        return
    with contextlib.suppress(OSError):
        if stat.S_ISSOCK(os.lstat(address).st_mode):
            remove_file(Path(address), below=Path(address).parent)


_PATH_LIMIT_BYTES = 107 - len("dynoconfigclient") - 36 + len("dynolog")
"""Of the daemon's socket: a Unix address has 108 bytes, and the processes' own names are longer."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def own_address(environ: Mapping[str, str], folder: Path | None) -> str:
    """Where to listen: the folder, else KINETO_IPC_SOCKET_DIR, else Kineto's abstract address."""
    own = {ENV_KINETO_FOLDER: str(folder.absolute())} if folder else {}
    address = address_for({**environ, **own, ENV_KINETO_DAEMON: "1"}) or ABSTRACT
    if address.startswith("\0"):
        return address
    place = Path(os.path.dirname(address))
    if not place.is_absolute() or not place.is_dir():
        raise UsageError(f"{place}: no such folder", hint=f"mkdir -m 700 {place}")
    if place.stat().st_uid != os.getuid() or place.stat().st_mode & 0o077:
        raise UsageError(
            f"{place}: other users may enter it: they could pose as the agent, or end your jobs",
            hint=f"chmod 700 {place}",
        )
    if len(os.fsencode(address)) > _PATH_LIMIT_BYTES:
        raise UsageError(f"{place}: too long for a socket's address", hint="a shorter path in /tmp")
    return address


def listen(address: str, ready: Callable[[str], None]) -> int:
    """Answers until it is asked to end."""
    if is_alive(address):
        raise UsageError(
            f"{shown_address(address)}: another process listens there already",
            hint="a dynolog daemon is driven with haiprof trace now PID --backend dynolog",
        )
    remove_socket(address)  # of a killed agent: nobody listens
    agent = KinetoAgent(address, failed=lambda _: os.kill(os.getpid(), signal.SIGTERM))
    ending = [number for number in _ENDING if signal.getsignal(number) != signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, ending)
    with convert_os_errors(UsageError, shown_address(address)):
        agent.bind()
    agent.start()
    ready(shown_address(address))
    try:
        signal.sigwait(ending)
    finally:
        agent.stop()
        if not address.startswith("\0"):  # sockets that ended processes left in the folder
            for left in Path(address).parent.glob("dynoconfigclient*"):
                if not is_alive(str(left)):
                    remove_socket(str(left))
    return agent.ignored_count


def prepare_kineto(run: RunPaths, environ: Mapping[str, str], *, asked: bool) -> KinetoAgent | None:
    """Binds the socket if the job is to use Kineto's protocol; None if it uses another daemon."""
    if not asked and ENV_KINETO_DAEMON not in environ:
        return None
    if not asked and (environ.get(ENV_KINETO_FOLDER) or is_alive(ABSTRACT)):
        return None  # a daemon of the site's own: the job is left to it
    name = f"kineto-{socket.gethostname()[:60]}-{os.getpid()}"
    folder = PrivateFolder.create(run.control / name)
    tail = "the job goes on, and cannot be traced that way"
    agent = KinetoAgent(
        f"{folder.as_seen}/{NAME}", folder=folder,
        failed=lambda reason: print_message(f"the Kineto agent has ended ({reason}): {tail}"),
    )  # fmt: skip
    try:
        agent.bind()
    except OSError:
        folder.remove()
        raise
    return agent
