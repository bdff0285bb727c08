"""Slurm and Kubernetes asked how a run ended: a real Slurm, stubs that print what its manuals show,
and a local API server with a certificate of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from haiprof.api.analyzer import Analyzer
from haiprof.live.scheduler import ask_schedulers
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import find_runs, read_manifest, write_manifest
from haiprof.run_format.writer import write_json
from tests.one_slurm import one_machine_slurm
from tests.process.jobs import environment, run_command
from tests.process.live import within
from tests.process.test_trainjob_status import Pod
from tests.unit.analysis.recorded import CLOCK, write_run

S = 1_000_000_000
START_S = CLOCK.wall_ns // S
LIMIT_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> RunPaths:
    """Of job 12 on two nodes, without an end."""
    found = write_run(tmp_path / "logs/train-1")
    known = {"slurm_job": "12", "slurm_restart": "0", "slurm_cluster": "big",
             "slurm_nodes": "n[1-2]", "slurm_name": "train"}  # fmt: skip
    manifest = replace(read_manifest(found), environment=known, start_wall_ns=START_S * S)
    write_manifest(found, replace(manifest, end_wall_ns=None, exit_status=None))
    return found


# -- Slurm's commands, played ----------------------------------------------------------------------

HEADER = (
    "JobIDRaw|Cluster|State|ExitCode|Start|End|Reason|NodeList|FailedNode|Timelimit|ReqMem|MaxRSS"
)
SHOWN = (
    "JobId=12 JobName=train UserId=me(1000) GroupId=me(1000) MCS_label=N/A Priority=1 "
    "JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts={restarts} BatchFlag=1 "
    "Reboot=0 ExitCode=0:15 RunTime=00:10:00 TimeLimit=00:10:00 StartTime={start} EndTime={end} "
    "NodeList=n[1-2] BatchHost=n1 Command=/home/me/my job.sh WorkDir=/home/me"
)
NODE = "NodeName=n{n} Arch=x86_64 OS=Linux 6.1 #1 SMP State={state} ThreadsPerCore=1 {reason}"


def row(number: str, state: str, *, start: int = 0, end: str = "600", more: str = "") -> str:
    end = str(START_S + int(end)) if end.isdigit() else end
    return f"{number}|big|{state}|0:0|{START_S + start}|{end}|None|n[1-2]|None|00:10:00|16G|{more}"


def shown(state: str, *, start: int = 0, end: int = 600, restarts: int = 0) -> str:
    return SHOWN.format(
        state=state, reason="None", restarts=restarts, start=START_S + start, end=START_S + end
    )


def commands(folder: Path, **said: str) -> dict[str, str]:
    """An environment in which `scontrol` and `sacct` print that; without a text they fail."""
    folder.mkdir(exist_ok=True)
    for name, text in said.items():
        (folder / f"{name}.txt").write_text(text)
    for name in ("scontrol", "sacct"):
        path = folder / name
        path.write_text(
            f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $0 $*" >> {folder}/asked\n'
            f'f={folder}/{name}; case "$*" in *"show node"*) f={folder}/node;; esac\n'
            "test -f $f.sh && . $f.sh\n"
            f'cat $f.txt 2>/dev/null || {{ echo "{name}: error: no such job" >&2; exit 1; }}\n'
        )
        path.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}


def kept(run: RunPaths) -> dict[str, Any]:
    return json.loads(run.scheduler.read_text()) if run.scheduler.exists() else {}


def headline(run: RunPaths) -> str:
    return next((death.headline for death in Analyzer(run.root).deaths()), "")


def test_accounting_and_controller_are_asked_once_and_kept(run: RunPaths, tmp_path: Path) -> None:
    rows = [
        HEADER,
        row("12", "NODE_FAIL"),
        row("12.batch", "CANCELLED"),
        row("12.extern", "COMPLETED"),
    ]
    nodes = [NODE.format(n=1, state="IDLE", reason=""),
             NODE.format(n=2, state="DOWN*+DRAIN",
                         reason=f"Reason=Not responding [slurm@{START_S + 500}]")]  # fmt: skip
    environ = commands(tmp_path / "bin", sacct="\n".join(rows), scontrol=shown("NODE_FAIL"),
                       node="\n".join(nodes))  # fmt: skip
    assert ask_schedulers(run, environ=environ) == []
    asked = (tmp_path / "bin/asked").read_text()
    assert all(line.startswith("%s ") for line in asked.splitlines())
    assert "--jobs=12 --clusters=big" in asked
    (death,) = Analyzer(run.root).deaths()
    assert (death.cause, death.died_ns) == ("node_lost", (START_S + 600) * S)
    assert death.scheduler[-1] == "Slurm: node n2 is DOWN*+DRAIN: Not responding"
    assert ask_schedulers(run, environ=environ) == []
    assert (tmp_path / "bin/asked").read_text() == asked


@pytest.mark.parametrize(
    ("said", "told"),
    [
        # the start of a requeued job, told from its later one
        ({"sacct": [row("12", "PREEMPTED"), row("12", "TIMEOUT", start=700, end="1300")],
          "scontrol": shown("TIMEOUT", start=700, end=1300, restarts=1)},
         "another job had precedence"),
        ({"scontrol": shown("RUNNING", start=700, end=9000, restarts=1)}, "Slurm requeued it"),
        ({"sacct": [row("12", "FAILED"), row("12.0", "OUT_OF_MEMORY", start=3, more="15.9G")]},
         "Slurm's memory limit was reached, 16G asked for"),
    ],
)  # fmt: skip
def test_end_is_told_by_what_slurm_says(
    run: RunPaths, tmp_path: Path, said: dict[str, Any], told: str
) -> None:
    rows = {"sacct": "\n".join([HEADER, *said["sacct"]])} if "sacct" in said else {}
    ask_schedulers(run, environ=commands(tmp_path / "bin", **{**said, **rows}))
    assert told in headline(run)


def test_accounting_of_an_older_slurm_has_no_failed_node(run: RunPaths, tmp_path: Path) -> None:
    environ = commands(tmp_path / "bin")
    rows = [HEADER, row("12", "NODE_FAIL")]
    old = [[word for at, word in enumerate(line.split("|")) if at != 8] for line in map(str, rows)]
    (tmp_path / "bin/old.txt").write_text("\n".join(map("|".join, old)))
    (tmp_path / "bin/sacct.sh").write_text(  # as Slurm 22.05 answers
        'case "$*" in *FailedNode*) echo "sacct: error: Invalid field requested: \\"FailedNode\\"" '
        f">&2; exit 1;; esac; cat {tmp_path}/bin/old.txt; exit 0"
    )
    ask_schedulers(run, environ=environ)
    assert "Slurm lost a node of the job" in headline(run)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({}, "scontrol: scontrol: error: no such job; sacct: sacct: error: no such job"),
        ({"scontrol": shown("RUNNING")}, "it still runs there"),
        ({"scontrol": shown("TIMEOUT", start=-9000, end=-8000)}, "not this run's"),
        ({"scontrol": shown("TIMEOUT").replace("n[1-2]", "gpu[1-2]")}, "not this run's"),
        ({"scontrol": shown("TIMEOUT", start=700)}, "not this run's"),
        ({"scontrol": "JobId=120" + shown("TIMEOUT")[8:]}, "not this run's"),
        ({"sacct": f"{HEADER}\n{row('12', 'RUNNING', end='Unknown')}"}, "it still runs there"),
        ({"sacct": f"{HEADER}\n12|big|\n\n"}, "error: no such job"),
        ({"sacct": "\x00\xff not a table"}, "error: no such job"),
    ],
)  # fmt: skip
def test_what_is_not_final_or_not_of_this_run_is_not_kept(
    run: RunPaths, tmp_path: Path, said: Mapping[str, str], why: str
) -> None:
    (line,) = ask_schedulers(run, environ=commands(tmp_path / "bin", **said))
    assert why in line
    assert kept(run) == {}
    assert Analyzer(run.root).deaths() == []


def test_command_that_hangs_is_waited_for_a_bounded_time(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haiprof.live.scheduler.ASK_S", 0.2)
    environ = commands(tmp_path / "bin", sacct="\n".join([HEADER, row("12", "TIMEOUT")]))
    (tmp_path / "bin/scontrol.sh").write_text("exec sleep 60")
    began = time.monotonic()
    assert ask_schedulers(run, environ=environ) == []
    assert time.monotonic() - began < 30
    assert "time limit was reached" in headline(run)


def test_machine_without_slurm_says_so_and_shows_the_rest(
    run: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_command(["verdict", str(run.root)], folder=tmp_path)
    assert "Slurm about job 12: scontrol: No such file or directory" in done.stderr
    assert done.stdout


@pytest.mark.parametrize(
    ("change", "variables"),
    [({"end_wall_ns": START_S * S + 5, "exit_status": 0}, {}),
     ({"environment": {"slurm_job": "12; rm -rf /"}}, {}),
     ({"environment": {"slurm_job": "--help"}}, {}),
     ({"environment": {}}, {}),
     ({}, {"SLURM_JOB_ID": "12"})],
    ids=["ended well", "hostile", "an option", "no job", "from the job itself"],
)  # fmt: skip
def test_run_that_ended_well_or_names_no_job_is_not_asked_about(
    run: RunPaths, tmp_path: Path, change: Mapping[str, Any], variables: dict[str, str]
) -> None:
    write_manifest(run, replace(read_manifest(run), **change))
    environ = commands(tmp_path / "bin", scontrol=shown("TIMEOUT")) | variables
    ask_schedulers(run, environ=environ)
    assert not (tmp_path / "bin/asked").exists()


def test_secret_in_a_nodes_reason_is_not_kept(run: RunPaths, tmp_path: Path) -> None:
    token = "ghp_" + "a1B2" * 9
    node = NODE.format(n=2, state="DRAIN", reason=f"Reason=see token={token} [root@{START_S + 9}]")
    environ = commands(tmp_path / "bin", scontrol=shown("NODE_FAIL"), node=node)
    ask_schedulers(run, environ=environ)
    assert kept(run)["slurm"]["nodes"]
    assert token not in run.scheduler.read_text()


# -- a real Slurm ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_end_that_no_process_of_the_job_survived_is_asked_of_slurm(tmp_path: Path) -> None:
    for state, act in _ENDS.items():
        logs = tmp_path / state
        number = submit(tmp_path, logs, "--no-requeue")
        act(number)
        within(LIMIT_S, lambda: state in ask("scontrol", "show", "job", number), state)  # noqa: B023
        run = RunPaths(find_runs(logs)[0])
        within(LIMIT_S, lambda: not mine(tmp_path), "the end of its processes")
        assert "node_lost" not in [death.cause for death in Analyzer(run.root).deaths()]
        if state == "CANCELLED":
            assert read_manifest(run).end_wall_ns is None
            assert Analyzer(run.root).deaths() == []
        within(LIMIT_S, lambda: not ask_schedulers(run, environ=environment({})), "an answer")  # noqa: B023
        (death,) = Analyzer(run.root).deaths()
        assert death.cause == {"NODE_FAIL": "node_lost", "CANCELLED": "cancelled"}[state]
        assert death.scheduler[0].startswith(f"Slurm: job {number} {state}")
        if state == "NODE_FAIL":
            assert "lost its power" in death.scheduler[-1]


@pytest.mark.proof
@pytest.mark.usefixtures("slurm")
def test_time_limit_of_a_job_that_was_killed_whole_is_asked_of_slurm(tmp_path: Path) -> None:
    number = submit(tmp_path, tmp_path / "logs", "--time=1", "--no-requeue", deaf=True)
    within(200, lambda: "JobState=TIMEOUT" in ask("scontrol", "show", "job", number), "TIMEOUT")
    run = RunPaths(find_runs(tmp_path / "logs")[0])
    within(LIMIT_S, lambda: not mine(tmp_path), "the end of its processes")
    within(LIMIT_S, lambda: not ask_schedulers(run, environ=environment({})), "an answer")
    (death,) = Analyzer(run.root).deaths()
    assert (death.cause, death.certain) == ("time_limit", True)


@pytest.mark.proof
def test_memory_limit_of_slurm_is_told_by_its_record_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, logs, script = (tmp_path / name for name in ("slurm", "logs", "count.py"))
    folder.mkdir()
    script.write_text("print('ready', flush=True)\nheld = bytes(b'x') * (1 << 30)\n")
    with one_machine_slurm(folder, limits_memory=True) as conf:
        monkeypatch.setenv("SLURM_CONF", str(conf))
        haiprof = f"exec {sys.executable} -m haiprof --quiet --log-dir {logs} {script}"
        options = ("--parsable", "--mem=300M", "--no-requeue", f"--chdir={tmp_path}")
        number = ask("sbatch", *options, "--wrap", haiprof)
        over = "JobState=OUT_OF_MEMORY"
        within(LIMIT_S, lambda: over in ask("scontrol", "show", "job", number), over)
        run = RunPaths(find_runs(logs)[0])
        within(LIMIT_S, lambda: not ask_schedulers(run, environ=environment({})), "an answer")
    (death,) = Analyzer(run.root).deaths()
    assert death.cause == "out_of_memory"
    assert death.scheduler == (f"Slurm: job {number} OUT_OF_MEMORY, exit 0:125, OutOfMemory",)


def ask(*words: str) -> str:
    done = subprocess.run(words, env=environment({}), check=True, capture_output=True, text=True)
    return done.stdout.strip()


def submit(folder: Path, logs: Path, *options: str, deaf: bool = False) -> str:
    """A job that counts for minutes; returns its number once it prints."""
    out, script = Path(f"{logs}.out"), folder / "count.py"
    ignore = "for each in (1, 2, 3, 15): signal.signal(each, signal.SIG_IGN)\n" if deaf else ""
    script.write_text(
        f"import signal, sys, time\n{ignore}print('ready', flush=True)\ntime.sleep(300)\n"
    )
    haiprof = f"exec {sys.executable} -m haiprof --quiet --log-dir {logs} {script}"
    number = ask(
        "sbatch", "--parsable", *options, f"--chdir={folder}", "-o", str(out), "--wrap", haiprof
    )
    within(LIMIT_S, lambda: out.exists() and "ready" in out.read_text(), "its first line")
    return number


def mine(folder: Path) -> list[int]:
    """Processes of jobs that were submitted there."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path("/proc", name, "cmdline").read_bytes()
        except OSError:
            continue
        if f"{folder}/count.py".encode() in words and int(name) != os.getpid():
            found.append(int(name))
    return found


