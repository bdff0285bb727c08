"""What reads a run directory, requests to a job, and the sockets and repositories beside it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from typing import Any
from unittest import mock

from haiprof.agent import reach as messages
from haiprof.agent.kineto_daemon import REQUEST, KinetoAgent, encode, encode_ours
from haiprof.agent.node_agent import LiveRank as NodeRank
from haiprof.agent.node_agent import Peer, Relay
from haiprof.agent.reach import (
    AGENT,
    MAGIC,
    NONCE_BYTES,
    Handshake,
    prove,
    read_message,
    read_token,
)
from haiprof.agent.step_watch import RankWatch
from haiprof.base.errors import HaiprofError, RunFormatError
from haiprof.base.options import merge_options, options_from_pyproject
from haiprof.cli.output import json_text
from haiprof.cli.stored_answers import Question, print_stored
from haiprof.in_job.commands import Commands, handlers
from haiprof.in_job.windows.driver import plan_request
from haiprof.live.follow import LiveRank
from haiprof.live.kineto_processes import trigger
from haiprof.live.scheduler import read_pod
from haiprof.live.snapshot import _native_stack, _run_spy
from haiprof.live.standstill import RankState, main_stack, merge, odd_ranks, ras_suspects
from haiprof.run_analysis.counter_sources import read_export
from haiprof.run_analysis.remote_runs import _states
from haiprof.run_analysis.run_files import RunFiles, open_run, record_columns
from haiprof.run_analysis.scheduler_ends import scheduler_ends
from haiprof.run_format.control import (
    encode_message,
    new_request,
    open_requests,
    parse_request,
    pending_requests,
    read_members,
    read_object,
    read_replies,
)
from haiprof.run_format.environment import git_head
from haiprof.run_format.kept_answers import read_answer
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, find_runs, read_manifest
from haiprof.run_format.phase_ranges import KEY, PhaseRange, add_phases, pack_ranges, parse_ranges
from haiprof.run_format.raw_traces import complete_parts
from haiprof.run_format.reader import read_lines, read_records
from haiprof.show.run_list import list_view, run_list
from haiprof.show.terminal import SafeConsole
from haiprof.trace_format.find import one_window
from tests.fake_nsys import write_export
from tests.fuzz.scratch import folder, put
from tests.unit.jobs.test_nccl_ras import GONE, ONE_BEHIND, STOPPED, TWO_BEHIND
from tests.unit.jobs.test_nccl_ras import STATES as RAS_STATES
from tests.unit.jobs.test_nccl_ras import as_json as ras_json
from tests.unit.rundir.small_run import fold_small_run, read_all, write_small_run

FILES = (
    "run.json", "ranks/0/rank.json", "ranks/0/phases.rec", "ranks/0/device.rec",
    "ranks/0/events.jsonl", "nodes/node0/agent.json", "nodes/node0/events.jsonl",
    "nodes/node0/host.rec", "nodes/node0/process.rec", "nodes/node0/gpu.rec",
    "ranks/0/folded.rec", "nodes/node0/gpu-folded.rec",
)  # fmt: skip
RUN_TOKENS = (
    b'"version": 1', b'"type": "root"', b'"type": "optimizer"', b'"type": "suspend"',
    b'"type": "trace_window"', b'"type": "record_end"', b'"type": "cost"', b'"tag": 1',
    b'"time_ns": 5', b'"gap_ns": 5', b'"entities": [', b'"record_bytes": 16', b'"i64"', b'"f64"',
    b'"u32"', b'"key": [0]', b'"columns": [', b'"clock": {"wall_ns": 1, "mono_ns": 0}',
)  # fmt: skip


def named(data: bytes, names: Sequence[str]) -> tuple[str, bytes]:
    """Which file an input stands for, by its first line, and the content; any if it names none."""
    first, _, content = data.partition(b"\n")
    name = first.decode("utf-8", "replace")
    return (name, content) if name in names else (names[len(data) % len(names)], data)


@cache
def _run() -> RunPaths:
    return fold_small_run(write_small_run(folder() / "run"))


@cache
def _originals() -> dict[str, bytes]:
    return {name: (_run().root / name).read_bytes() for name in FILES}


def read_run(data: bytes) -> object:
    """A run with one other file in it: the first line says which; everything is asked of it."""
    name, content = named(data, FILES)
    original = _originals()[name]
    path = _run().root / name
    path.write_bytes(content)
    try:
        steps, notes = read_all(_run().root)
    finally:
        path.write_bytes(original)
    return name, steps, len(notes)


@cache
def run_seeds() -> list[bytes]:
    return [name.encode() + b"\n" + content for name, content in _originals().items()]


def read_record_file(data: bytes) -> object:
    """A `.rec` file: header line and records, from the front, the back, and some of them."""
    path = put("host.rec", data)
    found = read_records(path)
    columns = record_columns(found)
    assert all(len(values) == found.count for values in columns.values())
    for first, limit in ((0, 2), (-1, None), (3, 0), (1 << 70, 5)):
        part = read_records(path, first=first, limit=limit)
        assert part.data in found.data
    clock = found.clock
    assert abs(clock.wall_ns - clock.mono_ns) < 1 << 63
    return found.table, len(columns), found.count > 0, bool(found.notes)


@cache
def record_seeds() -> list[bytes]:
    return [data for name, data in _originals().items() if name.endswith(".rec")]


def read_manifest_file(data: bytes) -> object:
    """run.json, as it is read and as a log directory is listed."""
    run = RunPaths(folder() / "logs" / "one")
    put("logs/one/run.json", data)
    assert find_runs(run.root.parent) == [run.root]
    found = read_manifest(run)
    json.dumps(found.environment)
    return sorted(name for name in found.__dataclass_fields__ if getattr(found, name))


@cache
def manifest_seeds() -> list[bytes]:
    return [_originals()["run.json"]]


def follow_lines(data: bytes) -> object:
    """events.jsonl: read whole, by whoever follows a running job, and by the launcher's watch."""
    run = RunPaths(folder() / "followed")
    paths = run.rank(0)
    put("followed/ranks/0/events.jsonl", data)
    put("followed/nodes/node0/events.jsonl", data)
    put("followed/run.json", _originals()["run.json"])
    put("followed/ranks/0/phases.rec", _originals()["ranks/0/phases.rec"])
    lines, notes = read_lines(paths.events)
    files = open_run(run.root)
    for rank in files.ranks:
        rank.names("root"), rank.families()
    LiveRank(0, 0, paths).look(time.time_ns())
    RankWatch(0, 1, paths, 1).read(2)
    one_window([run.traces / "rank0.json"])
    return len({str(line.get("type")) for line in lines}), bool(notes)


