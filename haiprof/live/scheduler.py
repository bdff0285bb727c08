"""What Slurm or Kubernetes says of the end of a run that did not end well; kept in the run.

The launcher may have died with the job: of Slurm's time limit, of a full memory, of a node that
failed. So the one who reads the run asks, where the commands or the API answer; only about a job
that ran when and where this run did.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

from haiprof.agent.job_environment import SERVICE_ACCOUNT, is_pod_name
from haiprof.base.errors import HaiprofError
from haiprof.base.units import NS_PER_S
from haiprof.live.find import is_running
from haiprof.run_analysis.run_files import mapping, objects
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, read_manifest
from haiprof.run_format.reader import try_read_json
from haiprof.run_format.secrets import mask_text
from haiprof.run_format.writer import write_json

ASK_S = 3.0  # How long one question may take
_POD_LIMIT, _AT_ONCE, _NODE_LIMIT, _STEP_LIMIT = 64, 8, 64, 8
_ANSWER_BYTES = 4 << 20
_TEXT_CHARS = 300
STILL_RUNS = "it still runs there"
_SHOWN = ("JobState", "Reason", "Restarts", "ExitCode", "StartTime", "EndTime", "TimeLimit",
          "NodeList")  # fmt: skip
_ACCOUNTED = ("JobIDRaw", "Cluster", "State", "ExitCode", "Start", "End", "Reason", "NodeList",
              "FailedNode", "Timelimit", "ReqMem", "MaxRSS")  # fmt: skip
_NEWER = "FailedNode"
_GOING_ON = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "RESIZING",
             "STAGE_OUT", "STOPPED", "SIGNALING")  # fmt: skip
_SICK = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN")
_FIELD = re.compile(r"(?:^|\s)([A-Z][A-Za-z:/]*)=")
_SINCE = re.compile(r"\[\S*@(\d{1,12})\]$")
_SLACK_S = 2  # Slurm counts in whole seconds

_Answer = dict[str, Any] | str  # What is final, or why there is nothing


def ask_schedulers(
    run: RunPaths, *, environ: Mapping[str, str] | None = None, root: Path = Path("/")
) -> list[str]:
    """Asks about a run that did not end well, and keeps what is final; whom it asked in vain."""
    environ = os.environ if environ is None else environ
    try:
        manifest = read_manifest(run)
    except HaiprofError:
        return []
    is_asked = os.path.lexists(run.scheduler)
    if is_asked or not manifest.scheduler_may_know or is_running(run, manifest):
        return []
    said: dict[str, _Answer] = {}
    slurm, pods = None, []
    job = manifest.environment.get("slurm_job")
    if isinstance(job, str) and job.isascii() and job.isdigit() and len(job) < 12:
        slurm = said[f"Slurm about job {job}"] = _ask_slurm(job, manifest, environ)
    # The pods of the run's nodes, as their agents wrote them down.
    told = ((host, try_read_json(node.agent).get("pod")) for host, node in run.node_folders())
    pods_of = [
        {**pod, "host": host} for host, pod in told if isinstance(pod, dict)
        and all(is_pod_name(pod.get(name)) for name in ("name", "namespace"))
    ]  # fmt: skip
    known = pods_of[:_POD_LIMIT]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda pod: _ask_pod(pod, manifest, environ, root), known)
        for pod, answer in zip(known, answers, strict=True):
            said[f"Kubernetes about pod {pod['name']}"] = answer
            pods += [answer] if isinstance(answer, dict) else []
    if STILL_RUNS not in said.values() and (isinstance(slurm, dict) or pods):
        content = {"asked_wall_ns": time.time_ns(), "slurm": slurm, "pods": pods}
        try:
            write_json(run.scheduler, content, below=run.root)
        except OSError as error:
            return [f"what the scheduler said could not be kept: {error.strerror or error}"]
    return [f"{who}: {why}" for who, why in said.items() if isinstance(why, str)]


# -- Slurm -----------------------------------------------------------------------------------------


def _ask_slurm(job: str, manifest: Manifest, environ: Mapping[str, str]) -> _Answer:
    known = manifest.environment
    restart = _number(known.get("slurm_restart"))
    here = environ.get("SLURM_JOB_ID"), _number(environ.get("SLURM_RESTART_COUNT", "0"))
    if here == (job, restart):
        return STILL_RUNS  # this is a command of the job's own script
    shown, why = _run(["scontrol", "--oneliner", "show", "job", job], environ)
    lines = [_split_line(line) for line in shown.splitlines()]
    own = next((each for each in lines if each.get("JobId") == job), {})
    rows, why_not = _accounting(job, known, environ)
    is_other = bool(lines or rows)
    found: dict[str, Any] = {"job": job}
    if _is_of_run(manifest, own.get("StartTime"), own.get("EndTime"), own.get("NodeList")):
        found["scontrol"] = {name: own[name] for name in _SHOWN if name in own}
    elif own.get("JobName") == known.get("slurm_name") and _number(own.get("Restarts")) > restart:
        found["scontrol"] = {"JobState": "REQUEUED", "Restarts": own["Restarts"]}
    rows = [r for r in rows if _is_of_run(manifest, r["Start"], r["End"], r["NodeList"])
            or "." in r["JobIDRaw"]]  # fmt: skip
    jobs = [row for row in rows if row["JobIDRaw"] == job]
    if jobs:
        found["sacct"] = jobs[-1]
        first, last = (_number(jobs[-1][name]) for name in ("Start", "End"))
        steps = [
            row for row in rows if row["JobIDRaw"].startswith(f"{job}.")
            and row["State"] != "COMPLETED" and first <= _number(row["Start"]) <= last
        ]  # fmt: skip
        found["steps"] = steps[:_STEP_LIMIT]
    states = [found.get("scontrol", {}).get("JobState"), found.get("sacct", {}).get("State")]
    if not any(states):
        other = "a job of that number, which is not this run's" if is_other else ""
        return other or "; ".join(filter(None, (why, why_not)))
    if any(state and state.split()[0] in _GOING_ON for state in states):
        return STILL_RUNS
    nodes = next(filter(None, (each.get("NodeList") for each in jobs)), own.get("NodeList") or "")
    found["nodes"] = _sick_nodes(nodes, manifest, environ)
    return found


def _accounting(
    job: str, known: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[list[dict[str, str]], str]:
    """Rows of the job and its steps, each time it was started; or why there are none."""
    words = ["sacct", "--duplicates", "--parsable2", f"--jobs={job}"]
    cluster = known.get("slurm_cluster")
    if isinstance(cluster, str) and re.fullmatch(r"[\w.-]{1,64}", cluster):
        words.append(f"--clusters={cluster}")
    said, why = _run([*words, f"--format={','.join(_ACCOUNTED)}"], environ)
    if _NEWER in why:  # Slurm before 23.02 does not have it
        names = [name for name in _ACCOUNTED if name != _NEWER]
        said, why = _run([*words, f"--format={','.join(names)}"], environ)
    head, *rows = [line.split("|") for line in said.splitlines()] or [[""]]
    whole = [dict(zip(head, map(_cut, row), strict=True)) for row in rows if len(row) == len(head)]
    return [{name: row.get(name, "") for name in _ACCOUNTED} for row in whole], why


def _is_of_run(manifest: Manifest, began: str | None, ended: str | None, nodes: str | None) -> bool:
    """Whether a job ran when and where this run did: numbers of jobs are each cluster's own."""
    start_s, first_s, last_s = manifest.start_wall_ns // NS_PER_S, _number(began), _number(ended)
    if first_s < 0 or first_s > start_s + _SLACK_S or 0 <= last_s < start_s - _SLACK_S:
        return False
    own = manifest.environment.get("slurm_nodes")
    return not own or nodes == own


