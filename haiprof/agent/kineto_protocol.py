"""Kineto's daemon protocol: its messages, the socket's address, configurations, and a client."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from haiprof.base.errors import HaiprofError, UsageError
from haiprof.base.options import ENV_KINETO_DAEMON, ENV_KINETO_FOLDER
from haiprof.base.safe_files import MadeFolder, make_private, remove_file
from haiprof.run_format.control import read_object

CONTEXT = b"ctxt"
"""A process states which GPU it uses; the answer is how many do."""
REQUEST = b"req"
"""A process asks for a configuration; an empty answer requests nothing."""
OURS = b"haiprof"
"""A question to the agent itself; JSON both ways."""

DATAGRAM_LIMIT_BYTES = 1 << 16
_HEAD = struct.Struct("=Q32s")
CONTEXT_STATED = struct.Struct("=iiq")
_ASK = struct.Struct("=iiq")
_PID = struct.Struct("=i")
COUNT = struct.Struct("=i")
_PID_LIMIT = 64
_ACTIVITIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One datagram."""

    type: bytes
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A process's request for a configuration."""

    free: bool
    """Whether it can trace now: no profiler runs or is scheduled in it."""
    job: int
    """SLURM_JOB_ID, else 0."""
    pids: tuple[int, ...]
    """Itself first, then its parents, as its own namespace numbers them."""


def encode(kind: bytes, payload: bytes) -> bytes:
    """One datagram."""
    return _HEAD.pack(len(payload), kind) + payload


def decode(datagram: bytes) -> Message | None:
    """The message of a datagram; None if it is malformed."""
    if len(datagram) < _HEAD.size:
        return None
    size, kind = _HEAD.unpack_from(datagram)
    payload = datagram[_HEAD.size :]
    if size != len(payload):
        return None
    return Message(type=kind.rstrip(b"\0"), payload=payload)


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


NAME = "dynolog"
"""What Kineto calls the daemon."""
ABSTRACT = f"\0{NAME}\0"
"""Its address where no folder is named; Kineto counts the null byte behind a name as part of it."""


@dataclass(slots=True)
class PrivateFolder:
    """A folder for the sockets of one job, which its owner alone may enter.

    The job gets a path through the launcher's open descriptor: that is short enough for any socket,
    and it vanishes with the launcher, however that ended. A socket without a listener would delay
    `import torch` by ten seconds.
    """

    made: MadeFolder
    _fd: int = field(default=-1)

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
_SWITCHES = {
    "stacks": "PROFILE_WITH_STACK",
    "shapes": "PROFILE_REPORT_INPUT_SHAPES",
    "memory": "PROFILE_PROFILE_MEMORY",
    "flops": "PROFILE_WITH_FLOPS",
    "modules": "PROFILE_WITH_MODULES",
    "sync": "ACTIVITIES_DISPLAY_CUDA_SYNC_WAIT_EVENTS",
}
"""Options of a trace by name, with Kineto's key. Source: libkineto Config.cpp; dynolog's client."""
WARMUP_S = 1
WARMUP_STEPS = 3
"""Kineto's own thread needs some steps to start; without them the first ones are missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """One window for some processes."""

    steps: int = 5
    """Optimizer steps."""
    time_s: float = 0.0
    """Seconds in place of steps."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Switches: `stacks`, `shapes`, `memory`, `flops`, `modules`, `sync`."""
    timeout_s: float | None = None
    endpoint: tuple[str, int] | None = None
    """Of a dynolog daemon; None asks haiprof's own agent."""
    start_wall_ns: int = 0
    """Unix time from which on it begins, the same on all nodes; 0 is at once."""
    roundup: int = 0
    """Steps begin at a multiple of this iteration, so that ranks begin at the same one; 0 lets
    haiprof choose."""

    @property
    def backend(self) -> str:
        """Who passes it on to the processes."""
        return "dynolog" if self.endpoint else "kineto"

    def text(self, log_file: str) -> str:
        """As Kineto reads it."""
        if any(character in log_file for character in _UNREADABLE):
            raise UsageError(
                f"{log_file!r}: Kineto cannot take a path with a line break or a '#' in it"
            )
        lines = [f"ACTIVITIES_LOG_FILE={log_file}"]
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
        lines += [f"{key}=true" for name, key in _SWITCHES.items() if self.options.get(name)]
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
            message = decode(ours.recv(_ANSWER_LIMIT_BYTES))
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
    answer = read_object(message.payload) if message and message.type == OURS else None
    if answer is None:
        raise NoAgentError(f"{shown}: its answer cannot be read")
    if "error" in answer:
        raise NoAgentError(f"{shown}: {answer['error']}")
    return answer


def shown_address(address: str) -> str:
    """An address for people: `@dynolog` for an abstract one."""
    return f"@{address.strip(chr(0))}" if address.startswith("\0") else address