@cache
def line_seeds() -> list[bytes]:
    traced = b"".join(
        json.dumps(line).encode() + b"\n"
        for line in (
            {"type": "root", "tag": 1, "name": "Model", "family": 0},
            {"type": "trace_begin", "time_ns": 5}, {"type": "trace_window", "time_ns": 9},
            {"type": "suspend", "gap_ns": 5}, {"type": "record_end", "reason": "exit"},
            {"type": "trace_written", "stem": "x", "part": {"attempt": 0, "window": 1}},
        )
    )  # fmt: skip
    return [*(data for name, data in _originals().items() if name.endswith(".jsonl")), traced]


def follow_spans(data: bytes) -> object:
    """phases.rec while the job writes it: as `ls --live` and the launcher's watch read it."""
    run = RunPaths(folder() / "spans")
    put("spans/ranks/0/phases.rec", data)
    now = LiveRank(0, 0, run.rank(0)).look(time.time_ns())
    watch = RankWatch(0, 1, run.rank(0), 1)
    watch.read(2)
    watch.slower(0.2)
    return now.step is None, watch.count > 0


@cache
def span_seeds() -> list[bytes]:
    header, _, body = _originals()["ranks/0/phases.rec"].partition(b"\n")
    return [header + b"\n" + body * times for times in (1, 20)]


_KINDS = ("status", "trace", "stacks", "collectives")


class _Recorder:
    """What planning a trace asks of a rank whose recording has ended."""

    closed = True
    step_ns = 5