def _lose_node(number: str) -> None:
    node = ask("squeue", "-h", "-o", "%N", "-j", number)
    for state in ("down", "drain"):  # a node that is up comes back from the first
        ask("scontrol", "update", f"nodename={node}", f"state={state}", "reason=lost its power")


def _cancel_and_kill(number: str) -> None:
    """As a job that does not end at SIGTERM, but without the half minute that Slurm waits."""
    folder = Path(ask("scontrol", "show", "job", number).partition("WorkDir=")[2].split()[0])
    processes = mine(folder)
    for each in (signal.SIGSTOP, signal.SIGKILL):
        for pid in processes:
            os.kill(pid, each)
        if each is signal.SIGSTOP:
            ask("scancel", number)


_ENDS: dict[str, Callable[[str], object]] = {
    "NODE_FAIL": _lose_node, "CANCELLED": _cancel_and_kill,
}  # fmt: skip


# -- Kubernetes' API server, played ----------------------------------------------------------------

UID = "0f9c2b1e-8f5d-4f6b-9c0d-1a2b3c4d5e6f"


def stamp(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(START_S + seconds))


def ended_container(reason: str, code: int, *, start: int = -5, end: int = 600) -> dict[str, Any]:
    return {"terminated": {"exitCode": code, "reason": reason, "startedAt": stamp(start),
                           "finishedAt": stamp(end), "containerID": "containerd://1"}}  # fmt: skip


