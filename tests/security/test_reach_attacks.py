"""Attacks on `--reach`: from other machines and other users, without the token and with it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from haiprof.agent import reach
from haiprof.agent.node_agent import Agent
from haiprof.agent.reach import (
    AGENT,
    ANSWER_BYTES,
    CONTROLLER,
    FRAME_LIMIT_BYTES,
    HELLO_BYTES,
    LENGTH,
    MAGIC,
    NONCE_BYTES,
    PROOF_BYTES,
    Controller,
    Handshake,
    Uplink,
    listen,
    make_token,
    read_token,
)
from haiprof.base.errors import UsageError
from haiprof.base.options import Options
from haiprof.launch.run_directories import create_run
from haiprof.live.find import members
from haiprof.run_format.control import new_request, post_request, read_replies
from tests.process.launch.reach_peers import Peer, agent, connect, read, take_agent
from tests.process.launch.test_relay import Node
from tests.process.live import within

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
REQUEST = new_request("stacks", valid_s=600).as_json()


@pytest.fixture
def controller() -> Iterator[Controller]:
    controller = Controller(listen("127.0.0.1", 0), KEY)
    controller.start()
    yield controller
    controller.stop()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Where a launcher expects its controller, and somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        yield listener


@pytest.fixture
def uplink(listener: socket.socket) -> Iterator[Uplink]:
    uplink = Uplink(listener.getsockname(), KEY)
    uplink.start()
    yield uplink
    uplink.stop()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path / "run")
    node.relay.start()
    yield node
    node.relay.stop()


def is_cut_off(connection: socket.socket) -> bool:
    """Whether the other end closes, whatever it still says before."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 16):
            pass
    return True


def joins(controller: Controller, *, within_s: float = 30) -> None:
    """An honest agent gets in, is heard and hears."""
    uplink = Uplink(controller.address, KEY)
    uplink.start()
    try:
        member = {"member": {"name": "7", "rank": 7}}
        within(within_s, lambda: uplink.send(member) and b'"7"' in (controller.take() or b""))
        controller.broadcast(REQUEST)
        within(60, lambda: uplink.requests)
    finally:
        uplink.stop()
    within(60, lambda: len(controller.agents) == 0)


# -- whoever has taken the controller's port -------------------------------------------------------


@pytest.mark.parametrize("key", [OTHER_KEY, b"\0" * 32])
def test_a_rogue_controller_learns_nothing_and_asks_for_nothing(
    listener: socket.socket, uplink: Uplink, capsys: pytest.CaptureFixture[str], key: bytes
) -> None:
    said = b""
    for _ in range(2):
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30)
            said += read(connection, HELLO_BYTES)
            nonce = os.urandom(NONCE_BYTES)
            rogue = Handshake(key=key, agent_nonce=said[-NONCE_BYTES:], controller_nonce=nonce)
            connection.sendall(nonce + rogue.proof(CONTROLLER))
            asks = Peer(connection, rogue.signer(CONTROLLER), rogue.signer(AGENT))
            with contextlib.suppress(ConnectionError):
                asks.send(REQUEST)
                said += read(connection, 1)
    assert KEY not in said
    assert KEY.hex().encode() not in said
    assert len(said) == 2 * HELLO_BYTES  # and not one byte of an own proof
    assert not uplink.requests
    assert not uplink.send({"member": {"name": "0"}})
    within(60, lambda: "does not have the same token" in str(uplink.error))
    told = capsys.readouterr().err
    assert "does not have the same token" in told
    assert told.count("\n") == 1


def test_a_challenge_sent_back_as_it_came_proves_nothing(
    listener: socket.socket, uplink: Uplink, controller: Controller
) -> None:
    """The attacker has the real controller answer for itself, and the agent likewise."""
    connection, _ = listener.accept()
    with connection, connect(controller.address) as toward:
        connection.settimeout(30)
        hello = read(connection, HELLO_BYTES)
        toward.sendall(hello)
        answer = read(toward, ANSWER_BYTES)
        toward.sendall(answer[NONCE_BYTES:])  # the controller's own proof, as the agent's
        assert is_cut_off(toward)
        connection.sendall(hello[len(MAGIC) :] + answer[NONCE_BYTES:])
        assert is_cut_off(connection)
    assert len(controller.agents) == 0
    assert not uplink.requests