def answer_requests(data: bytes) -> object:
    """A request: from a packet, from a file, and at the rank that is asked."""
    message = read_object(data)
    run = RunPaths(folder() / "asked-run")
    for path in (
        run.control_requests / "1-a.json",
        run.control_reply("1-a") / "0.json",
        run.control_members / "3.json",
    ):
        put(str(path.relative_to(folder())), data)
    requests = open_requests(run)
    try:
        pending_requests(requests, set())
    finally:
        os.close(requests)
    replies = read_replies(run, "1-a")
    read_members(run)
    noted: list[dict[str, Any]] = []
    answering = handlers(lambda: None, lambda: {"step": 1})
    rank: Any = _Recorder()
    answering["trace"] = lambda name, given: plan_request(name, given, recorder=rank, state=rank)
    Commands(run, answering, noted.append)._answer(data)
    if message is None:
        raise RunFormatError("no message")
    request = parse_request(message, "packet")
    assert parse_request(request.as_json(), "packet") == request
    assert read_object(encode_message(request.as_json())) is not None
    return request.kind in _KINDS, request.ranks is None, sorted(replies)


@cache
def request_seeds() -> list[bytes]:
    given = {"count": 5, "time_s": 1.5, "stacks": True, "first": 100, "window": 0, "ahead_s": 1}
    return [
        json.dumps(new_request(kind, given, valid_s=1e6, ranks=ranks).as_json()).encode()
        for kind, ranks in zip(_KINDS, (None, (0, 1), (), (3,)), strict=True)
    ]


def take_replies(data: bytes) -> object:
    """What ranks of this node send to their launcher, and stacks as they answer them."""
    message = read_object(data)
    if message is None:
        raise RunFormatError("no message")
    relay = Relay(RunPaths(folder() / "relayed"), "node0")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with closing(ours), closing(theirs):
        peer = Peer(ours, 1)
        relay._asked["1-a"] = new_request("stacks", valid_s=1)
        relay._take(peer, message)
        named = Peer(ours, 1, NodeRank(3, 1, relay.run.rank(3)))
        relay._take(named, message)
        relay.peers = [peer, named]
        relay.live_ranks()
    threads = message.get("threads")
    stack = main_stack(threads) if isinstance(threads, list) else None
    stacks = {} if stack is None else {0: stack, 1: (), 2: stack}
    json.dumps(merge(stacks).as_json())
    has_steps = named.member is not None and named.member.reported_steps is not None
    return peer.member is not None, has_steps, odd_ranks(stacks)


@cache
def reply_seeds() -> list[bytes]:
    frames = [["train.py", 5, "step"], ["/lib/python3/x.py", 7, "recv"]]
    messages = (
        {"hello": {"rank": 3, "attempt": 1, "pid": 5}},
        {"id": "steps", "step": 100, "state": "done"},
        {"id": "1-a", "state": "done", "threads": [{"name": "x", "main": True, "frames": frames}]},
    )
    return [json.dumps(message).encode() for message in messages]


def answer_kineto(data: bytes) -> object:
    """Datagrams to the agent that stands in for dynolog: several, each behind its length."""
    agent = KinetoAgent(str(folder() / "kineto" / "sock"))
    senders = (str(folder() / "kineto" / "client"), b"\0abstract")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as agent._socket:
        answered = [
            agent._answer(7, datagram, sender)
            for datagram in data.split(b"<next>")[:20]
            for sender in senders
        ]
    return answered[:8], len(agent.pending.clients), len(agent.pending.requests)


@cache
def kineto_seeds() -> list[bytes]:
    ask = encode(REQUEST, struct.pack("=iiqii", 3, 2, 5, 7, 1))
    trace = {"do": "trace", "id": "a", "text": "X=1", "pids": [7], "expires_wall_ns": 1 << 62}
    ours = [encode_ours(q) for q in (trace, {"do": "clients"}, {"do": "state", "id": "a"})]
    context = encode(b"ctxt", bytes(16))
    return [ask, context, *ours, b"<next>".join([ours[0], ask, ask, ours[2]])]


class _Answers:
    """A connection whose other side sends these bytes and closes."""

    def __init__(self, data: bytes) -> None:
        self._left = data

    def __enter__(self) -> _Answers:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def sendall(self, _: bytes) -> None:
        pass

    def settimeout(self, _: float) -> None:
        pass

    def close(self) -> None:
        pass

    def recv(self, count: int) -> bytes:
        part, self._left = self._left[:count], self._left[count:]
        return part


def answers(data: bytes) -> Any:
    """In place of `socket.create_connection`."""
    return mock.patch("socket.create_connection", return_value=_Answers(data))