def pod_status(**status: Any) -> dict[str, Any]:
    meta = {"name": "train-0", "namespace": "ml", "uid": UID}
    return {"kind": "Pod", "metadata": meta, "spec": {"nodeName": "gke-1"}, "status": status}


def container(state: object = None, last: object = None, name: str = "train") -> dict[str, Any]:
    return {"name": name, "state": state or {}, "lastState": last or {}, "restartCount": 1}


OOM = pod_status(phase="Running", containerStatuses=[
    container({"running": {"startedAt": stamp(700)}}, ended_container("OOMKilled", 137)),
    container(ended_container("Completed", 0), name="sidecar")])  # fmt: skip
EVICTED = pod_status(
    phase="Failed", reason="Evicted", message="The node was low on resource: memory."
)


@pytest.fixture
def pod(run: RunPaths) -> RunPaths:
    """The same run in a pod."""
    known = {"kubernetes": True}
    write_manifest(run, replace(read_manifest(run), environment=known))
    node = run.node("train-0")
    node.root.mkdir(parents=True)
    named = {"name": "train-0", "namespace": "ml", "uid": UID}
    write_json(node.agent, {"pod": named}, below=run.root)
    long_ago = START_S
    for path in (node.agent, node.root):
        os.utime(path, (long_ago, long_ago))
    return run