def test_who_passes_the_handshake_on_can_neither_change_nor_repeat_nor_add(
    listener: socket.socket, uplink: Uplink, controller: Controller
) -> None:
    """In between from the first byte on: both ends are proven, and the attacker has no key."""
    handshake = HELLO_BYTES, ANSWER_BYTES, PROOF_BYTES

    def between() -> tuple[socket.socket, socket.socket]:
        below, _ = listener.accept()
        below.settimeout(30)
        above = connect(controller.address)
        above.sendall(read(below, handshake[0]))
        below.sendall(read(above, handshake[1]))
        above.sendall(read(below, handshake[2]))
        within(60, lambda: len(controller.agents) == 1 and uplink.error is None)
        return below, above

    controller_says = len(json.dumps(REQUEST).encode()) + LENGTH.size + PROOF_BYTES
    for attack in ("change", "repeat", "shorten", "invent"):
        below, above = between()
        with below, above:
            controller.broadcast(REQUEST)
            sealed = read(above, controller_says)
            uplink.requests.clear()
            if attack == "repeat":
                below.sendall(sealed)
                within(60, lambda: len(uplink.requests) == 1)
                below.sendall(sealed)
                expected = 1
            else:
                below.sendall({
                    "change": sealed.replace(b"stacks", b"status"),
                    "shorten": LENGTH.pack(10) + sealed[LENGTH.size :],
                    "invent": LENGTH.pack(2) + b"{}" + bytes(PROOF_BYTES),
                }[attack])  # fmt: skip
                expected = 0
            assert is_cut_off(below), attack
            assert len(uplink.requests) == expected, attack
        within(60, lambda: len(controller.agents) == 0)


def test_messages_of_another_connection_count_for_nothing(controller: Controller) -> None:
    first = agent(controller.address, KEY)
    sealed = first.seal({"member": {"name": "3", "rank": 3}})
    first.connection.sendall(sealed)
    within(60, controller.take)
    second = agent(controller.address, KEY)
    second.connection.sendall(sealed)
    assert is_cut_off(second.connection)
    assert controller.take() is None
    first.connection.close()
    second.connection.close()


def test_a_port_taken_before_the_launcher_starts_gets_nothing(
    tmp_path: Path, listener: socket.socket, capsys: pytest.CaptureFixture[str]
) -> None:
    """The node that HOST names finds its port taken: it joins as an agent, and is on its guard."""
    log_dir = tmp_path / "logs"
    log_dir.mkdir()
    make_token(log_dir / "reach.token")
    reach = f"127.0.0.1:{listener.getsockname()[1]}"
    run, _, _ = create_run(Options(log_dir=log_dir), command=["x"], name="x", environ={})
    node_agent = Agent(run, Options(log_dir=log_dir, reach=reach))
    try:
        node_agent.start()
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(30)
            assert read(connection, HELLO_BYTES)[: len(MAGIC)] == MAGIC
            connection.sendall(os.urandom(ANSWER_BYTES))
            assert connection.recv(1) == b""
        told = ""

        def warned() -> bool:
            nonlocal told
            told += capsys.readouterr().err
            return "does not have the same token" in told

        within(60, warned)
        assert "Traceback" not in told
    finally:
        node_agent.close()