def ask_dynolog(data: bytes) -> object:
    """What a dynolog daemon answers; its length is set right."""
    said = len(data).to_bytes(4, "little") + data
    with answers(data if data[:1] == b"\0" else said):
        matched, triggered = trigger(("127.0.0.1", 1), "X=1", job=0, pids=[1])
    return len(matched), len(triggered)


@cache
def dynolog_seeds() -> list[bytes]:
    return [b'{"processesMatched": [1, 2], "activityProfilersTriggered": [1]}', b"\0\0\0\0{}"]


_KEY = b"k" * 32


def take_reach(data: bytes) -> object:
    """Bytes of a stranger, and messages of an agent or a controller that has the token."""
    loop = _loop()
    return loop.run_until_complete(_as_agent(data)), _as_controller(data), _token(data)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


def _stream(data: bytes) -> asyncio.StreamReader:
    stream = asyncio.StreamReader()
    stream.feed_data(data)
    stream.feed_eof()
    return stream


async def _as_agent(data: bytes) -> object:
    """What a controller takes: from nobody in particular, then from an agent."""
    said: list[bytes] = []
    with contextlib.suppress(EOFError, ValueError):
        await prove(_stream(data), said.append, _KEY)
        raise AssertionError("a stranger has proven to hold the token")
    assert len(said) <= 1
    nonces = Handshake(key=_KEY, agent_nonce=b"a" * 32, controller_nonce=b"c" * 32)
    signer, incoming = nonces.signer(AGENT), nonces.signer(AGENT)
    sealed = [messages.seal(message, signer) for message in data.split(b"<next>")[:50]]
    stream = _stream(b"".join(sealed) + data)
    heard: list[bytes] = []
    with contextlib.suppress(EOFError, ValueError):
        while True:
            heard.append(await read_message(stream, incoming))
    relay = Relay(RunPaths(folder() / "elsewhere"), "node0")
    shutil.rmtree(relay.run.root, ignore_errors=True)
    relay.run.control_reply("1-a").mkdir(parents=True)
    relay._asked["1-a"] = new_request("stacks", valid_s=1)
    for message in heard:
        relay._note_agent(read_object(message) or {})
    found = [path.name for path in relay.run.root.rglob("*.json")]
    assert all(re.fullmatch(r"[0-9.]{1,12}\.json", name) for name in found)
    return len(heard) > 1, len(said), len(found)


def _as_controller(data: bytes) -> object:
    """What an agent takes: a request."""
    try:
        request = parse_request(read_object(data), "controller")
    except RunFormatError:
        return None
    return request.kind in _KINDS


def _token(data: bytes) -> object:
    path = put("token", data)
    path.chmod(0o600)
    with contextlib.suppress(ValueError):
        messages.parse_address(data.decode("utf-8", "replace"))
    with contextlib.suppress(HaiprofError):
        return len(read_token(path))
    return None


@cache
def reach_seeds() -> list[bytes]:
    request = new_request("trace", {"count": 5}, valid_s=1e6).as_json()
    messages: tuple[dict[str, Any], ...] = (
        request,
        {"id": "1-a", "reply": {"name": "3", "rank": 3, "state": "done"}},
        {"member": {"name": "3.1", "rank": 3, "host": "node1", "pid": 5}},
    )
    texts = [json.dumps(message).encode() for message in messages]
    token = b"haiprof-reach-1:" + b"6b" * 32 + b"\n"
    hello = MAGIC + b"a" * NONCE_BYTES
    return [*texts, b"<next>".join(texts), hello, b"[::1]:5000", token]


def read_nsys(data: bytes) -> object:
    """An export of Nsight Systems: an SQLite file."""
    samples, gpus = read_export(put("gpu.sqlite", data))
    return sorted(samples["metric"].unique()), len(gpus), samples.height > 0


@cache
def nsys_seeds() -> list[bytes]:
    path = folder() / "seed.sqlite"
    samples = [(t, 0, name, t % 100) for t in range(0, 400, 100)
               for name in ("SMs Active [Throughput %]", "NVLink RX Throughput")]  # fmt: skip
    write_export(path, samples, epoch_ns=1_700_000_000_000_000_000)
    return [path.read_bytes()]


