"""The stand-in for dynolog answers real datagrams, and nothing hostile reaches a job through it."""

from __future__ import annotations

import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from haiprof.agent.kineto_daemon import (
    NAME,
    SILENT_NS,
    Ask,
    KinetoAgent,
    NoAgentError,
    PendingRequests,
    PrivateFolder,
    TraceRequest,
    ask_agent,
    decode,
    decode_ask,
    encode,
    is_alive,
    own_address,
)
from haiprof.base.errors import UsageError


class Process:
    """What libkineto does in a process: asks from a socket beside the daemon's."""

    def __init__(self, folder: str, name: str = "dynoconfigclient-1") -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"{folder}/{name}")
        self.socket.settimeout(30)
        self.daemon = f"{folder}/{NAME}"
        OPEN.append(self)

    def ask(self, *, free: bool = True) -> str:
        self.socket.sendto(encode_ask(ask_of(free=free)), self.daemon)
        kind, payload = decode(self.socket.recv(1 << 16))
        assert kind == b"req"
        return payload.decode()


def encode_ask(ask: Ask) -> bytes:
    """The datagram that a process sends."""
    numbers = (3 if ask.free else 1, len(ask.pids), ask.job, *ask.pids)
    return encode(b"req", struct.pack(f"=iiq{len(ask.pids)}i", *numbers))


def ask_of(*, free: bool = True) -> Ask:
    return Ask(free=free, job=0, pids=(os.getpid(), 1))


OPEN: list[Process] = []


@pytest.fixture(autouse=True)
def close_processes() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().socket.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[PrivateFolder]:
    made = PrivateFolder.create(tmp_path / "control" / ("deep-" * 30))
    yield made
    made.remove()


@pytest.fixture
def agent(folder: PrivateFolder) -> Iterator[KinetoAgent]:
    made = KinetoAgent(f"{folder.as_seen}/{NAME}")
    made.bind()
    made.start()
    yield made
    made.stop()


def request_for(
    agent: KinetoAgent, name: str = "r1", text: str = "ACTIVITIES_LOG_FILE=x\n"
) -> None:
    ask_agent(
        agent.address,
        {
            "do": "trace",
            "id": name,
            "text": text,
            "pids": [os.getpid()],
            "expires_wall_ns": time.time_ns() + 10**10,
        },
    )


def state(agent: KinetoAgent, name: str = "r1") -> str:
    said = ask_agent(agent.address, {"do": "state", "id": name})
    return str(said["states"][str(os.getpid())])


def test_process_gets_its_request_once(folder: PrivateFolder, agent: KinetoAgent) -> None:
    process = Process(folder.as_seen)
    assert process.ask() == ""
    request_for(agent)
    assert state(agent) == "waiting"
    assert process.ask() == "ACTIVITIES_LOG_FILE=x\n"
    assert state(agent) == "delivered"
    assert process.ask() == ""


def test_request_is_kept_back_while_the_process_uses_its_own_profiler(
    folder: PrivateFolder, agent: KinetoAgent
) -> None:
    process = Process(folder.as_seen)
    request_for(agent)
    assert process.ask(free=False) == ""
    assert state(agent) == "busy"
    assert process.ask(free=True) != ""


def test_path_of_any_bytes_gets_through_and_what_is_no_text_is_refused(
    folder: PrivateFolder, agent: KinetoAgent
) -> None:
    process = Process(folder.as_seen)
    request_for(agent, text="ACTIVITIES_LOG_FILE=/ü\udcff.json\n")
    process.socket.sendto(encode_ask(ask_of()), process.daemon)
    _, payload = decode(process.socket.recv(1 << 16))
    assert payload == b"ACTIVITIES_LOG_FILE=/\xc3\xbc\xff.json\n"
    with pytest.raises(NoAgentError, match="not a request"):
        request_for(agent, "r2", text="\ud800")
    assert process.ask() == ""


def test_cancelled_request_reaches_nobody(folder: PrivateFolder, agent: KinetoAgent) -> None:
    process = Process(folder.as_seen)
    request_for(agent)
    assert ask_agent(agent.address, {"do": "cancel", "id": "r1"}) == {"cancelled": True}
    assert process.ask() == ""


def test_process_of_a_deep_run_directory_is_reached_by_a_short_path(
    folder: PrivateFolder, agent: KinetoAgent
) -> None:
    assert len(str(folder.path)) > 108
    assert folder.path.stat().st_mode & 0o077 == 0
    assert Process(folder.as_seen).ask() == ""
    assert len(agent.pending.clients) == 1


def test_process_that_was_told_another_path_is_left_without_an_answer(
    folder: PrivateFolder, agent: KinetoAgent, tmp_path: Path
) -> None:
    """Libkineto ends its process by an answer from a path that it does not know."""
    fd = os.open(folder.path, os.O_PATH)
    other = f"/proc/self/fd/{fd}"
    try:
        process = Process(other)
        process.socket.settimeout(0.3)
        process.socket.sendto(encode_ask(ask_of()), f"{other}/{NAME}")
        with pytest.raises(TimeoutError):
            process.socket.recv(1 << 16)
        assert agent.ignored_count == 1
    finally:
        os.close(fd)


