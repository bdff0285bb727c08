"""Notifications: a bounded queue, and a thread that hands them on; the status of a TrainJob."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from haiprof.agent.step_watch import Node, RankWatch
from haiprof.base.medians import mean_median
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_NO_KUBEFLOW, is_notify_url
from haiprof.base.posting import open_without_redirects
from haiprof.base.units import NS_PER_S, duration_text, shorten
from haiprof.base.version import __version__
from haiprof.run_format.reader import try_read_lines
from haiprof.run_format.secrets import mask_text

if TYPE_CHECKING:
    from ssl import SSLContext

QUEUE_LIMIT = 16  # events that wait for a slow receiver; later ones are dropped and counted
RUN_LIMIT = 100  # events of one launcher, beside the end of the job
GAP_S = 60.0  # minimum time between two events of a kind in `_GAPPED`: all ranks die together
ATTEMPTS = 3
RETRY_S = 2.0  # wait before the second attempt; it doubles before the third
ATTEMPT_LIMIT_S = 10.0
CLOSE_S = 15.0  # how long the launcher waits at the end for what is not sent yet
TEXT_LIMIT = 3000  # Slack cuts a text after 40,000 characters, and other receivers earlier
COMPARE_LIMIT_S = 60.0
_OUTPUT_LIMIT_BYTES = 1 << 24
_MOST_ACCOUNTS = 3
_GAPPED = ("death", "slow")
_RETRIED = (408, 425, 429)

Complete = Callable[[], tuple[str, Mapping[str, object]]]

Item = TypeVar("Item")


class Outbox(Generic[Item]):
    """Hands items on in a thread of its own: nobody waits; beyond `most` the oldest is dropped."""

    def __init__(self, name: str, deliver: Callable[[Item], None], most: int = QUEUE_LIMIT) -> None:
        self.changed = threading.Condition()  # held from a look at `queue` to the `put` after it
        self.queue: deque[Item] = deque(maxlen=most)
        self._deliver = deliver
        self._is_sending = self._is_closed = False
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def put(self, item: Item) -> None:
        """Queues an item."""
        with self.changed:
            self.queue.append(item)
            self.changed.notify_all()

    def close(self, asked_to_end: Callable[[], bool], limit_s: float) -> int:
        """Waits for what is queued, at most for a time, or until the user ends it; what is left."""
        deadline_s = time.monotonic() + limit_s
        with self.changed:
            self._is_closed = True
            self.changed.notify_all()
            while (self.queue or self._is_sending) and time.monotonic() < deadline_s:
                if asked_to_end():
                    break
                self.changed.wait(0.1)
            return len(self.queue) + self._is_sending

    def _work(self) -> None:
        while True:
            with self.changed:
                while not self.queue and not self._is_closed:
                    self.changed.wait()
                if not self.queue:
                    return
                item, self._is_sending = self.queue.popleft(), True
            self._deliver(item)
            with self.changed:
                self._is_sending = False
                self.changed.notify_all()


@dataclass
class Notifier:
    """Sends events; neither a slow receiver nor one that fails delays the caller."""

    target: str
    identity: Mapping[str, object]
    in_child: Callable[[], None] | None = None
    retry_s: float = RETRY_S
    _count: int = 0
    _sent_at_s: dict[str, float] = field(default_factory=dict)
    _left_out: Counter[str] = field(default_factory=Counter)
    _failures: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._outbox = Outbox("haiprof-notify", self._deliver)

    def send(self, event: str, text: str, complete: Complete | None = None, **more: object) -> None:
        """Queues an event; drops it where there are too many, and says so in the next one.

        It is a `hang`, `hang_end`, `slow`, `death` or `end`. `complete` is called in the thread
        before it is sent, for more lines and fields.
        """
        now = time.monotonic()
        with self._outbox.changed:
            early = event in _GAPPED and now - self._sent_at_s.get(event, -GAP_S) < GAP_S
            many = event != "end" and self._count >= RUN_LIMIT
            if early or many or len(self._outbox.queue) >= QUEUE_LIMIT:
                self._left_out[event] += 1
                return
            self._count += 1
            self._sent_at_s[event] = now
            body = {"text": f"haiprof: {self.identity.get('job')}: {text}", "event": event,
                    "time_s": round(time.time(), 3), **self.identity, **more,
                    "left_out": dict(self._left_out)}  # fmt: skip
            self._left_out.clear()
            self._outbox.put((body, complete))

    def close(self, asked_to_end: Callable[[], bool], limit_s: float = CLOSE_S) -> None:
        """Waits for what is queued, at most for a time, or until the user ends it."""
        if left := self._outbox.close(asked_to_end, limit_s):
            print_message(f"--notify: {left} of {self._count} notifications were not delivered")

    def _deliver(self, event: tuple[dict[str, Any], Complete | None]) -> None:
        """Sends one event, several times if need be; says each failure once."""
        body, complete = event
        if complete is not None:
            more, fields = complete()
            body = {**body, **fields, "text": f"{body['text']}\n{more}"}
        masked = json.dumps(_mask({**body, "text": body["text"][:TEXT_LIMIT]})).encode()
        failure, wait_s = "", self.retry_s
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(wait_s)
                wait_s *= 2
            try:
                send = partial(post, self.target) if is_notify_url(self.target) else self._run
                failure, is_final = send(masked)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                # Its text may name the address, which may be a secret.
                failure, is_final = f"the receiver failed ({type(error).__name__})", False
            if not failure or is_final:
                break
        if failure and failure not in self._failures:
            self._failures.add(failure)
            print_message(f"--notify: {failure}; the job is not affected")

    def _run(self, body: bytes) -> tuple[str, bool]:
        process = subprocess.Popen(
            ["/bin/sh", "-c", self.target],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=self.in_child,
        )  # fmt: skip
        try:
            process.communicate(body, timeout=ATTEMPT_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"the command did not end within {ATTEMPT_LIMIT_S:g} s", True
        status = process.returncode
        return (f"the command ended with status {status}" if status else ""), False


def post(
    url: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({}),
    context: SSLContext | None = None,
) -> tuple[str, bool]:  # fmt: skip
    """Posts JSON; why it failed, or an empty text, and whether it would fail again the same way.

    Raises OSError where nobody answers in time, ValueError for what is no URL.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError  # these load what a job's own files may be named like
    from urllib.request import Request

    own = {"Content-Type": "application/json", "User-Agent": f"haiprof/{__version__}"}
    request = Request(url, data=body, headers={**own, **headers}, method="POST")
    try:
        open_without_redirects(request, ATTEMPT_LIMIT_S, context).close()
    except HTTPError as error:
        error.close()
        is_final = error.code < 500 and error.code not in _RETRIED
        return f"the receiver answered HTTP {error.code}", is_final
    except HTTPException as error:
        return f"the receiver answered no HTTP: {type(error).__name__}", False
    return "", False