def _sick_nodes(
    nodes: str, manifest: Manifest, environ: Mapping[str, str]
) -> list[dict[str, str | int]]:
    """Nodes of the job that were drained or went down since the run began."""
    if not re.fullmatch(r"[\w.,\[\]-]{1,4000}", nodes):
        return []
    said, _ = _run(["scontrol", "--oneliner", "show", "node", nodes], environ)
    found: list[dict[str, str | int]] = []
    for node in map(_split_line, said.splitlines()):
        state, reason = node.get("State", ""), node.get("Reason", "")
        since = _SINCE.search(reason)
        if since and any(each in state for each in _SICK) and (
            int(since[1]) >= manifest.start_wall_ns // NS_PER_S
        ):  # fmt: skip
            why = _SINCE.sub("", reason).strip()
            name = node.get("NodeName", "")
            found.append({"name": name, "state": state, "reason": why, "since_s": int(since[1])})
    return found[:_NODE_LIMIT]


def _split_line(line: str) -> dict[str, str]:
    """`A=1 B=two words C=3` of scontrol; of a name that comes twice, the first one."""
    parts = _FIELD.split(line)
    pairs = [*zip(parts[1::2], parts[2::2], strict=True)]
    return {name: _cut(value.strip()) for name, value in reversed(pairs)}