def test_a_rogue_controller_that_drips_is_left(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haiprof.agent.reach.PROOF_S", 0.5)
    uplink = Uplink(listener.getsockname(), KEY)
    uplink.start()
    connection, _ = listener.accept()
    with connection:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - began < 30 and uplink.error == "not connected yet":
                connection.sendall(b"x")
                time.sleep(0.05)
    uplink.stop()
    assert "timed out" in str(uplink.error)


def test_a_controller_with_the_token_cannot_fill_an_agent(
    listener: socket.socket, uplink: Uplink
) -> None:
    peer = take_agent(listener, KEY)
    within(60, lambda: uplink.error is None)
    with contextlib.suppress(ConnectionError):
        for _ in range(2000):
            peer.send(REQUEST)
    assert is_cut_off(peer.connection)
    assert 0 < len(uplink.requests) <= 200
    peer.connection.close()
    uplink.requests.clear()
    peer = take_agent(listener, KEY)
    with peer.connection:
        peer.connection.sendall(LENGTH.pack(FRAME_LIMIT_BYTES + 1) + b"x")
        assert is_cut_off(peer.connection)
    assert not uplink.requests


# -- whoever comes to the controller ---------------------------------------------------------------


def test_bytes_of_strangers_reach_nothing(controller: Controller) -> None:
    for packet in (
        b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 4, LENGTH.pack(0), LENGTH.pack(3) + b"[1]",
        MAGIC, MAGIC + b"x" * 31, MAGIC + b"x" * 33, b"haiprof-reach-0\n" + b"x" * 32,
        MAGIC + b"x" * (1 << 20), Random(1).randbytes(4096), b"[" * 100_000,
    ):  # fmt: skip
        with connect(controller.address) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(packet)
                connection.shutdown(socket.SHUT_WR)
            assert is_cut_off(connection)
        assert (len(controller.agents), controller.take()) == (0, None), packet[:60]
    joins(controller)


@pytest.mark.parametrize("key", [OTHER_KEY, b"", b"\0" * 32])
def test_a_rogue_agent_hears_nothing_and_is_not_heard(controller: Controller, key: bytes) -> None:
    with connect(controller.address) as connection:
        nonce = os.urandom(NONCE_BYTES)
        connection.sendall(MAGIC + nonce)
        answer = read(connection, ANSWER_BYTES)
        rogue = Handshake(key=key, agent_nonce=nonce, controller_nonce=answer[:NONCE_BYTES])
        peer = Peer(connection, rogue.signer(AGENT), rogue.signer(CONTROLLER))
        with contextlib.suppress(ConnectionError):
            connection.sendall(rogue.proof(AGENT) + peer.seal({"member": {"name": "1"}}))
        controller.broadcast(REQUEST)
        assert is_cut_off(connection)
    assert len(controller.agents) == 0
    assert controller.take() is None


def test_a_recorded_handshake_opens_nothing(controller: Controller) -> None:
    nonce = os.urandom(NONCE_BYTES)
    with connect(controller.address) as first:
        first.sendall(MAGIC + nonce)
        answer = read(first, ANSWER_BYTES)
        handshake = Handshake(key=KEY, agent_nonce=nonce, controller_nonce=answer[:NONCE_BYTES])
        proof = handshake.proof(AGENT)
        first.sendall(proof)
        within(60, lambda: len(controller.agents) == 1)
    within(60, lambda: len(controller.agents) == 0)
    with connect(controller.address) as second:
        second.sendall(MAGIC + nonce)
        assert read(second, ANSWER_BYTES) != answer
        second.sendall(proof)
        assert is_cut_off(second)
    assert len(controller.agents) == 0


def test_a_thousand_idle_connections_keep_nobody_out(controller: Controller) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(controller.address)) for _ in range(1000)]
        joins(controller)
        taken = len(os.listdir("/proc/self/fd")) - before - len(idle)
        assert taken <= reach.MAX_STRANGERS + 20
        assert taken <= reach.MAX_STRANGERS_PER_ADDRESS + 20
        # An agent of another node, while the attacker goes on.
        with connect(controller.address, source_address=("127.9.9.9", 0)) as other:
            other.sendall(MAGIC + os.urandom(NONCE_BYTES))
            assert len(read(other, ANSWER_BYTES)) == ANSWER_BYTES
        for connection in idle:  # all are gone within a few seconds
            assert is_cut_off(connection)


def test_idle_connections_of_many_addresses_keep_nobody_out(controller: Controller) -> None:
    with contextlib.ExitStack() as stack:
        for address in range(10):
            for _ in range(60):
                source = (f"127.8.0.{address + 1}", 0)
                stack.enter_context(connect(controller.address, source_address=source))
        joins(controller)


_SHORT = """
import contextlib, os, resource, socket, sys, time
from haiprof.agent.reach import Controller, listen
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
controller = Controller(listen("127.0.0.1", 0), b"k" * 32)
controller.start()
print(controller.address[1], flush=True)
sys.stdin.readline()
for _ in range(50):  # what the sampler needs while strangers hold the port
    open("/proc/self/stat").close()
    time.sleep(0.01)
held = []
with contextlib.suppress(OSError):  # and when there are none left for anybody
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
print("full", flush=True)
sys.stdin.readline()
for descriptor in held:
    os.close(descriptor)
print("free", flush=True)
sys.stdin.readline()
controller.stop()
"""


def test_descriptors_are_left_to_the_launcher_and_nothing_is_printed() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _SHORT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    address = ("127.0.0.1", int(process.stdout.readline()))

    def go_on() -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    with contextlib.ExitStack() as stack:
        for number in range(400):
            source = (f"127.7.{number % 40}.1", 0)
            stack.enter_context(connect(address, source_address=source))
        go_on()
        assert process.stdout.readline() == "full\n"
        for _ in range(50):
            stack.enter_context(connect(address))
        time.sleep(0.5)  # in which accept() fails again and again
        go_on()
        assert process.stdout.readline() == "free\n"
    peer = agent(address, KEY)
    peer.connection.close()
    _, errors = process.communicate("\n", timeout=60)
    assert errors == ""
    assert process.returncode == 0


_FLOOD = """
import contextlib, os, socket, sys
kept = []
while True:
    with contextlib.suppress(OSError):
        kept.append(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
        kept[-1].sendall(os.urandom(64) if len(kept) % 2 else b"haiprof")
    if len(kept) > 200:
        kept.pop(0).close()
"""


