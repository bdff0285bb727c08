"""The status of a Kubeflow TrainJob: steps, progress, and at the end the verdict.

Source: Kubeflow Trainer 2.2, KEP-2779; `TrainerStatus` of trainjob_types.go has the limits. Trainer
gives its pods three variables where the feature is on; without them nothing is sent. Each status
replaces the one before, metrics included: so where the job has transformers, whose Trainer posts
its own, that one is left alone.
"""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

from haiprof.agent.notifications import Outbox, post
from haiprof.agent.step_watch import Node, RankWatch
from haiprof.base.medians import mean_median
from haiprof.base.messages import print_message
from haiprof.base.options import ENV_NO_KUBEFLOW
from haiprof.base.units import NS_PER_S
from haiprof.run_format.reader import try_read_lines
from haiprof.run_format.secrets import mask_text

POST_S = 10.0
"""Minimum time between two posts; Trainer asks for 5 s or more."""
LOOK_S = 2.0
CLOSE_S = 10.0
"""How long the launcher waits at the end for the last post."""
_TEXT_LIMIT = 64  # TrainerStatus: characters of a metric's value
_LAST_STEPS = 50
_TOTALS = ("max_steps", "max_train_steps", "num_train_steps", "total_steps", "train_iters",
           "training.steps")  # fmt: skip


def find_total_steps(command: Sequence[str]) -> int | None:
    """Steps of the whole job, as its command says: `--max-steps 500`, `trainer.max_steps=500`."""
    words = [part for word in command for part in word.split("=", 1)]
    for word, value in pairwise(words):
        name = word.lstrip("-").replace("-", "_")
        is_total = name in _TOTALS or name.rpartition(".")[2] in _TOTALS
        if is_total and value.isdecimal() and int(value) > 0:
            return int(value)
    return None


class TrainJobStatus:
    """Posts in a thread of its own; of what waits for a slow server the newest is sent.

    First once steps have a time, or ten seconds after the rank was seen, and then every ten.
    """

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
        if self._outbox.close(asked_to_end, CLOSE_S):
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
        try:  # Kubernetes renews the token's file
            token = Path(self._token).read_text(encoding="utf-8").strip() if self._token else ""
            context = ssl.create_default_context(cafile=self._ca or None)
            headers = {"Authorization": f"Bearer {token}"} if token else {}
            return post(self._url, body, headers, context)[0]
        except (OSError, ValueError) as error:
            return f"the server was not reached ({type(error).__name__})"


def _metrics(values: Mapping[str, object]) -> list[dict[str, str]]:
    texts = {name: mask_text(str(value)) for name, value in values.items()}
    return [
        {"name": name, "value": text if len(text) <= _TEXT_LIMIT else f"{text[: _TEXT_LIMIT - 1]}…"}
        for name, text in texts.items()
    ]
