"""Supervises the job as a child process, with its own terminal, signals and exit status."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from haiprof.base.messages import print_message
from haiprof.linux.process_files import stat_fields, status_fields

# Not for the job: they cannot be caught, are about a process's own doing, or Python's own business.
_OWN = (
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE,
    signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGSYS, signal.SIGPIPE, signal.SIGXFSZ,
)  # fmt: skip
PASSED_ON = frozenset(number for number in signal.valid_signals() if number not in _OWN)
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STOPS = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)

# glibc's and musl's sigset_t, and struct signalfd_siginfo: linux/signalfd.h.
_SIGSET_BITS = 1024
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)
_INFO = struct.Struct("<IiiII108x")


class Signal(NamedTuple):
    """A signal that has arrived."""

    number: int
    code: int  # who sent it: `si_code` of sigaction(2)
    pid: int = 0  # the process that sent it; 0: the kernel, or one in another PID namespace
    uid: int = 0  # its user


class SignalReader:
    """Takes blocked signals of the process that reads; a forked child reads its own."""

    def __init__(self, numbers: Iterable[int]) -> None:
        mask = (ctypes.c_ulong * (_SIGSET_BITS // _WORD_BITS))()
        for number in numbers:
            mask[(number - 1) // _WORD_BITS] |= 1 << (number - 1) % _WORD_BITS
        library = ctypes.CDLL(None, use_errno=True)
        fd = library.signalfd(-1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
        if fd < 0:
            raise OSError(ctypes.get_errno(), f"signalfd: {os.strerror(ctypes.get_errno())}")
        self.fd = above_streams(fd)

    def read(self, wait_s: float = 0.0) -> Signal | None:
        """The next signal; None where none comes within the time."""
        if wait_s and not is_readable(self.fd, wait_s):
            return None
        try:
            number, _, code, pid, uid = _INFO.unpack(os.read(self.fd, _INFO.size))
        except BlockingIOError:
            return None
        return Signal(number, code, pid, uid)


def above_streams(fd: int) -> int:
    """Moves a descriptor above the standard streams, also where those are closed."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return moved


def first_readable(fds: Iterable[int], wait_s: float | None) -> int | None:
    """The first descriptor with something to read, or an end; None where none has within a time."""
    poll = select.poll()  # not select.select: descriptors may be larger than 1023
    for fd in fds:
        poll.register(fd, select.POLLIN)
    ready = poll.poll(None if wait_s is None else wait_s * 1000)
    return ready[0][0] if ready else None


def is_readable(fd: int, wait_s: float | None) -> bool:
    """Whether there is something to read, or an end, within a time; without one it waits."""
    return first_readable((fd,), wait_s) is not None


PULSE_S = 1.0
_PACKET_LIMIT_BYTES = 1 << 20