def test_a_flood_of_connections_is_bounded_and_agents_get_in(controller: Controller) -> None:
    attacker = subprocess.Popen([sys.executable, "-c", _FLOOD, str(controller.address[1])])
    try:
        within(60, lambda: controller._strangers)
        joins(controller, within_s=90)  # it stands in line with the flood, at its own address
    finally:
        attacker.kill()
        attacker.wait()


# -- with the token --------------------------------------------------------------------------------


def test_a_flood_of_messages_is_cut_off(controller: Controller) -> None:
    peer = agent(controller.address, KEY)
    with contextlib.suppress(ConnectionError):
        for _ in range(reach.MESSAGES_PER_S * 4):
            peer.send({"x": 1})
    assert is_cut_off(peer.connection)
    peer.connection.close()
    within(60, lambda: len(controller.agents) == 0)
    assert sum(1 for _ in iter(controller.take, None)) <= reach.MESSAGES_PER_S * 2


@pytest.mark.parametrize("length", [FRAME_LIMIT_BYTES + 1, 0xFFFFFFFF])
def test_a_huge_length_is_not_read(controller: Controller, length: int) -> None:
    peer = agent(controller.address, KEY)
    peer.connection.sendall(LENGTH.pack(length) + b"x" * 1000)
    assert is_cut_off(peer.connection)
    peer.connection.close()