def _mask(value: object) -> Any:  # noqa: ANN401 (JSON of any kind)
    """The same with credentials masked in every text."""
    if isinstance(value, str):
        return mask_text(value)
    if isinstance(value, Mapping):
        return {key: _mask(each) for key, each in value.items()}
    return [_mask(each) for each in value] if isinstance(value, (list, tuple)) else value


def send_death(notifier: Notifier, line: Mapping[str, Any]) -> bool:
    """Tells of a rank's end, a line `process_end`, unless it is an ordinary one; whether it did."""
    # SIGTERM and SIGINT are how launchers end the other ranks after one has died.
    rank, status, number = line["rank"], line["status"], line["signal"]
    is_ordinary = not (status or number) or number in (signal.SIGTERM, signal.SIGINT)
    if rank is None or line["helper"] or is_ordinary:
        return False
    how = f"exit status {status}"
    if number is not None:
        how = f"signal {number} ({signal.strsignal(number)})"
    if line.get("oom"):
        how += ", as its memory limit was reached"
    text = f"rank {rank} (process {line['pid']}) ended with {how}"
    notifier.send("death", text, rank=rank, status=status, signal=number, pid=line["pid"])
    return True


def find_grown_accounts(
    start: Callable[[str, Sequence[str], int], subprocess.Popen[bytes]], step: int
) -> tuple[str, Mapping[str, object]]:
    """The accounts of time that grew beyond chance from a step on, for people and as data."""
    with os.fdopen(os.memfd_create("haiprof"), "w+b") as output:
        try:
            process = start("compare", ["--from-step", str(step), "--json"], output.fileno())
            process.wait(COMPARE_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        except (OSError, subprocess.SubprocessError):
            pass  # nothing is in the file, which is said below
        output.seek(0)
        try:
            found = json.loads(output.read(_OUTPUT_LIMIT_BYTES))
            why = found["step_time"]["unknown"] or found["no_accounts"]
            why = why or found["verdict"]["undecided"]
            grown = [
                {key: one[key] for key in ("title", "before_ns", "after_ns")}
                for one in (*found["ranks"][:1], *found["accounts"])
                if one["is_certain"] and one["difference_ns"] > 0
            ][:_MOST_ACCOUNTS]
        except (ValueError, LookupError, TypeError):
            why, grown = "the steps could not be compared", []
    if why:
        return f"which part of the step grew is not known: {why}", {"accounts": None}
    lines = [
        f"{one['title']}: {duration_text(one['before_ns'])} to {duration_text(one['after_ns'])}"
        for one in grown
    ]
    return "\n".join(lines) or "no part of the step grew beyond chance", {"accounts": grown}


POST_S = 10.0  # minimum time between two posts; Trainer asks for 5 s or more
LOOK_S = 2.0
TRAINJOB_CLOSE_S = 10.0  # how long the launcher waits at the end for the last post
_TEXT_LIMIT = 64  # TrainerStatus: characters of a metric's value
_LAST_STEPS = 50
_TOTALS = ("max_steps", "max_train_steps", "num_train_steps", "total_steps", "train_iters",
           "training.steps")  # fmt: skip


def find_total_steps(command: Sequence[str]) -> int | None:
    """Steps of the whole job, as its command says: `--max-steps 500`, `trainer.max_steps=500`."""
    for word, value in pairwise(part for each in command for part in each.split("=", 1)):
        name = word.lstrip("-").replace("-", "_")
        is_total = name in _TOTALS or name.rpartition(".")[2] in _TOTALS
        if is_total and value.isdecimal() and int(value) > 0:
            return int(value)
    return None


class TrainJobStatus:
    """Posts the newest status in its own thread: once steps have a time, and every 10 s."""

    def __init__(self, environ: Mapping[str, str], prefix: str, command: Sequence[str]) -> None:
        self._url, self._token, self._ca = (
            environ.get(prefix + name, "") for name in ("URL", "TOKEN", "CA_CERT")
        )
        self._shares = environ.get(ENV_NO_KUBEFLOW, "").upper() != "TRUE"
        self._total = find_total_steps(command)
        self._watch: RankWatch | None = None
        self._look_at = self._post_at = 0.0
        self._is_told = False
        self._failure = ""
        self._outbox = Outbox("haiprof-trainjob", self._send, most=1)

    def tick(self, node: Node) -> None:
        """Looks at the steps of the node's first rank, and posts them when it is time."""
        now = time.monotonic()
        if not self._url or now < self._look_at:
            return
        self._look_at = now + LOOK_S
        rank = min(node.live_ranks(), key=lambda each: each.rank, default=None)
        if rank is None:
            return
        if self._watch is None or self._watch.pid != rank.pid:
            lines = try_read_lines(rank.paths.events) if self._shares else ()
            if any("transformers" in (line.get("packages") or ()) for line in lines):
                print_message(
                    "the TrainJob's status is left to transformers' Trainer; "
                    f"with {ENV_NO_KUBEFLOW}=TRUE haiprof posts it"
                )
                self._url = ""
                return
            self._watch = RankWatch(rank.rank, rank.pid, rank.paths, time.monotonic_ns())
            self._post_at = now + POST_S
        is_new = self._watch.read(time.monotonic_ns()) and self._watch.count
        if is_new and (now >= self._post_at or (self._watch.steps and not self._is_told)):
            self._post_at, self._is_told = now + POST_S, True
            self._outbox.put(self._status())

    def close(
        self, asked_to_end: Callable[[], bool], verdict: Mapping[str, Any], *, succeeded: bool
    ) -> None:
        """Posts the end with the verdict, and waits a bounded time until it is delivered."""
        if not self._url:
            return
        if self._watch is not None:
            self._watch.read(time.monotonic_ns())
        status = self._status()
        if succeeded:
            status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
        said: dict[str, object] = {"haiprof_verdict": verdict.get("headline") or "no verdict"}
        if verdict.get("headline"):
            said["haiprof_problems"] = len(verdict.get("problems") or ())
        status["metrics"] += _metrics(said)
        self._outbox.put(status)
        if self._outbox.close(asked_to_end, TRAINJOB_CLOSE_S):
            print_message("the TrainJob's last status was not delivered")

    def _status(self) -> dict[str, Any]:
        watch, status = self._watch, dict[str, Any]()
        known = dict[str, object]()
        if watch is not None:
            known["haiprof_steps"] = watch.count
            if watch.steps:
                step_ns = mean_median([step.ns for step in list(watch.steps)[-_LAST_STEPS:]])
                known["haiprof_step_seconds"] = f"{step_ns / NS_PER_S:.6g}"
            if self._total is not None and watch.count <= self._total:
                status["progressPercentage"] = min(99, 100 * watch.count // self._total)
                if watch.steps:
                    left_ns = (self._total - watch.count) * step_ns
                    status["estimatedRemainingSeconds"] = round(left_ns / NS_PER_S)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return {**status, "metrics": _metrics(known), "lastUpdatedTime": now}

    def _send(self, status: Mapping[str, Any]) -> None:
        failure = self._post(json.dumps({"trainerStatus": status}).encode())
        if failure and failure != self._failure:
            print_message(f"TrainJob status: {failure}; the job is not affected")
        self._failure = failure

    def _post(self, body: bytes) -> str:
        if not self._url.startswith("https://"):  # others would see the token
            return "its address is not https"
        import ssl  # slow, and most jobs are none of Kubeflow's

        try:  # Kubernetes renews the token's file
            token = Path(self._token).read_text(encoding="utf-8").strip() if self._token else ""
            context = ssl.create_default_context(cafile=self._ca or None)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return post(self._url, body, headers, context)[0]
        except (OSError, ValueError) as error:
            return f"the server was not reached ({type(error).__name__})"


def _metrics(values: Mapping[str, object]) -> list[dict[str, str]]:
    texts = {name: mask_text(str(value)) for name, value in values.items()}
    return [{"name": name, "value": shorten(text, _TEXT_LIMIT)} for name, text in texts.items()]