def read_sidecar(data: bytes) -> object:
    """What a rank put down beside its raw trace, and what becomes of the trace by it."""
    run = RunPaths(folder() / "parts-run")
    put(f"parts-run/traces/.parts/{_STEM}.part.json", data)
    (part,) = complete_parts(run)
    content = part.sidecar_content()
    ranges = parse_ranges(content.get(KEY), since_ns=content.get("start_wall_ns"))
    pieces = add_phases(io.BytesIO(_RAW), ranges=ranges, pid=1, tid=1)
    added = json.loads(b"".join(pieces))["traceEvents"]
    return len(content), len(added)


_RAW = (
    b'{"baseTimeNanoseconds": 1700000000000000000, "traceEvents": [{"ph": "X", "ts": 1, "dur": 2}]}'
)
_STEM = "rank0_node0_7.1700000000000000000"


@cache
def sidecar_seeds() -> list[bytes]:
    plain = {"stem": _STEM, "rank": 0, "attempt": 0, "window": 1}
    passes = [PhaseRange(name="forward", start_wall_ns=1_700_000_000_000_001_000, duration_ns=7)]
    since_ns = 1_700_000_000_000_000_000
    packed = {KEY: pack_ranges(passes, since_ns=since_ns), "start_wall_ns": since_ns}
    return [json.dumps(each).encode() for each in (plain, plain | packed)]


def read_kept(data: bytes) -> object:
    """An answer kept in a run, valid for it: an entry of the list, an output, what was put away."""
    run, kept = _kept_run()
    for name in ("list", "verdict", "put"):
        run.answer(name).write_bytes(kept["fingerprint"].encode().join(_AROUND) + data + b"}")
        run.answer(name).chmod(0o600)
    entries = run_list(run.root.parent)
    json_text({"runs": entries})
    shown = io.StringIO()
    SafeConsole(file=shown, width=100).print(list_view(run.root, entries))
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        question = Question(run=run, name="verdict", fingerprint=kept["fingerprint"], saves=False)
        print_stored(question.load() or {"stdout": "", "stderr": ""})
    assert not _STEERS.search(shown.getvalue())
    states = _states(read_answer(run, "put", valid_for=kept["fingerprint"]))
    return entries[0].state, entries[0].exit_status, len(states), question.load() is None


_AROUND = (b'{"fingerprint": "', b'", "answer": ')
_STEERS = re.compile("\x1b[^\\[]|[\x07\x80-\x9f\u202a-\u202e]")
"""What a terminal obeys, or turns the direction of writing; colours are neither."""


@cache
def _kept_run() -> tuple[RunPaths, dict[str, Any]]:
    """A run that has ended, and what a list kept in it."""
    run = write_small_run(folder() / "kept" / "one")
    content = json.loads(run.manifest.read_text())
    run.manifest.write_text(json.dumps({**content, "start_wall_ns": 5, "end_wall_ns": 10**9}))
    run_list(run.root.parent)
    return run, json.loads(run.answer("list").read_text())


@cache
def kept_seeds() -> list[bytes]:
    outputs = {"stdout": "\x1b[1mverdict\x1b[0m\n", "stderr": ""}
    put_files = {"files": {"run.json": [120, 1_700_000_000_000_000_000]}}
    seeds = [_kept_run()[1]["answer"], outputs, put_files, {**outputs, **put_files}]
    return [json.dumps(seed).encode() for seed in seeds]


def read_options(data: bytes) -> object:
    """`[tool.haiprof]` of a repository's pyproject.toml."""
    found = options_from_pyproject(put("pyproject.toml", data))
    merge_options(found)
    return sorted(found)


@cache
def option_seeds() -> list[bytes]:
    return [
        b'[tool.haiprof]\ntime = 120\nwarmup = 1.5\nrecorder = ["basic", "gpu"]\n'
        b'trace = true\nname = "x"\nsteps = "100:105"\nslow-limit = "20%"\nhang-limit = "5x"\n'
        b"[tool.haiprof.interval]\nhost = 0.5\n[project]\nname = 'haiprof'\n",
        b'tool.haiprof = {log-dir = "x", quiet = true}\n',
    ]


def read_git(data: bytes) -> object:
    """The files of git in the folder that a job was started in: HEAD, packed-refs, a worktree's."""
    parts = [*data.split(b"<next>"), b"", b"", b""]
    for name, content in zip(("HEAD", "packed-refs", "commondir"), parts, strict=False):
        put(f"repository/.git/{name}", content)
    put("repository/worktree/.git", parts[3])
    found = git_head(str(folder() / "repository"))
    git_head(str(folder() / "repository" / "worktree"))
    json.dumps(found)
    return sorted(found)