class Line:
    """One end of it."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=above_streams(fd))

    @classmethod
    def pair(cls) -> tuple[Line, Line]:
        """Both ends."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ends[0].detach()), cls(ends[1].detach())

    def send(self, **content: object) -> bool:
        """Sends a packet without waiting; whether the other end still exists."""
        try:
            self._socket.send(json.dumps(content).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True  # it does not read just now, as when it is stopped
        except OSError:
            return False
        return True

    def receive(self, wait_s: float | None) -> dict[str, Any] | None:
        """The next packet; None where none comes within the time. Without one it waits."""
        if not is_readable(self._socket.fileno(), wait_s):
            return None
        try:
            packet = self._socket.recv(_PACKET_LIMIT_BYTES)
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise EOFError("the other end is gone")
        found: dict[str, Any] = json.loads(packet)
        return found

    def close(self) -> None:
        """Ends it."""
        self._socket.close()


class Pulse:
    """A heartbeat to the launcher once a second, silent while the run directory's disk hangs."""

    def __init__(self, line: Line, folder: Path) -> None:
        self._line, self._folder = line, folder
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begins; once it has begun this does nothing."""
        if self._thread is None or not self._thread.is_alive():
            self._stopped.clear()
            self._thread = threading.Thread(target=self._beat, name="haiprof-pulse", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Ends it, without waiting."""
        self._stopped.set()

    def _beat(self) -> None:
        while not self._stopped.is_set():
            with contextlib.suppress(OSError):  # an error is an answer, too
                os.utime(self._folder)
            if not self._line.send(pulse=time.monotonic()):
                discard(2)  # the launcher is gone, and with it the reader
                return
            self._stopped.wait(PULSE_S)


def discard(*fds: int) -> None:
    """Redirects descriptors to /dev/null: a pipe's reader sees its end, or there is none."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(null, fd)
    if null not in fds:
        os.close(null)


_STATE, _FLAGS, _EXIT_CODE = 0, 6, 49  # fields of /proc/PID/stat from the third on: proc(5)
_PF_EXITING = 0x4  # linux/sched.h
_KILLED = 1 << 8  # SIGKILL in a mask of signals


def status_of_ended(pid: int) -> int | None:
    """The wait status of a process of which no thread will run a line of its own any more."""
    # None while it runs, dumps its core, or is gone, and where it is another user's, whose status
    # the kernel shows as 0.
    folder = f"/proc/{pid}"
    try:
        if os.geteuid() not in (0, os.stat(folder).st_uid):
            return None
        threads = os.listdir(f"{folder}/task")
        if all(_leaves(f"{folder}/task/{thread}") for thread in threads):
            return int(stat_fields(folder)[_EXIT_CODE])
    except (OSError, ValueError, IndexError):
        return None
    return None


def _leaves(folder: str) -> bool:
    """Whether a thread has begun to exit, or will as soon as it comes out of the kernel."""
    if int(stat_fields(folder)[_FLAGS]) & _PF_EXITING:
        return True
    return bool(int(status_fields(folder).get("SigPnd", "0"), 16) & _KILLED)


ANSWER_S = 0.05
_RECORD = struct.Struct("<qq")  # signal, CLOCK_MONOTONIC ns: a late answer is no answer to the next


class Canary:
    """A forked process in the launcher's group that reports the signals it receives."""

    def __init__(self) -> None:
        self._handled_ns = 0
        self._fd, write_fd = map(above_streams, os.pipe())
        self.pid = os.fork()
        if self.pid == 0:
            _report_signals(self._fd, write_fd)
        os.close(write_fd)

    def has_received(self, number: int) -> bool:
        """Whether the same signal reached the canary, waiting a moment for it."""
        deadline = time.monotonic() + ANSWER_S
        answer = False
        while not answer and (left := deadline - time.monotonic()) > 0:
            heard = os.read(self._fd, _RECORD.size) if is_readable(self._fd, left) else b""
            if not heard:  # no answer, or it was killed: delivering twice is better than never
                break
            heard_number, heard_ns = _RECORD.unpack(heard)
            answer = heard_number == number and heard_ns > self._handled_ns
        self._handled_ns = time.monotonic_ns()
        return answer

    def leave(self) -> None:
        """In another child of the launcher: the canary is not its own."""
        os.close(self._fd)

    def close(self) -> None:
        """Ends the canary."""
        os.close(self._fd)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody else ended it
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _report_signals(read_fd: int, write_fd: int) -> None:
    """The canary's whole life: one record per signal, until nobody reads them any more."""
    try:
        for fd in (0, 1, 2, read_fd):
            with contextlib.suppress(OSError):
                os.close(fd)
        everything = signal.valid_signals()
        signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        reader = SignalReader(everything - {signal.SIGKILL, signal.SIGSTOP})
        events = select.poll()
        events.register(reader.fd, select.POLLIN)
        events.register(write_fd, 0)  # tells of POLLERR: the launcher is gone
        while write_fd not in dict(events.poll()):
            got = reader.read()
            if got is not None:
                os.write(write_fd, _RECORD.pack(got.number, time.monotonic_ns()))
    finally:
        os._exit(0)


TICK_S = 1.0
STOP_ANSWER_S = 0.2
EXIT_LIMIT_S = 10.0  # how long a log directory that does not answer may delay the exit of the job

_NOT_WAITED = (
    f"the log directory has not answered for {EXIT_LIMIT_S:g} s: not waiting for it any longer"
)
_SI_KERNEL = 0x80  # sent by the kernel
# What a terminal's driver sends, and to the whole foreground group. An alarm() is the kernel's too;
# so are SIGHUP and SIGCONT of a terminal that goes, and these are for the session's leader alone.
_FROM_TERMINAL = (signal.SIGINT, signal.SIGQUIT, signal.SIGWINCH)
_NOT_NOTED = (signal.SIGWINCH, signal.SIGCONT, signal.SIGURG)
"""Signals that come often and end nothing: who sent the others is written down."""


@dataclass(frozen=True)
class Outcome:
    """How the job ended."""

    status: int  # exit status; 128 + the signal's number when one ended it
    signal: int | None  # the signal that ended it

    @classmethod
    def from_code(cls, code: int) -> Outcome:
        """From `Popen.returncode`."""
        return cls(code, None) if code >= 0 else cls(128 - code, -code)

    @property
    def signal_name(self) -> str | None:
        """`SIGTERM`, and `SIG37` for one without a name."""
        if self.signal is None:
            return None
        with contextlib.suppress(ValueError):
            return signal.Signals(self.signal).name
        return f"SIG{self.signal}"


class Supervisor:
    """Starts the job in the launcher's own process group and session, and passes signals on."""

    def __init__(self) -> None:
        waited = PASSED_ON | {signal.SIGCHLD}
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
        self._child_before = signal.getsignal(signal.SIGCHLD)
        if self._child_before == signal.SIG_IGN:  # the kernel would throw the job's status away
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._child: subprocess.Popen[bytes] | None = None
        self._companion = 0
        self._line: Line | None = None
        try:
            self._signals = SignalReader(waited - set(STOPS))
            self._suspends = SignalReader(STOPS)
            self._ending = SignalReader(ENDING)
            self._canary = Canary()
        except OSError:
            self.unblock()
            raise

    def fork_companion(self, body: Callable[[Line], None]) -> None:
        """Starts the companion process, which runs `body`."""
        here, there = Line.pair()
        pid = os.fork()
        if pid == 0:
            here.close()
            self._canary.leave()
            _live(body, there)
        there.close()
        self._companion, self._line = pid, here

    def hear(self, limit_s: float) -> dict[str, Any]:
        """The companion's next message."""
        said = self._listen(limit_s, self._end_before_the_job)
        if said is None:
            raise TimeoutError(f"no answer within {limit_s:g} s")
        return said

    def _end_before_the_job(self, got: Signal) -> None:
        self._canary.close()
        die_of(got.number)

    def release(self) -> None:
        """Restores the process's original state, for it becomes the command itself."""
        self._canary.close()
        if self._companion:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._companion, 0)
        self._as_given()

    def abandon_companion(self) -> None:
        """Gives up a companion that does not answer: the job runs unrecorded."""
        if self._line is not None:
            self._line.close()
        self._line = None

    def start(self, command: list[str], environ: Mapping[str, str]) -> None:
        """Starts the job with the signal mask and the descriptors that the launcher was given."""

        def start(words: list[str]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                words, env=dict(environ), close_fds=False, preexec_fn=self._as_given
            )

        try:
            self._child = start(command)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            self._child = start(["/bin/sh", *command])  # no first line: as shells do
        discard(0, 1)  # of the job: a pipe's reader sees its end with the job's
        self.tell(started=self._child.pid)

    def wait(self) -> Outcome:
        """Forwards signals until the job ends, or is over but blocked by the log's disk."""
        assert self._child is not None, "start() comes first"
        lingers_s = 0.0
        while self._child.poll() is None:
            arrived = first_readable((self._signals.fd, self._suspends.fd), TICK_S)
            if arrived == self._suspends.fd:
                self._suspend(self._child)
            elif (got := self._signals.read()) is None:
                lingers_s = self._lingering_s(lingers_s)
                if lingers_s >= EXIT_LIMIT_S:
                    return self._leave_behind(self._child)
            elif got.number != signal.SIGCHLD:
                self._pass_on(got)
            self._look_after_companion()
        # What came to the whole group may have ended the job before it was read here.
        while (got := self._signals.read()) is not None:
            if got.number != signal.SIGCHLD:
                self._tell_of(got)
        return Outcome.from_code(self._child.returncode)

    def _lingering_s(self, so_far_s: float) -> float:
        """How long the job has been over while the log directory does not answer."""
        # Freeing much memory takes its time too: there the companion still gives its pulse.
        if self._line is None or status_of_ended(self.pid) is None:
            return 0.0
        if not so_far_s:
            self.tell(lingers=True)
        heard = False
        with contextlib.suppress(EOFError):
            while self._line.receive(0) is not None:
                heard = True
        return TICK_S if heard else so_far_s + TICK_S

    def _leave_behind(self, child: subprocess.Popen[bytes]) -> Outcome:
        """Abandons a finished process that the kernel cannot release; its status is known."""
        status = status_of_ended(child.pid)
        with contextlib.suppress(OSError):
            os.kill(child.pid, signal.SIGKILL)  # ends those waits that can be ended
        try:
            child.wait(TICK_S)
        except subprocess.TimeoutExpired:
            child.returncode = os.waitstatus_to_exitcode(status or 0)
            print_message(
                f"the job has ended; its process {child.pid} is blocked by a disk that does not "
                "answer"
            )
        print_message(_NOT_WAITED)
        self.abandon_companion()
        return Outcome.from_code(child.returncode)

    def _look_after_companion(self) -> None:
        """Reports once if it is gone; the job is not affected."""
        if self._line is None or not self._companion:
            return
        with contextlib.suppress(ChildProcessError):
            pid, status = os.waitpid(self._companion, os.WNOHANG)
            if pid:
                ended = Outcome.from_code(os.waitstatus_to_exitcode(status))
                how = ended.signal_name or f"exit status {ended.status}"
                print_message(
                    f"the recording process has ended ({how}); the job goes on, without a verdict"
                )
                self._companion = 0
                self.abandon_companion()

    @property
    def pid(self) -> int:
        """The job's process id."""
        return self._child.pid if self._child is not None else 0

    def conclude(self, **outcome: object) -> None:
        """Tells the companion how it ended and waits for it, as long as its disk answers."""
        self.tell(**outcome)
        if self._line is not None:
            with contextlib.suppress(EOFError):
                self._listen(EXIT_LIMIT_S, self._pass_on_end)
                print_message(_NOT_WAITED)
        self._canary.close()

    def _pass_on_end(self, got: Signal) -> None:
        """Handles a request to end after the job: it concerns the launcher's remaining work."""
        if not self._canary.has_received(got.number):
            self._signal_companion(got.number)

    def asked_to_end(self, wait_s: float = 0.1) -> bool:
        """In the companion: whether it is asked to end, after the job."""
        return self._ending.read(wait_s) is not None

    def forget_signals(self) -> None:
        """In the companion: what came before the job ended was meant for the job."""
        while self._ending.read() is not None:
            continue

    def unblock(self) -> None:
        """Gives a child of ours the signal mask that the launcher was started with."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)

    def _as_given(self) -> None:
        """The same for the job, which also finds its children as its caller wanted them."""
        if self._child_before == signal.SIG_IGN:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        self.unblock()

    def tell(self, **content: object) -> None:
        """Sends the companion a message."""
        if self._line is not None:
            self._line.send(**content)

    def _listen(self, limit_s: float, take: Callable[[Signal], None]) -> dict[str, Any] | None:
        """The companion's next message; None if it gave no sign of life for so long."""
        # Time is counted in short pieces: that in which the launcher was stopped is no silence.
        assert self._line is not None
        silent_s = 0.0
        while silent_s < limit_s:
            began_s = time.monotonic()
            got = self._ending.read()
            if got is not None:
                take(got)
            said = self._line.receive(TICK_S / 10)
            silent_s += min(time.monotonic() - began_s, TICK_S / 10)
            if said is not None:
                silent_s = 0.0
                if "pulse" not in said:
                    return said
        return None

    def _tell_of(self, got: Signal) -> bool:
        """Tells the companion what arrived; whether it came to the whole group."""
        # asked in any case, so that no answer is left over
        heard = self._canary.has_received(got.number)
        if got.number not in _NOT_NOTED:
            self.tell(
                arrived=got.number, code=got.code, pid=got.pid, uid=got.uid, to_group=heard,
                wall_ns=time.time_ns(),
            )  # fmt: skip
        return heard

    def _pass_on(self, got: Signal) -> None:
        number = got.number
        heard = self._tell_of(got)
        by_terminal = got.code == _SI_KERNEL and number in _FROM_TERMINAL
        child = self._child
        if child is not None and not by_terminal and not (heard and _in_our_group(child.pid)):
            _send(child, number)
        if number == signal.SIGCONT:
            # Our own processes were stopped with the job; SIGCONT may come to the launcher alone.
            if is_stopped(self._companion):
                self._signal_companion(signal.SIGCONT)
            if is_stopped(self._canary.pid):
                os.kill(self._canary.pid, signal.SIGCONT)
                self._canary.has_received(signal.SIGCONT)

    def _suspend(self, child: subprocess.Popen[bytes]) -> None:
        """Ctrl-Z: stops with the job, if it stops; it may have a handler, or be alone."""
        # Meanwhile the signal stays pending: a SIGCONT that comes first takes it back in the
        # kernel. A launcher that stopped itself by another one would drop that SIGCONT, and stay
        # stopped.
        for number in signal.sigpending() & set(STOPS):
            sent = not (self._canary.has_received(number) and _in_our_group(child.pid))
            if sent:
                _send(child, number)
            stops = _stops(child.pid)
            if number not in signal.sigpending():
                if sent and is_stopped(child.pid):  # by what came after the group's SIGCONT
                    _send(child, signal.SIGCONT)
            elif stops:
                self._signal_companion(signal.SIGSTOP)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # stops here
                signal.pthread_sigmask(signal.SIG_BLOCK, {number})
                self._signal_companion(signal.SIGCONT)
            else:
                self._suspends.read()

    def _signal_companion(self, number: int) -> None:
        if self._companion:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._companion, number)


def _live(body: Callable[[Line], None], line: Line) -> NoReturn:
    """Runs the companion; none of the launcher's code runs after it."""
    try:
        discard(0, 1)  # of the job: a pipe's reader sees its end with the job's
        body(line)
    except BaseException as error:  # noqa: BLE001  whatever it is, the job goes on without it
        print_message(f"{type(error).__name__} beside the job: {error}; the job is not affected")
        os._exit(1)
    os._exit(0)


def _send(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(OSError):  # the job has become another user's
        child.send_signal(number)


def _in_our_group(pid: int) -> bool:
    """Whether the job has stayed in our process group: not after setsid, say."""
    with contextlib.suppress(OSError):
        return os.getpgid(pid) == os.getpgrp()
    return True


def _stops(pid: int) -> bool:
    deadline = time.monotonic() + STOP_ANSWER_S
    while time.monotonic() < deadline:
        if is_stopped(pid):
            return True
        time.sleep(STOP_ANSWER_S / 20)
    return False


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return stat_fields(f"/proc/{pid}")[0] == b"T"
    return False


def die_of(number: int) -> None:
    """Ends this process by the job's signal, so that the caller sees the same."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the job's core is the one that matters
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
