"""`haiprof mcp`: recorded runs and traces as tools for agents, over MCP, read-only."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from haiprof.base.errors import MissingExtraError
from haiprof.base.log_addresses import is_address
from haiprof.base.version import PACKAGE, __version__
from haiprof.cli.names import own_command
from haiprof.cli.shared import default_log_dir

TOKENS = 2000  # The most tokens of an answer, unless the agent asks for more
_LEAST_TOKENS = 200
_PIECE = re.compile(r"[A-Za-z]+|[0-9]{1,3}|[^A-Za-z0-9]+")
_LETTERS_PER_TOKEN, _SIGNS_PER_TOKEN = 5, 2
_LENGTHS = (1000, 300, 100, 60, 40, 30, 20, 15, 10, 7, 5, 3, 2, 1)
"""The entries that are kept of each list: the first of these with which the answer fits."""
_TEXT_LENGTH = 600
_LIMIT_S, _LIMIT_BYTES = 120, 64 << 20
"""What one question may take, and how large the whole answer may be before it is shortened."""
_LONGEST_NS = 10**15  # Longer ones are no durations but points in time, and stay in ns

INSTRUCTIONS = (PACKAGE / "cli" / "mcp.md").read_text(encoding="utf-8")

Shape = Callable[[dict[str, Any]], Any]
Question = Literal["report", "tables", "functions", "modules", "efficiency", "critical-path",
                   "what-if", "memory", "check"]  # fmt: skip
_UNSTEPPED = ("memory", "check")  # Questions that take no steps


def mcp() -> None:
    """Serve recorded runs and traces to an agent, over the Model Context Protocol on stdio.

    The tools read and change nothing: runs, verdict, ledger, lines, ranks, compare, trace, sql. No
    answer is longer than 2,000 tokens unless the agent asks for more. Needs the extra mcp. What an
    agent should do with them: haiprof skill.

    For example:

      haiprof mcp                                    runs of the default log directory
      haiprof mcp --log-dir /shared/haiprof          runs of that one
      claude mcp add haiprof -- haiprof mcp          the same, as an agent starts it
    """
    try:
        from mcp.server import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError:
        raise MissingExtraError(
            "haiprof mcp needs the MCP SDK (mcp, version 2 or newer)",
            hint="pip install 'haiprof[mcp]'",
        ) from None
    server = MCPServer("haiprof", instructions=INSTRUCTIONS, version=__version__, log_level="ERROR")
    tools = Tools(default_log_dir().absolute())
    read_only = ToolAnnotations(read_only_hint=True, open_world_hint=False)
    for tool in (tools.runs, tools.verdict, tools.ledger, tools.lines, tools.ranks, tools.compare,
                 tools.trace, tools.sql):  # fmt: skip
        server.add_tool(tool, annotations=read_only, structured_output=False)
    server.run("stdio")


@dataclass(frozen=True, slots=True)
class Tools:
    """What an agent can ask; the docstrings are the descriptions that it reads."""

    log_dir: Path

    def runs(self, tokens: int = TOKENS) -> str:
        """The recorded runs of the log directory, newest first."""

        def shape(found: dict[str, Any]) -> dict[str, Any]:
            return {"log_dir": found["log_dir"], "runs": found["runs"][::-1]}

        return self._answer(["ls", "--json", str(self.log_dir)], shape, tokens)

    def verdict(self, run: str = "", tokens: int = TOKENS) -> str:
        """Why the job is slow or died: causes, gain without each, what to do, what is not known."""
        return self._answer(["verdict", "--json", self._path(run)], _verdict, tokens)

    def ledger(self, run: str = "", account: str = "", tokens: int = TOKENS) -> str:
        """Where the time of a step goes, largest gain first; all about one account by its handle.

        at: the line of the job's code. ranks: empty for all. gain_ms: how much shorter the mean
        step would be without the account.
        """

        def shape(found: dict[str, Any]) -> Any:  # noqa: ANN401
            return _account(found, account) if account else _ledger(found)

        return self._answer(["verdict", "--json", self._path(run)], shape, tokens)

    def lines(
        self, run: str = "", rank: int | None = None, phase: str = "", tokens: int = TOKENS
    ) -> str:
        """Lines of the job's code by sampled time; phase: forward, backward, worker, ...

        self_ratio: share of the samples of that phase in which the line was the innermost.
        """
        words = ["verdict", "lines", "--json", self._path(run)]
        words += [] if rank is None else [f"--rank={rank}"]
        words += [f"--phase={phase}"] if phase else []
        return self._answer(words, _lines, tokens)

    def ranks(self, run: str = "", rank: int | None = None, tokens: int = TOKENS) -> str:
        """All ranks: steps, time split, counters; or one rank over time, and its slowest steps."""
        if rank is None:
            return self._answer(["verdict", "overview", "--json", self._path(run)], _ranks, tokens)
        words = ["verdict", "rank", "--json", self._path(run), f"--rank={rank}"]
        return self._answer(words, _ranks, tokens)

    def compare(self, before: str, after: str, tokens: int = TOKENS) -> str:
        """Two runs or two traces: slower or not, by which accounts; was the promised gain true.

        promise: the gain that the verdict of `before` named, and what came of it.
        """
        words = ["compare", "--json", self._path(before), self._path(after)]
        return self._answer(words, _comparison, tokens)

    def trace(
        self, question: Question, run: str = "", detail: str = "", steps: str = "",
        tokens: int = TOKENS,
    ) -> str:  # fmt: skip
        """Questions to traces of torch.profiler, of a run or a folder.

        detail: of `tables` which (kernels, launches, single-launches, annotations,
        annotation-kernels, sequences); of `what-if` what is faster (kernel=NAME:2, loader, ...).
        steps: profiler steps A:B.
        """
        if detail == "counter-traces":
            return cannot_answer("counter-traces writes files, and these tools only read",
                                 "haiprof trace tables counter-traces TRACES")  # fmt: skip
        words = ["trace", question, "--json"]
        words += [f"--faster={detail}"] if detail and question == "what-if" else []
        words += [f"--steps={steps}"] if steps and question not in _UNSTEPPED else []
        words += ["--", *([detail or "kernels"] if question == "tables" else []), self._path(run)]
        return self._answer(words, _without("segments"), tokens)

    def sql(self, statement: str = "", run: str = "", limit: int = 50, tokens: int = TOKENS) -> str:
        """One select over the tables of a run or of traces; no statement: tables and columns."""
        words = ["trace", "query", "--json"]
        if not statement:
            return self._answer([*words, "--schema", self._path(run)], _schema, tokens)
        words += [f"--limit={limit}", "--", self._path(run), statement]
        return self._answer(words, _sql_rows, tokens, plain=True)

    def _path(self, run: str) -> str:
        """What a command gets for a run: never an option, as it begins with a slash."""
        if is_address(run):
            return run  # which is refused
        below = self.log_dir / run
        return str(below if below.exists() else Path(run).absolute())

    def _answer(self, words: list[str], shape: Shape, tokens: int, *, plain: bool = False) -> str:
        """The answer of a command, in a process of its own: it may be ended, and owns its stdout.

        `shape` says what is kept of its JSON; `plain` columns keep their names and units.
        """
        if any(is_address(word) for word in words):
            return cannot_answer("addresses are not fetched for an agent",
                                 "haiprof copy ADDRESS DIR, and name the folder")  # fmt: skip
        with tempfile.TemporaryFile() as stdout:
            try:
                done = subprocess.run(
                    own_command(*words), stdin=subprocess.DEVNULL, stdout=stdout,
                    stderr=subprocess.PIPE, timeout=_LIMIT_S, check=False,
                )  # fmt: skip
            except subprocess.TimeoutExpired:
                return cannot_answer(f"it took longer than {_LIMIT_S} s", "ask for fewer steps")
            if done.returncode:
                return _refusal(done.stderr.decode("utf-8", "replace"), done.returncode)
            if stdout.tell() > _LIMIT_BYTES:
                return cannot_answer("the whole answer is too large", "ask for fewer steps")
            stdout.seek(0)
            found = shape(json.load(stdout))
        if isinstance(found, str):
            return cannot_answer(found, "the tools verdict and runs say what was recorded")
        return fit_answer(found if plain else in_ms(found), tokens)


def cannot_answer(why: str, do: str) -> str:
    """The one shape of an answer that there is not."""
    return _dump({"cannot_answer": f"because {why}", "do": do})


def _refusal(stderr: str, status: int) -> str:
    """The error of a command and its hint."""
    found = {"error": f"the command ended with status {status}",
             "hint": "the tool runs lists the recordings"}  # fmt: skip
    for line in stderr.splitlines():
        kind, mark, text = line.removeprefix("haiprof: ").partition(": ")
        if mark and kind in found:
            found[kind] = text[:_TEXT_LENGTH]
    return cannot_answer(found["error"], found["hint"])


def fit_answer(found: Any, tokens: int) -> str:  # noqa: ANN401 - any JSON value
    """The answer in at most so many tokens: lists are cut from the end, and say so."""
    for length in _LENGTHS:
        left_out: dict[str, int] = {}
        answer = {"answer": _shorten(found, length, "", left_out)}
        text = _dump({**answer, "left_out": left_out} if left_out else answer)
        if token_count(text) <= max(tokens, _LEAST_TOKENS):
            return text
    return cannot_answer(f"the answer has more than {tokens} tokens at its shortest",
                         f"tokens={token_count(text)}, or ask for a part")  # fmt: skip


def token_count(text: str) -> int:
    """About how many tokens a model reads, rather too many than too few.

    Byte-pair encodings split words from digits and signs first, and digits in groups of three.
    """
    return sum(
        1 if piece.isdigit()
        else -(-len(piece) // (_LETTERS_PER_TOKEN if piece.isalpha() else _SIGNS_PER_TOKEN))
        for piece in _PIECE.findall(text)
    )  # fmt: skip


def _shorten(value: Any, length: int, name: str, left_out: dict[str, int]) -> Any:  # noqa: ANN401
    """A value with short lists and texts; what is not known is left out, but not from rows."""
    if isinstance(value, Mapping):
        whole = {
            key: _shorten(inner, _LENGTHS[0] if key == "columns" else length,
                          f"{name}.{key}".lstrip("."), left_out)
            for key, inner in value.items()
        }  # fmt: skip
        return {key: inner for key, inner in whole.items() if inner is not None and inner != ""}
    if isinstance(value, list):
        if len(value) > length:
            left_out[name] = left_out.get(name, 0) + len(value) - length
        rows = [  # a row of a table is whole: a column must not be lost
            _shorten(inner, len(inner) if isinstance(inner, list) else length, name, left_out)
            for inner in value[:length]
        ]
        if len(rows) > 2 and all(isinstance(row, dict) for row in rows):  # names once, not in each
            columns = list(dict.fromkeys(name for row in rows for name in row))
            return {"columns": columns, "rows": [[row.get(n) for n in columns] for row in rows]}
        return rows
    if isinstance(value, str) and len(value) > _TEXT_LENGTH:
        return f"{value[:_TEXT_LENGTH]}..."
    if isinstance(value, float):
        return round(value) if abs(value) >= 10_000 else float(f"{value:.4g}")
    return value


def in_ms(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Durations in ms, also those in a mapping `..._ns`; points in time stay in ns."""
    if isinstance(value, list):
        return [in_ms(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    found = {}
    for key, inner in value.items():
        several = inner.values() if isinstance(inner, Mapping) else [inner]
        if key.endswith("_ns") and all(
            isinstance(one, (int, float)) and abs(one) < _LONGEST_NS for one in several
        ):
            whole = isinstance(inner, Mapping)
            inner = {n: one and one / 1e6 for n, one in inner.items()} if whole else inner / 1e6
            key = f"{key[:-3]}_ms"
        found[key] = in_ms(inner)
    return found


def _dump(value: Any) -> str:  # noqa: ANN401
    """JSON in one line, without spaces; what is not ASCII is escaped."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _without(*names: str) -> Shape:
    return lambda found: {key: value for key, value in found.items() if key not in names}


def _verdict(found: dict[str, Any]) -> dict[str, Any]:
    """Causes with handles of their accounts; of traces the ledger's first entries instead."""
    ledger = found["ledger"]
    kept = ("run", "path", "headline", "death", "goodput", "work", "machine", "late", "operators",
            "device_name", "memory_at_end", "notes", "not_measured", "next_command")  # fmt: skip
    causes = [
        {
            **{key: finding[key] for key in ("title", "severity", "confidence", "ranks")},
            **({} if finding["gain"] is None else {
                "step_without_it_ns": finding["gain"]["left_ns"],
                "low_ns": finding["gain"]["low_ns"], "high_ns": finding["gain"]["high_ns"]}),
            "at": [_location(line) for line in finding["code_lines"]],
            "do": finding["remedy"], "missing": finding["missing"],
            "account": None if finding["account"] is None else handle(ledger[finding["account"]]),
        }
        for finding in found.get("findings", [])
    ]  # fmt: skip
    step = _step(found)
    largest = [] if "findings" in found else _ledger_rows(found)[:3]
    not_judged = {each["slug"]: each["why"] for each in found.get("abstained", [])}
    answer = {key: found.get(key) for key in kept[:3]} | {"step": step, "causes": causes}
    answer |= {"largest": largest} | {key: found.get(key) for key in kept[3:]}
    return answer | {"not_judged": not_judged}


def _step(found: dict[str, Any]) -> dict[str, Any]:
    step = found["step"] or {}
    return {"positions_ns" if key == "positions" else key: value for key, value in step.items()}


def _ledger(found: dict[str, Any]) -> Any:  # noqa: ANN401
    step = _step(found)
    if not found["ledger"]:
        why = "; ".join(step.get("missing") or [found["headline"]])
        return f"there is no ledger: {why}"
    return {"headline": found["headline"], "step": step, "accounts": _ledger_rows(found)}


def _ledger_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    mean_ns = found["step"]["mean_ns"]
    return [
        {
            "account": handle(each), "position": each["position"], "activity": each["activity"],
            "at": _location(each) or each["package"], "ranks": each["ranks"],
            "time_ns": each["ns_per_step"],
            "share": each["ns_per_step"] / mean_ns if mean_ns else None,
            **{name: each[name] for name in ("gain_ns", "gain_low_ns", "gain_high_ns", "when")},
        }
        for each in found["ledger"]
    ]  # fmt: skip


def _account(found: dict[str, Any], account: str) -> Any:  # noqa: ANN401
    """One entry of the ledger whole, and the causes that name it."""
    for number, each in enumerate(found["ledger"]):
        if handle(each) == account:
            keys = ("title", "severity", "confidence", "evidence", "remedy", "missing")
            causes = [{key: finding[key] for key in keys} for finding in found.get("findings", [])
                      if finding["account"] == number]  # fmt: skip
            remedy = (found.get("explanations") or {}).get(each["explanation"] or "")
            renamed = {"time_ns" if k == "ns_per_step" else k: v for k, v in each.items()}
            return {"account": account, **renamed, "do": remedy, "causes": causes,
                    "step_ns": found["step"]["mean_ns"]}  # fmt: skip
    known = ", ".join(handle(each) for each in found["ledger"][:20])
    return f"no account is called {account}; there are {known or 'none'}"


def handle(account: dict[str, Any]) -> str:
    """The name of an account: the same in each answer on the run, also while the run grows."""
    keys = ("ranks", "position", "activity", "package", "file", "line", "function", "callees")
    text = repr([account[key] for key in keys])
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=3).hexdigest()


def _location(entry: dict[str, Any]) -> str:
    """`train.py:15 Batches.__getitem__`; empty where no line is known."""
    parts = [entry["function"] or ""]
    if entry["file"]:
        name = Path(entry["file"]).name
        parts.insert(0, name if entry["line"] is None else f"{name}:{entry['line']}")
    return " ".join(part for part in parts if part)


def _lines(found: dict[str, Any]) -> Any:  # noqa: ANN401
    if not found["lines"]:
        return "; ".join(found["notes"]) or "no line of the job's code was sampled"
    kept = ("rank", "worker", "phase", "position", "self_ratio", "inclusive_ratio",
            "sample_count", "time_ns")  # fmt: skip
    rows = [
        {"at": _location(line), **{name: line[name] for name in kept},
         "per_step_ns": line["ns_per_step"]}
        for line in found["lines"]
        if line["self_count"]
    ]  # fmt: skip
    rows.sort(key=lambda row: row["time_ns"] or 0, reverse=True)
    return {"lines": rows, "notes": found["notes"]}


def _comparison(found: dict[str, Any]) -> dict[str, Any]:
    """Two runs: accounts as their titles and numbers; two traces: as they are."""
    if "accounts" not in found:
        return found
    kept = ("title", "before_ns", "after_ns", "difference_ns", "is_certain")
    shorter: dict[str, Any] = {key: [{name: one[name] for name in kept} for one in found[key]]
               for key in ("accounts", "positions", "ranks")}  # fmt: skip
    promise = found["promise"]
    if promise:
        titles = [found["accounts"][row]["title"] for row in promise["accounts"]]
        shorter["promise"] = {**promise, "accounts": titles}
    return found | shorter


def _ranks(found: dict[str, Any]) -> dict[str, Any]:
    """Without the values of series over time: the tool sql has them."""
    series = [_without("values")(each) for each in found.get("series", [])]
    return {**found, "series": series}


def _sql_rows(found: dict[str, Any]) -> dict[str, Any]:
    names = [column["name"] for column in found["columns"]]
    rows = [[row[name] for name in names] for row in found["rows"]]
    return {"columns": names, "rows": rows, "row_count": found["row_count"]}


def _schema(found: dict[str, Any]) -> dict[str, Any]:
    return {"tables": {
        name: {"meaning": table["meaning"], "columns": [each["name"] for each in table["columns"]]}
        for name, table in found["tables"].items()
    }}  # fmt: skip