def _run(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """What a command printed, or why it printed nothing."""
    try:
        done = subprocess.run(
            words, env={**environ, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"},
            stdin=subprocess.DEVNULL, capture_output=True, timeout=ASK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"{words[0]} took longer than {ASK_S:g} s"
    except OSError as error:
        return "", f"{words[0]}: {error.strerror or error}"
    said = done.stdout[:_ANSWER_BYTES].decode("utf-8", "replace")
    if done.returncode == 0 and said.strip():
        return said, ""
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return "", f"{words[0]}: {_cut(lines[0]) if lines else 'it knows nothing of it'}"


def _cut(text: str) -> str:
    return mask_text(text)[:_TEXT_CHARS]


def _number(text: object) -> int:
    """-1 for what is none, such as `Unknown`."""
    fits = isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 13
    return int(str(text)) if fits else -1


# -- Kubernetes ------------------------------------------------------------------------------------


def _ask_pod(
    pod: Mapping[str, Any], manifest: Manifest, environ: Mapping[str, str], root: Path
) -> _Answer:
    account = root / SERVICE_ACCOUNT
    if environ.get("KUBERNETES_SERVICE_HOST") and (account / "token").exists():
        said = _from_api(pod, environ, account)
    elif shutil.which("kubectl", path=environ.get("PATH")):
        text, why = _run(
            ["kubectl", "get", "pod", pod["name"], f"--namespace={pod['namespace']}",
             "--output=json", f"--request-timeout={ASK_S:g}s"], environ,
        )  # fmt: skip
        said = text or why
        if why:
            return why
    else:
        return "no kubectl and no service account here"
    return read_pod(said, pod, manifest)


def _from_api(pod: Mapping[str, Any], environ: Mapping[str, str], account: Path) -> str:
    """The API server's answer, or why there is none. No proxy and no redirection is followed."""
    port = environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        context = ssl.create_default_context(cafile=str(account / "ca.crt"))
        token = (account / "token").read_text(encoding="ascii").strip()
        server = http.client.HTTPSConnection(
            environ["KUBERNETES_SERVICE_HOST"], int(port), timeout=ASK_S, context=context
        )
        with contextlib.closing(server):
            headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
            path = f"/api/v1/namespaces/{pod['namespace']}/pods/{pod['name']}"
            server.request("GET", path, headers=headers)
            answer = server.getresponse()
            said = answer.read(_ANSWER_BYTES).decode("utf-8", "replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"the API server was not reached ({type(error).__name__})"
    if answer.status == http.client.FORBIDDEN:
        return "this service account may not get pods"
    if answer.status == http.client.NOT_FOUND:
        return "no pod of that name: it was deleted, or its template sets no POD_NAME"
    return said if answer.status == http.client.OK else f"the API server said {answer.status}"


def read_pod(said: str, pod: Mapping[str, Any], manifest: Manifest) -> _Answer:
    """What is told of the run's end: of its pod, and of the container that ran while it did."""
    try:
        content = json.loads(said)
    except (ValueError, RecursionError):
        return _cut(said)
    if not isinstance(content, dict):
        return "an odd answer"
    meta, status, spec = (mapping(content.get(name)) for name in ("metadata", "status", "spec"))
    uid = pod.get("uid")
    if isinstance(uid, str) and meta.get("uid") != uid:
        return "another pod has that name now"
    ended = [
        (str(each.get("name")), mapping(mapping(each.get(state)).get("terminated")))
        for each in objects(status.get("containerStatuses"))
        for state in ("state", "lastState")
    ]
    start_s = manifest.start_wall_ns / NS_PER_S
    own = [
        {"name": _cut(name),
         **{key: _plain(end.get(key)) for key in ("reason", "exitCode", "signal", "message")},
         "ended_s": _unix_s(end.get("finishedAt"))}
        for name, end in ended
        if end and (_unix_s(end.get("startedAt")) or 0) <= start_s + _SLACK_S
        and (_unix_s(end.get("finishedAt")) or 0) >= start_s - _SLACK_S
    ]  # fmt: skip
    own.sort(key=lambda end: end["exitCode"] == 0)  # a sidecar that ended well is not the job
    told = objects(status.get("conditions"))
    is_set = [each for each in told if each.get("status") == "True"]
    conditions = [each for each in is_set if each.get("type") == "DisruptionTarget"]
    if not own and not conditions and not status.get("reason"):
        return STILL_RUNS if status.get("phase") == "Running" else "it does not tell how it ended"
    disruption = conditions[0] if conditions else {}
    return {
        **{key: pod[key] for key in ("host", "name", "namespace")},
        "node": _plain(spec.get("nodeName")),
        **{key: _plain(status.get(key)) for key in ("reason", "message")},
        "disruption": _plain(disruption.get("reason")),
        "disruption_message": _plain(disruption.get("message")),
        "container": own[0] if own else None,
    }


def _plain(value: object) -> str | int | None:
    if isinstance(value, str):
        return _cut(value)
    return value if type(value) is int and abs(value) < 1 << 31 else None


def _unix_s(value: object) -> int | None:
    """Of `2026-11-27T20:00:00Z`."""
    try:
        return int(datetime.fromisoformat(str(value).replace("Z", "+00:00")).timestamp())
    except (ValueError, OverflowError):
        return None