@contextmanager
def api_server(folder: Path, answer: object, status: int = 200, *, hangs: bool = False,
               ) -> Iterator[tuple[Path, dict[str, str], list[str]]]:  # fmt: skip
    """Root of a container with a service account, its variables, and what the server was asked."""
    import ssl

    identity = Pod(folder)
    account = folder / "root/var/run/secrets/kubernetes.io/serviceaccount"
    account.mkdir(parents=True)
    (account / "ca.crt").write_bytes((folder / "ca.crt").read_bytes())
    (account / "token").write_text("a-token\n")
    asked: list[str] = []
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.path} {self.headers['Authorization']}")
            if hangs:
                over.wait()
                return
            body = json.dumps(answer).encode() if not isinstance(answer, bytes) else answer
            self.send_response(status)
            self.send_header("Location", "https://127.0.0.1:9/")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Not at all."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.identity)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        place = {"HOST": "127.0.0.1", "PORT": str(server.server_port)}
        variables = {f"KUBERNETES_SERVICE_{name}": value for name, value in place.items()}
        yield folder / "root", variables, asked
    finally:
        over.set()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "cause"), [(OOM, "out_of_memory"), (EVICTED, "evicted")], ids=["OOM", "evicted"]
)
def test_api_server_tells_how_the_container_ended(
    pod: RunPaths, tmp_path: Path, answer: object, cause: str
) -> None:
    with api_server(tmp_path, answer) as (root, environ, asked):
        assert ask_schedulers(pod, environ=environ, root=root) == []
    assert asked == ["/api/v1/namespaces/ml/pods/train-0 Bearer a-token"]
    (death,) = Analyzer(pod.root).deaths()
    assert death.cause == cause
    assert "on node gke-1" in death.scheduler[0]
    assert "a-token" not in pod.scheduler.read_text()


