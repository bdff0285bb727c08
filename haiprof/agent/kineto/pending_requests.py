"""State of the Kineto agent: the processes that asked it, and requests pending for them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from haiprof.agent.kineto.messages import Ask

SILENT_NS = 60_000_000_000
"""A process asks every 5 s; after so long without, it is gone. Source: dynolog's own limit."""
CLIENT_LIMIT = 512
REQUEST_LIMIT = 64
_ID_LIMIT = 64
_TEXT_LIMIT = 8192


@dataclass(slots=True)
class Client:
    """A process that speaks Kineto's protocol."""

    pid: int
    """Its process id in this namespace."""
    ask: Ask
    seen_ns: int


@dataclass(slots=True)
class Pending:
    """A configuration for some processes."""

    text: str
    expires_wall_ns: int
    states: dict[int, str]
    """By process: `waiting`, `busy` (its own profiler runs), `delivered`, `over` (it has asked
    again since: its trace is written, or it dropped the request)."""
    delivered_wall_ns: dict[int, int] = field(default_factory=dict)


class PendingRequests:
    """Clients and requests, by process id and by request id."""

    def __init__(
        self,
        mono_ns: Callable[[], int] = time.monotonic_ns,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.clients: dict[int, Client] = {}
        self.requests: dict[str, Pending] = {}
        self._mono_ns, self._wall_ns = mono_ns, wall_ns

    def note_client(self, pid: int, ask: Ask) -> tuple[str, str]:
        """Notes that a process asks; returns its answer, and the id of the request behind it.

        Call `delivered` once it is sent.
        """
        self._forget()
        if pid in self.clients or len(self.clients) < CLIENT_LIMIT:
            self.clients[pid] = Client(pid, ask, self._mono_ns())
        for name, pending in self.requests.items():
            if pending.states.get(pid) == "delivered" and ask.free:
                pending.states[pid] = "over"
            if pending.states.get(pid) in ("waiting", "busy"):
                if not ask.free:  # it would drop a configuration now
                    pending.states[pid] = "busy"
                    return "", ""
                return pending.text, name
        return "", ""

    def note_delivery(self, pid: int, name: str) -> None:
        """Notes that a process has received its configuration."""
        pending = self.requests[name]
        pending.states[pid] = "delivered"
        pending.delivered_wall_ns[pid] = self._wall_ns()

    def answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Answers a question to the agent itself."""
        self._forget()
        what = question.get("do")
        if what == "clients":
            return {"clients": [self._describe(client) for client in self.clients.values()]}
        name = question.get("id")
        if not isinstance(name, str) or not 0 < len(name) <= _ID_LIMIT:
            return {"error": "no such question"}
        if what == "trace":
            return self._take(name, question)
        if what == "cancel":
            return {"cancelled": self.requests.pop(name, None) is not None}
        pending = self.requests.get(name)
        if what != "state" or pending is None:
            return {"error": "no such request"}
        return {
            "states": {str(pid): state for pid, state in pending.states.items()},
            "delivered_wall_ns": {str(p): ns for p, ns in pending.delivered_wall_ns.items()},
        }

    def _take(self, name: str, question: Mapping[str, Any]) -> dict[str, Any]:
        text, pids = question.get("text"), question.get("pids")
        expires = question.get("expires_wall_ns")
        fits = (
            isinstance(text, str)
            and 0 < len(text) <= _TEXT_LIMIT
            and _is_path_text(text)
            and isinstance(pids, list)
            and 0 < len(pids) <= CLIENT_LIMIT
            and all(type(pid) is int for pid in pids)
            and type(expires) is int
        )
        if not fits or name in self.requests:
            return {"error": "not a request"}
        if len(self.requests) >= REQUEST_LIMIT:
            return {"error": "too many requests wait already"}
        states = dict.fromkeys(pids or [], "waiting")
        self.requests[name] = Pending(str(text), int(expires or 0), states)
        return {"taken": sorted(states)}

    def _describe(self, client: Client) -> dict[str, Any]:
        return {
            "pid": client.pid,
            "pids": list(client.ask.pids),
            "job": client.ask.job,
            "free": client.ask.free,
            "silent_ns": self._mono_ns() - client.seen_ns,
        }

    def _forget(self) -> None:
        """Removes silent processes and expired requests."""
        oldest, now = self._mono_ns() - SILENT_NS, self._wall_ns()
        self.clients = {p: c for p, c in self.clients.items() if c.seen_ns >= oldest}
        self.requests = {n: r for n, r in self.requests.items() if r.expires_wall_ns > now}


def _is_path_text(text: str) -> bool:
    """Whether it can be sent: not a path with undecodable bytes (surrogates in Python)."""
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True
