"""Clients that answer a question with tools: scripted ones, and any external command.

An external command is started once a question, and speaks JSON, a message a line. It reads

    {"type": "question", "protocol": "haiprof-agents.1", "question": "...",
     "tools": [{"name": ..., "description": ..., "input_schema": {...}}], "calls": 30}
    {"type": "result", "id": 1, "text": "..."}         or {"type": "error", "id": 1, "text": "..."}

and writes `call` as often as it likes (up to `calls`), then one `answer`:

    {"type": "call", "id": 1, "tool": "verdict", "arguments": {}}
    {"type": "answer", "causes": [{"line": "train.py:88", "position": "forward",
     "activity": "python", "ranks": [1], "gain": 0.21}]}

`causes` are what is worth changing, the first one first; none: nothing is. `gain` is the share of
the mean step, `position` and `activity` as in docs/diagnosis.md, `ranks` where it is one rank's.
What is not known is left out.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolsets import HAIPROF, PY_SPY, TORCH, Call, Tool

from haiprof.cli.mcp import token_count

PROTOCOL, MOST_CALLS, LIMIT_S = "haiprof-agents.1", 30, 600.0
LEAST_SHARE = 0.05
"""The scripted clients claim nothing below it: haiprof's own limit of a problem."""
OWN_WORK = re.compile(
    r"\.backward\(|\.step\(|\.train\(\)|\.fit\(|\binner\(|\bnet\(|"
    r"\bmodel\(|self\.(?:first|last|head|down)\(|super\(\)\.forward\(|"
    r"def forward\(self, x: Tensor\) -> Tensor|\bover\(step|"
    r"def (?:plain|accelerate|trainer|lightning|own|main)\("
)
"""Source of lines that run the model, its backward, its optimizer, or the whole loop (of which
torch.profiler knows the first line, or the one at which it began): nobody would change them."""
Cause = dict[str, Any]


@dataclass(kw_only=True)
class Session:
    """One question and its tools; counts calls, and tokens that are read."""

    question: str
    tools: list[Tool]
    call_tool: Call
    calls: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.tokens = token_count(self.question + json.dumps([asdict(t) for t in self.tools]))

    async def call(self, tool: str, **arguments: Any) -> str:
        """What a tool answers."""
        self.calls += 1
        text = await self.call_tool(tool, arguments)
        self.tokens += token_count(text)
        return text


Client = Callable[[Session], Awaitable[list[Cause]]]


def rows(table: Any) -> list[dict[str, Any]]:
    """Rows of a table as haiprof's tools give it."""
    if isinstance(table, list):
        return table
    return [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]


async def ask_haiprof(session: Session) -> list[Cause]:
    """The recipe of `haiprof skill`: the account with the largest gain, or nothing stands out.

    Where that is time without a core, which is the machine's fault, the next one, too.
    """
    verdict = json.loads(await session.call("verdict")).get("answer")
    ledger = json.loads(await session.call("ledger")).get("answer")
    if not verdict or not ledger or verdict["headline"].startswith("nothing stands out"):
        return []
    sure = [each for each in rows(ledger["accounts"]) if each.get("gain_low_ms")]
    found: list[Cause] = []
    step_ms = ledger["step"]["mean_ms"]
    for best in sorted(sure, key=lambda each: -each["gain_ms"]):
        if best["gain_ms"] < LEAST_SHARE * step_ms:
            break
        account = json.loads(await session.call("ledger", account=best["account"]))["answer"]
        causes = [c for c in rows(verdict["causes"]) if c.get("account") == best["account"]]
        named = [each for cause in causes for each in cause.get("at") or []]
        if account.get("file"):
            named.insert(0, f"{Path(account['file']).name}:{account['line']}")
        named += account.get("callers") or []
        found.append({
            "line": named[0].split(" ")[0] if named else None, "position": account["position"],
            "activity": account["activity"], "ranks": account.get("ranks", []),
            "gain": best["gain_ms"] / step_ms,
        })  # fmt: skip
        if not account["activity"].startswith("no core"):
            break
    return found


async def ask_torch_profiler(session: Session) -> list[Cause]:
    """The entry with the largest self time whose line in train.py is not the model's own work."""
    found = json.loads(await session.call("key_averages"))
    named = []
    for entry in (entry for entries in found.values() for entry in entries):
        own = re.findall(r"train\.py\((\d+)\)", "\n".join(entry["stack"]))
        if own and not entry["name"].startswith("ProfilerStep"):  # which is the profiler's own
            named.append((f"train.py:{own[0]}", entry["self_cpu_ratio"]))
    return await _largest(session, named)


async def ask_py_spy(session: Session) -> list[Cause]:
    """The line with most samples that is not the model's own work."""
    found = json.loads(await session.call("lines"))
    return await _largest(session, [(row["line"], row["ratio"]) for row in found["lines"]])


async def _largest(session: Session, named: list[tuple[str, float]]) -> list[Cause]:
    """The largest of lines with a share, if that is large enough and somebody would change it."""
    for line, share in sorted(named, key=lambda each: -each[1]):
        if share < LEAST_SHARE:
            break
        number = int(line.rpartition(":")[2])
        if not OWN_WORK.search(await session.call("source", first=number, last=number)):
            return [{"line": line, "gain": share}]
    return []


SCRIPTED: dict[str, Client] = {
    HAIPROF: ask_haiprof, TORCH: ask_torch_profiler, PY_SPY: ask_py_spy,
}  # fmt: skip


def external(command: str) -> Client:
    """A client that is a command: the protocol above."""

    async def ask(session: Session) -> list[Cause]:
        process = await asyncio.create_subprocess_exec(
            *shlex.split(command), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )  # fmt: skip
        try:
            return await asyncio.wait_for(_converse(process, session), LIMIT_S)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()

    return ask


async def _converse(process: asyncio.subprocess.Process, session: Session) -> list[Cause]:
    assert process.stdin is not None
    assert process.stdout is not None
    send = process.stdin

    async def tell(**message: Any) -> None:
        send.write((json.dumps(message) + "\n").encode())
        await send.drain()

    await tell(type="question", protocol=PROTOCOL, question=session.question, calls=MOST_CALLS,
               tools=[asdict(tool) for tool in session.tools])  # fmt: skip
    async for line in process.stdout:
        said = json.loads(line)
        if said["type"] == "answer":
            return list(said["causes"])
        if session.calls >= MOST_CALLS:
            await tell(type="error", id=said["id"], text=f"more than {MOST_CALLS} calls")
            continue
        try:
            text = await session.call(said["tool"], **said.get("arguments", {}))
        except Exception as error:  # noqa: BLE001 - whatever a call was wrong in, its client is told
            await tell(type="error", id=said["id"], text=f"{type(error).__name__}: {error}")
        else:
            await tell(type="result", id=said["id"], text=text)
    raise RuntimeError("the client ended without an answer")
