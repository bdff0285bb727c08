"""What a client may use: haiprof over MCP, torch.profiler alone, py-spy alone.

Each records a job in its own way, without a change in the program, and then serves tools for that
recording; with all of them a client may read the program.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HAIPROF, TORCH, PY_SPY = TOOLSETS = ("haiprof", "torch.profiler", "py-spy")
REPOSITORY = Path(__file__).parents[2]
Call = Callable[[str, dict[str, Any]], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """As MCP lists it."""

    name: str
    description: str
    input_schema: dict[str, Any] = field(default_factory=lambda: {"type": "object"})


class Recorded:
    """A drawn job as it is run under another tool."""

    def __init__(self, job: Any, toolset: str) -> None:
        self._job, self._toolset = job, toolset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    def write(self, folder: Path, change: Any) -> list[str]:
        """The program, and its command under the tool."""
        line: list[str] = self._job.write(folder, change)
        if self._toolset == HAIPROF:
            return line
        shutil.copy(Path(__file__).with_name("profiled.py"), folder)
        profiled = [*line[:-1], "profiled.py"]
        if self._toolset == TORCH:
            return [*profiled, line[-1]]
        return [sys.executable, "profiled.py", "--attach", *profiled, "--mark", line[-1]]


@asynccontextmanager
async def open_tools(toolset: str, folder: Path) -> AsyncIterator[tuple[list[Tool], Call]]:
    """Tools for the recording in a folder, and how they are called."""
    source = Tool(
        name="source", description="Lines first to last of train.py, the job's program.",
        input_schema={"type": "object", "properties": {
            "first": {"type": "integer"}, "last": {"type": "integer"}}},
    )  # fmt: skip

    def read_source(first: int = 1, last: int = 200) -> str:
        script = (folder / "train.py").read_text(encoding="utf-8").splitlines()
        numbered = list(enumerate(script, 1))[max(first, 1) - 1 : last]
        return "\n".join(f"{number} {text}" for number, text in numbered)

    if toolset == HAIPROF:
        async with _open_mcp(folder) as (tools, call_mcp):

            async def call_any(name: str, arguments: dict[str, Any]) -> str:
                return read_source(**arguments) if name == "source" else \
                    await call_mcp(name, arguments)  # fmt: skip

            yield [*tools, source], call_any
        return
    name, description, answer = {
        TORCH: ("key_averages", "key_averages(group_by_stack_n=12) of 3 steps of each process, "
                "largest self time first; self_cpu_ratio is of all self times.", _key_averages),
        PY_SPY: ("lines", "Lines of train.py by samples of `py-spy record --pid`, all processes: "
                 "ratio of the samples in which it was the innermost line of train.py.", _lines),
    }[toolset]  # fmt: skip

    async def call(asked: str, arguments: dict[str, Any]) -> str:
        return read_source(**arguments) if asked == "source" else answer(folder)

    yield [Tool(name=name, description=description), source], call


@asynccontextmanager
async def _open_mcp(folder: Path) -> AsyncIterator[tuple[list[Tool], Call]]:
    """A session of the official SDK with `haiprof mcp` over stdio."""
    import mcp

    path = ":".join([str(REPOSITORY), *(each for each in sys.path if each)])
    words = ["-m", "haiprof", "mcp", "--log-dir", str(folder / "logs")]
    server = mcp.StdioServerParameters(
        command=sys.executable, args=words, env={"PYTHONPATH": path}, cwd=folder
    )
    async with mcp.Client(mcp.stdio_client(server)) as client:
        listed = (await client.list_tools()).tools
        tools = [
            Tool(name=t.name, description=t.description or "", input_schema=dict(t.input_schema))
            for t in listed
        ]

        async def call(name: str, arguments: dict[str, Any]) -> str:
            found = await client.call_tool(name, arguments)
            return "\n".join(getattr(part, "text", "") for part in found.content)

        yield tools, call


def _key_averages(folder: Path) -> str:
    found = [json.loads(path.read_text(encoding="utf-8"))[:20]
             for path in sorted(folder.glob("key_averages-*.json"))]  # fmt: skip
    return json.dumps({f"process {number}": rows for number, rows in enumerate(found)})


_FRAME = re.compile(r"\(([^():]*\.py):(\d+)\)")


def _lines(folder: Path) -> str:
    """Counted from py-spy's raw format, `outer (a.py:1);inner (b.py:2) COUNT`, a stack a line."""
    counts: Counter[str] = Counter()
    total = 0
    path = folder / "stacks.txt"
    for stack in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        frames, _, count = stack.rpartition(" ")
        own = [f"train.py:{line}" for file, line in _FRAME.findall(frames)
               if Path(file).name == "train.py"]  # fmt: skip
        total += int(count)
        if own:
            counts[own[-1]] += int(count)
    rows = [{"line": line, "ratio": round(n / total, 4)} for line, n in counts.most_common(20)]
    return json.dumps({"samples": total, "lines": rows})