def test_hostile_datagrams_change_nothing(folder: PrivateFolder, agent: KinetoAgent) -> None:
    chance = random.Random(7)
    process = Process(folder.as_seen)
    good = encode_ask(ask_of())
    hostile = [
        b"",
        b"x",
        good[:-1],
        good + b"x",
        encode(b"req", struct.pack("=iiq", 3, 2**31 - 1, 0)),
        encode(b"req", struct.pack("=iiq", 3, -1, 0)),
        encode(b"req", struct.pack("=iiq", 3, 0, 0)),
        encode(b"haiprof", b"[" * 60_000),
        encode(b"haiprof", b"\xff"),
        encode(b"haiprof", b'{"do": "trace", "id": 5}'),
        encode(b"haiprof", b'{"do": "trace", "id": "x", "pids": [1], "text": 3}'),
        struct.pack("=Q32s", 2**63, b"req") + good[40:],
    ]
    for _ in range(300):
        mutated = bytearray(good)
        for _ in range(chance.randint(1, 6)):
            mutated[chance.randrange(len(mutated))] = chance.randrange(256)
        hostile += [bytes(mutated), chance.randbytes(chance.randint(0, 200))]
    for datagram in hostile:
        process.socket.sendto(datagram, agent.address)
        with_answer(process)
    assert process.ask() == ""
    assert agent.pending.requests == {}
    assert set(agent.pending.clients) == {os.getpid()}  # by the kernel's word, whatever was claimed


def with_answer(process: Process) -> None:
    """Takes what came back, if anything: the socket's queue holds ten."""
    process.socket.setblocking(False)
    try:
        process.socket.recv(1 << 16)
    except BlockingIOError:
        pass
    finally:
        process.socket.settimeout(30)


def test_descriptors_sent_along_are_closed(folder: PrivateFolder, agent: KinetoAgent) -> None:
    process = Process(folder.as_seen)
    process.socket.connect(agent.address)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with open(os.devnull) as file:
            socket.send_fds(process.socket, [b"x"], [file.fileno()])
    process.socket.send(encode_ask(ask_of()))
    assert process.socket.recv(100)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_client_that_does_not_read_is_not_waited_for(
    folder: PrivateFolder, agent: KinetoAgent
) -> None:
    deaf = Process(folder.as_seen, "dynoconfigclient-deaf")
    for _ in range(40):
        deaf.socket.sendto(encode_ask(ask_of()), agent.address)
    assert Process(folder.as_seen, "dynoconfigclient-2").ask() == ""


def test_socket_and_folder_are_gone_afterwards(tmp_path: Path) -> None:
    folder = PrivateFolder.create(tmp_path / "k")
    agent = KinetoAgent(f"{folder.as_seen}/{NAME}")
    agent.bind()
    agent.start()
    seen = folder.as_seen
    assert is_alive(agent.address)
    agent.stop()
    assert all(thread.name != "haiprof-kineto" for thread in threading.enumerate())
    assert os.listdir(folder.path) == []
    folder.remove()
    assert not folder.path.exists()
    assert not os.path.exists(seen)


def test_nobody_listening_is_said_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(NoAgentError, match="no agent listens") as caught:
        ask_agent(str(tmp_path / "dynolog"), {"do": "clients"})
    assert "kineto-agent" in caught.value.hint


def test_silent_processes_and_expired_requests_are_forgotten() -> None:
    now = [10**12]
    pending = PendingRequests(mono_ns=lambda: now[0], wall_ns=lambda: now[0])
    pending.note_client(5, ask_of())
    question = {"do": "trace", "id": "a", "text": "x", "pids": [5], "expires_wall_ns": now[0] + 5}
    pending.answer(question)
    now[0] += SILENT_NS + 1
    assert pending.answer({"do": "clients"}) == {"clients": []}
    assert pending.note_client(5, ask_of()) == ("", "")


def test_ask_is_read_back_as_it_was_written() -> None:
    ask = Ask(free=False, job=77, pids=(3, 2, 1))
    assert decode_ask(decode(encode_ask(ask))[1]) == ask


def test_window_is_written_in_kineto_s_words() -> None:
    steps = TraceRequest(steps=5, roundup=100, options={"stacks": True, "memory": False})
    assert "PROFILE_START_ITERATION_ROUNDUP=100\n" in steps.text("/t/a.json")
    assert "PROFILE_WITH_STACK=true" in steps.text("/t/a.json")
    assert "MEMORY" not in steps.text("/t/a.json")
    seconds = TraceRequest(time_s=1.5, start_wall_ns=2_000_000_000, options={})
    assert "PROFILE_START_TIME=2000\n" in seconds.text("/t/a.json")
    assert "ACTIVITIES_DURATION_MSECS=1500\n" in seconds.text("/t/a.json")


@pytest.mark.parametrize("path", ["/t/a#b.json", "/t/a\nPROFILE_WITH_STACK=true.json"])
def test_path_that_kineto_would_cut_off_is_refused(path: str) -> None:
    with pytest.raises(UsageError, match="Kineto cannot take"):
        TraceRequest(options={}).text(path)


def test_folder_that_others_may_enter_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="other users may enter"):
        own_address({}, tmp_path)
    tmp_path.chmod(0o700)
    if len(str(tmp_path)) < 50:
        assert own_address({}, tmp_path) == f"{tmp_path}/{NAME}"
    assert own_address({}, None) == "\0dynolog\0"
