"""An existing dynolog is driven by its RPC; a fake that answers as the real one does, and badly."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from haiprof.agent.kineto_daemon import TraceRequest
from haiprof.base.errors import UsageError
from haiprof.live import kineto_processes as dynolog
from haiprof.live.kineto_processes import DynologError, KinetoProcess, parse_endpoint, trigger
from haiprof.live.kineto_trace import trace_processes

TRACE = {
    "schemaVersion": 1,
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 9, "tid": 9, "ts": 5.0, "dur": 2},
        {"ph": "X", "cat": "user_annotation", "name": "Optimizer.step#SGD.step", "pid": 9, "tid": 9,
         "ts": 8.0, "dur": 2.0},
    ],
}  # fmt: skip


class FakeDynolog:
    """Length-prefixed JSON over TCP, one connection after the other, as dynolog's own server."""

    def __init__(
        self, known: set[int], raw: bytes | None = None, address: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        self.known, self.raw = known, raw
        self.requests: list[dict[str, Any]] = []
        self.server = socket.create_server(address)
        self.endpoint = self.server.getsockname()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                with connection:
                    (length,) = struct.unpack("=i", connection.recv(4))
                    self.requests.append(json.loads(connection.recv(length)))
                    connection.sendall(self.raw if self.raw is not None else self._answer())

    def _answer(self) -> bytes:
        request = self.requests[-1]
        if request["fn"] != "setKinetOnDemandRequest":
            said = {"getStatus": {"status": 1}, "getVersion": {"version": "0.6.0"}}
            answer = json.dumps(said.get(request["fn"], {"result": True})).encode()
            return struct.pack("=i", len(answer)) + answer
        asked = set(request["pids"])
        matched = sorted(self.known if asked == {0} else asked & self.known)
        chosen = matched[: request.get("process_limit", 3)]
        for pid in chosen:
            keys = dict(line.split("=", 1) for line in request["config"].splitlines())
            log = Path(keys["ACTIVITIES_LOG_FILE"])
            path = log.with_name(f"{log.stem}_{pid}.json")
            path.with_suffix(".tmp").write_text(json.dumps(TRACE))
            path.with_suffix(".tmp").rename(path)
        answer = json.dumps(
            {"processesMatched": matched, "activityProfilersTriggered": chosen,
             "activityProfilersBusy": 0, "eventProfilersTriggered": [], "eventProfilersBusy": 0}
        ).encode()  # fmt: skip
        return struct.pack("=i", len(answer)) + answer

    def close(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        self.thread.join(5)


@contextlib.contextmanager
def dynolog_with(
    known: set[int], raw: bytes | None = None, address: tuple[str, int] = ("127.0.0.1", 0)
) -> Iterator[FakeDynolog]:
    fake = FakeDynolog(known, raw, address)
    try:
        yield fake
    finally:
        fake.close()


def process(rank: int, pid: int) -> KinetoProcess:
    return KinetoProcess(pid=pid, own_pid=pid, address="\0dynolog\0", rank=rank, world_size=8)


def test_all_ranks_of_a_node_are_traced_and_completed(tmp_path: Path) -> None:
    """Eight ranks: dynolog's own limit is three processes."""
    pids = [os.getpid() + place for place in range(8)]
    with dynolog_with(set(pids)) as fake:
        found = trace_processes(
            [process(rank, pid) for rank, pid in enumerate(pids)],
            TraceRequest(endpoint=fake.endpoint, options={"stacks": True}),
            run=None,
            output=tmp_path,
        )
    assert [each.state for each in found.done] == ["done"] * 8
    assert [each.rank for each in found.done] == list(range(8))
    assert fake.requests[0]["fn"] == "setKinetOnDemandRequest"
    assert fake.requests[0]["process_limit"] == 8
    assert "PROFILE_WITH_STACK=true" in fake.requests[0]["config"]
    assert len(list(tmp_path.glob("rank*.pt.trace.json.gz"))) == 8
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")] == []


def test_process_that_dynolog_does_not_know_is_named(tmp_path: Path) -> None:
    pid = os.getpid()
    with dynolog_with({pid}) as fake:
        found = trace_processes(
            [process(0, pid), process(1, pid + 1)],
            TraceRequest(endpoint=fake.endpoint),
            run=None,
            output=tmp_path,
        )
    assert [each.state for each in found.processes] == ["done", "failed"]
    assert "does not know it" in str(found.processes[1].reason)


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "closed the connection early"),
        (struct.pack("=i", 2**31 - 1), "announces an answer of"),
        (struct.pack("=i", -5), "announces an answer of"),
        (struct.pack("=i", 4) + b"nope", "no JSON object"),
        (struct.pack("=i", 2) + b"{}", "names no processes"),
        (struct.pack("=i", 100) + b"{}", "closed the connection early"),
    ],
)
def test_broken_answer_is_one_clear_error(raw: bytes, what: str) -> None:
    with dynolog_with(set(), raw) as fake, pytest.raises(DynologError, match=what):
        trigger(fake.endpoint, "x", job=0, pids=[1])


def test_silent_daemon_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynolog, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(DynologError) as caught:
        trigger(silent.getsockname(), "x", job=0, pids=[1])
    assert "no answer" in str(caught.value)


def test_no_daemon_is_said_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = server.getsockname()
    with pytest.raises(DynologError, match="refused") as caught:
        trigger(endpoint, "x", job=0, pids=[1])
    assert "--enable_ipc_monitor" in caught.value.hint


def test_endpoint_is_host_and_port() -> None:
    assert parse_endpoint("node7") == ("node7", 1778)
    assert parse_endpoint("node7:99") == ("node7", 99)
    assert parse_endpoint("[::1]:1778") == ("::1", 1778)
    for text in ("node7:", "node7:x", ":1778", "node7:70000"):
        with pytest.raises(UsageError):
            parse_endpoint(text)