@pytest.mark.parametrize(
    ("answer", "status", "why"),
    [
        ({"kind": "Status", "code": 403}, 403, "may not get pods"),
        ({"kind": "Status", "code": 404}, 404, "no pod of that name"),
        ({}, 500, "said 500"),
        ({}, 302, "said 302"),
        (b"<html>", 200, "<html>"),
        ([1], 200, "an odd answer"),
        ({"status": 3, "metadata": [], "spec": 1}, 200, "another pod has that name"),
        (OOM | {"metadata": {"uid": "7"}}, 200, "another pod has that name now"),
        (pod_status(phase="Running", containerStatuses=[container({"running": {}})]), 200,
         "it still runs there"),
        (pod_status(phase="Running", containerStatuses=[
            container({}, ended_container("OOMKilled", 137, start=-900, end=-800))]), 200,
         "it still runs there"),
        (pod_status(phase="Pending", containerStatuses=[3, {"state": 1}]), 200, "does not tell"),
    ],
)  # fmt: skip
def test_answer_that_tells_nothing_of_this_run_is_said_and_not_kept(
    pod: RunPaths, tmp_path: Path, answer: object, status: int, why: str
) -> None:
    with api_server(tmp_path, answer, status) as (root, environ, _):
        (line,) = ask_schedulers(pod, environ=environ, root=root)
    assert why in line
    assert not pod.scheduler.exists()


def test_server_that_hangs_or_has_another_certificate_is_no_answer(
    pod: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("haiprof.live.scheduler.ASK_S", 0.3)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    with api_server(one, OOM, hangs=True) as (root, environ, _):
        (line,) = ask_schedulers(pod, environ=environ, root=root)
        assert "not reached" in line
        with api_server(two, OOM) as (other, _, asked):
            (line,) = ask_schedulers(pod, environ=environ, root=other)
            assert "not reached (SSLCertVerificationError)" in line
            assert asked == []
    (line,) = ask_schedulers(pod, environ=environ, root=root)
    assert "not reached (ConnectionRefusedError)" in line


def test_kubectl_is_asked_outside_of_the_cluster(pod: RunPaths, tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (line,) = ask_schedulers(pod, environ={"PATH": str(folder)}, root=tmp_path)
    assert "no kubectl and no service account here" in line
    (folder / "pod.json").write_text(json.dumps(EVICTED))
    (folder / "kubectl").write_text(
        f'#!/bin/sh\necho "$*" > {folder}/asked\ncat {folder}/pod.json\n'
    )
    (folder / "kubectl").chmod(0o755)
    assert ask_schedulers(pod, environ={"PATH": f"{folder}:/usr/bin:/bin"}, root=tmp_path) == []
    assert (folder / "asked").read_text().startswith("get pod train-0 --namespace=ml --output=json")
    assert "The node was low on resource: memory" in headline(pod)