@cache
def git_seeds() -> list[bytes]:
    commit = b"0123456789abcdef0123456789abcdef01234567"
    packed = b"# pack-refs with: peeled\n" + commit + b" refs/heads/main\n^" + commit + b"\n"
    return [b"ref: refs/heads/main\n<next>" + packed + b"<next><next>gitdir: ../.git", commit]


def read_py_spy(data: bytes) -> object:
    """py-spy's JSON on a process that runs somebody's program."""
    text = data.decode("utf-8", "replace")
    state = RankState(
        rank=0, host=socket.gethostname(), pid=1, answered=False, process_state="S", stack=None,
        collectives={}, before={},
    )  # fmt: skip
    done = subprocess.CompletedProcess(["py-spy"], 0, stdout=text, stderr="")
    with mock.patch("subprocess.run", return_value=done), \
            mock.patch("haiprof.live.snapshot.is_mine", return_value=True):  # fmt: skip
        return isinstance(_run_spy("py-spy", 1), str), isinstance(
            _native_stack("py-spy", state), str
        )


def read_scheduler_answer(data: bytes) -> object:
    """A pod as Kubernetes' API tells of it, and a record as another haiprof kept it in the run."""
    text = data.decode("utf-8", "replace")
    manifest = Manifest(
        haiprof_version="", name="a", command=[], start_wall_ns=1_700_000_000 * 10**9
    )
    pod = {"name": "train-0", "namespace": "ml", "uid": None, "host": "node0"}
    found = read_pod(text, pod, manifest)
    root = put("scheduled/scheduler.json", data).parent
    run = RunFiles(paths=RunPaths(root), manifest=None, ranks=(), nodes=(), hook_failures=(),
                   notes=())  # fmt: skip
    ends = scheduler_ends(run)
    assert not any("\x1b" in line for end in ends for line in (end.what, *end.lines))
    return isinstance(found, dict), [end.cause for end in ends]


@cache
def scheduler_seeds() -> list[bytes]:
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "Killed",
                            "startedAt": "2023-11-14T22:13:10Z",
                            "finishedAt": "2023-11-14T22:23:10Z"}}  # fmt: skip
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "x"}]
    containers = [{"name": "train", "state": ended, "lastState": {}}]
    status = {"phase": "Failed", "reason": "Evicted", "message": "low on memory",
              "conditions": conditions, "containerStatuses": containers}  # fmt: skip
    pod = {"metadata": {"uid": "7"}, "spec": {"nodeName": "n"}, "status": status}
    row = {"JobIDRaw": "12", "State": "CANCELLED by 7", "ExitCode": "0:9", "End": "1700000900",
           "FailedNode": "n1", "ReqMem": "16G"}  # fmt: skip
    slurm = {"job": "12", "sacct": row, "scontrol": {"JobState": "NODE_FAIL"},
             "steps": [{**row, "State": "OUT_OF_MEMORY"}],
             "nodes": [{"name": "n1", "state": "DOWN", "reason": "x"}]}  # fmt: skip
    ended_pod = {"host": "h", "name": "p", "container": {"exitCode": 1, "ended_s": 5}}
    kept = {"slurm": slurm, "pods": [ended_pod]}
    return [json.dumps(each).encode() for each in (pod, kept)]


def read_ras(data: bytes) -> object:
    """NCCL's answer about a job, which any process on that port may have given."""
    found = ras_suspects(RAS_STATES, ("", 0), ask=lambda _: data.decode("utf-8", "replace"),
                         between_s=0)  # fmt: skip
    return len(found), {suspect.reason[:20] for suspect in found} == set()


@cache
def ras_seeds() -> list[bytes]:
    return [each.encode() for each in (
        ONE_BEHIND, TWO_BEHIND, STOPPED, ras_json([7, 7, 6, 7]), ras_json([7, 7, 7], [GONE]),
    )]  # fmt: skip


@cache
def py_spy_seeds() -> list[bytes]:
    frame = {"name": "step", "filename": "/x/train.py", "short_filename": "train.py", "line": 7}
    threads = [{"thread_name": name, "frames": [frame, {**frame, "line": 0}]}
               for name in ("MainThread", "other")]  # fmt: skip
    return [json.dumps(threads).encode()]