def test_replies_wait_with_the_agents_when_the_launcher_takes_none(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.3 GB in 15 s before: what is kept is bounded, and nothing of it is lost."""
    limit, count, size = 4 << 20, 40, 200_000
    monkeypatch.setattr(reach, "KEPT_BYTES", limit)
    peers = [agent(controller.address, KEY) for _ in range(4)]
    message = b'{"x": "' + b"y" * size + b'"}'

    def send(peer: Peer) -> None:
        for _ in range(count):
            peer.send(message)

    senders = [threading.Thread(target=send, args=(peer,)) for peer in peers]
    for sender in senders:
        sender.start()
    within(60, lambda: controller.queued_bytes > limit)
    time.sleep(0.3)
    assert controller.queued_bytes < limit + len(peers) * (size + FRAME_LIMIT_BYTES)
    taken = 0

    def all_taken() -> bool:
        nonlocal taken
        taken += sum(1 for _ in iter(controller.take, None))
        return taken == len(peers) * count

    within(60, all_taken)
    for sender, peer in zip(senders, peers, strict=True):
        sender.join()
        peer.connection.close()


DEEP = b'{"id": "ASKED", "reply": {"name": "0", "state": "done", "x": ' + b"[" * 900 + b"]" * 900
DEEP += b"}}"
HOSTILE: list[Any] = [
    [], 7, None, {}, b"", b"{", b"\xff\xfe", b"[" * 100_000, DEEP,
    {"id": ["a"], "reply": {"name": "0", "state": "done"}},
    {"id": {"a": 1}, "reply": {"name": "0", "state": "done"}},
    {"id": None, "reply": None}, {"id": True, "reply": [1]},
    {"id": "ASKED", "reply": {"name": ["0"], "state": "done"}},
    {"id": "ASKED", "reply": {"name": "0", "state": ["done"]}},
    {"id": "ASKED", "reply": {"name": "0", "state": {"done": 1}}},
    {"id": "ASKED", "reply": {"name": "0", "state": "done", "reason": ["x"]}},
    {"id": "ASKED", "reply": {"name": "0/../../x", "state": "done"}},
    {"id": "ASKED", "reply": {"name": "٣", "state": "done"}},
    {"id": "../x", "reply": {"name": "1", "state": "done"}},
    {"member": 7}, {"member": []}, {"member": {"name": "../../x", "rank": 1}},
    {"member": {"name": "1", "rank": "x"}}, {"member": {"name": "1", "rank": -1}},
    {"member": {"name": "1", "rank": True}}, {"member": {"name": "1", "rank": 10**30}},
    {"member": {"name": "1", "rank": 1, "host": ["x"]}},
    {"member": {"name": "1", "rank": 1, "host": "x" * 5000}},
    {"member": {"name": "1", "rank": 1, "pid": "1"}}, {"member": {"name": "9" * 99, "rank": 1}},
]  # fmt: skip


def test_hostile_messages_of_an_agent_are_passed_over(controller: Controller, node: Node) -> None:
    node.relay.controller = controller
    asked = node.ask("stacks")
    node.relay.tick()
    files = set(node.run.root.parent.rglob("*"))
    peer = agent(controller.address, KEY)
    for message in HOSTILE:
        text = message if isinstance(message, bytes) else json.dumps(message).encode()
        peer.send(text.replace(b"ASKED", asked.encode()))
    peer.send({"id": asked, "reply": {"name": "5", "state": "done", "more": [1]}})
    node.until(lambda: read_replies(node.run, asked))
    assert set(read_replies(node.run, asked)) == {"5"}
    assert [path.name for path in set(node.run.root.parent.rglob("*")) - files] == ["5.json"]
    assert members(node.run) == []
    peer.connection.close()


HOSTILE_CHANGES: list[dict[str, Any]] = [
    {"id": ["a"]}, {"id": {}}, {"id": "../x"}, {"id": None}, {"kind": ["stacks"]}, {"kind": 7},
    {"arguments": []}, {"arguments": {"count": [1]}}, {"arguments": {"x": "y" * 5000}},
    {"arguments": {str(n): 1 for n in range(100)}}, {"arguments": {"count": 10**40}},
    {"expires_wall_ns": "never"}, {"expires_wall_ns": True}, {"expires_wall_ns": 1e300},
    {"ranks": "all"}, {"ranks": [[0]]}, {"ranks": [True]}, {"ranks": [-1]},
]  # fmt: skip


def test_hostile_requests_are_passed_over(
    listener: socket.socket, uplink: Uplink, node: Node
) -> None:
    """From a controller with the token, and from files in the run directory."""
    node.relay.uplink = uplink
    node.start_rank(0)
    peer = take_agent(listener, KEY)
    good = new_request("echo", {"word": "hi"}, valid_s=600)
    with peer.connection:
        peer.send(b"[" * 50_000)
        post_request(node.run, new_request("echo", {"word": "later"}, valid_s=600))
        for number, change in enumerate(HOSTILE_CHANGES):
            hostile = new_request("echo", {"word": "no"}, valid_s=600).as_json() | change
            peer.send(hostile)
            path = node.run.control_requests / f"0-hostile-{number}.json"
            path.write_text(json.dumps(hostile))
        peer.send(good.as_json())
        heard: list[dict[str, Any]] = []

        def collect() -> None:
            while head := read(peer.connection, LENGTH.size):
                (length,) = LENGTH.unpack(head)
                data = read(peer.connection, length + PROOF_BYTES)
                heard.append(json.loads(data[:length]))

        thread = threading.Thread(target=collect, daemon=True)
        thread.start()
        node.until(lambda: [m for m in heard if m.get("id") == good.id])
        uplink.stop()
        thread.join(30)
    assert {m["id"] for m in heard if "id" in m} == {good.id}
    node.ranks[0].kill()
    node.ranks[0].communicate()


# -- the token file --------------------------------------------------------------------------------


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


TOKEN = f"haiprof-reach-1:{KEY.hex()}\n"


def test_token_file_is_taken(tmp_path: Path) -> None:
    assert read_token(written(tmp_path / "token", TOKEN)) == KEY
    assert read_token(written(tmp_path / "token", TOKEN, 0o400)) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666, 0o610])
def test_token_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UsageError, match="others may") as refused:
        read_token(written(tmp_path / "token", TOKEN, mode))
    assert "chmod 600" in refused.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", KEY.hex(), "t" * 43, f"haiprof-reach-1:{KEY.hex()[:-2]}", TOKEN * 2, TOKEN + "x",
        f"haiprof-reach-2:{KEY.hex()}", f"haiprof-reach-1:{'z' * 64}", TOKEN + " " * 10_000,
        "-----BEGIN OPENSSH PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXktdjEA" * 20,
    ],
)  # fmt: skip
def test_other_secrets_of_mode_600_are_no_token(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="holds no token of haiprof's") as refused:
        read_token(written(tmp_path / "id_ed25519", text))
    assert text.strip()[:20] not in str(refused.value) or len(text.strip()) < 20


def test_token_file_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    real = written(tmp_path / "real", TOKEN)
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for name, reason in [("link", "it is a link"), ("pipe", "regular"), ("folder", "regular")]:
        for take in (read_token, make_token):
            with pytest.raises(UsageError, match=reason):
                take(tmp_path / name)
    (tmp_path / "dangling").symlink_to(tmp_path / "written-elsewhere")
    with pytest.raises(UsageError, match="it is a link"):
        make_token(tmp_path / "dangling")
    assert not (tmp_path / "written-elsewhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make another user's file")
def test_token_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "token", TOKEN)
    os.chown(path, 65534, 65534)
    for take in (read_token, make_token):
        with pytest.raises(UsageError, match="belongs to another user"):
            take(path)
