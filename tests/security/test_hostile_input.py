"""Files and questions that somebody made to harm the reader: bounded cost, and no way out."""

from __future__ import annotations

import gzip
import json
import random
import socket
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from rich.table import Table

from haiprof.base.errors import TraceFormatError, UsageError
from haiprof.base.messages import print_message
from haiprof.cli import main
from haiprof.cli.output import Output, json_text
from haiprof.show.card import view_text
from haiprof.trace_analysis.memory_timeline import memory_by_category
from haiprof.trace_analysis.sql import SqlTable, ask, sql_tables
from haiprof.trace_format.execution import load_execution_trace
from haiprof.trace_format.find import rank_of
from haiprof.trace_format.flight_recorder import read_flight
from haiprof.trace_format.kineto.load import read_trace
from tests.unit.analysis.trace.shared import event, kernel, launch, rank_file, step
from tests.unit.report.many_ranks import write_flight, write_many

# OSC 8 (a link), OSC 52 (the clipboard), CSI as one C1 character, right to left, zero width, a tag
# character, half a surrogate pair, rich's own markup.
HOSTILE = (
    "\x1b]8;;http://evil\x1b\\gemm\x1b]52;c;eA==\x07\x9b31m\u202egpj\u2066\u200b\U000e0041\udc80"
    "[link=http://evil]x[/link][/bold]:bomb:"
)


def steers(text: str) -> list[str]:
    """What in a text is not for eyes."""
    return [c for c in text if not c.isprintable() and c not in "\n\xa0\u202f"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ---- SQL ----

SPELLINGS = (
    "read_csv({})", "READ_CSV ({})", '"read_csv"({})', "`read_csv`({})", "'read_csv'({})",
    "read_csv/**/({})", "read_csv--\n({})", "'read_csv'/* /* */ */({})", "[read_csv]({})",
    "(read_csv({}))", "('read_csv'({}))", "gpu, 'read_csv'({})", "gpu join 'read_csv'({}) on true",
    "gpu as limit, 'read_csv'({})", "gpu g, lateral 'read_csv'({})", "'read_parquet'({})",
    "'read_ipc'({})", "'read_json'({})", "'read_ndjson'({})", "table('read_csv'({}))",
    "U&'\\0072ead_csv'({})", "$$read_csv$$({})", "E'read\\x5fcsv'({})", "{{fn read_csv({})}}",
    "scan_csv({})", "glob({})", "delta_scan({})", "as 'read_csv'({})", "pl.read_csv({})",
    "pl.'read_csv'({})",
)  # fmt: skip
FORMS = (
    "select * from {}", "explain select * from {}", "with x as (select * from {}) select * from x",
    "select rank from gpu where rank in (select * from {})", "from {}", "table {}",
    "select * from gpu union all select * from {}", "explain analyze select * from {}",
    "select extract(year from (select * from {})) from gpu",
    "select rank is distinct from {} from gpu", "select rank from gpu; select * from {}",
)  # fmt: skip


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, SqlTable]:
    rank_file(
        tmp_path, 0, [step(3, 0, 100), launch(7, 5, 2), kernel("gemm", 10, 10, correlation=7)]
    )
    return sql_tables(tmp_path)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        yield listening


def answer(tables: dict[str, SqlTable], sql: str) -> str:
    """What the asker gets to see."""
    try:
        return str(ask(tables, sql).rows())
    except UsageError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_sql_tells_nothing_of_files(
    tables: dict[str, SqlTable], tmp_path: Path, spelling: str
) -> None:
    there, absent = tmp_path / "there.csv", tmp_path / "absent.csv"
    there.write_text("name,value\nopensesame,1\n")
    for form in FORMS:
        said = [answer(tables, form.format(spelling.format(f"'{p}'"))) for p in (there, absent)]
        assert said[0].startswith("refused"), form
        assert said[0].replace("there", "") == said[1].replace("absent", ""), form
        assert "opensesame" not in said[0]


def test_sql_asks_no_network(tables: dict[str, SqlTable], server: socket.socket) -> None:
    port = server.getsockname()[1]
    for form in FORMS:
        for spelling in SPELLINGS:
            answer(tables, form.format(spelling.format(f"'http://127.0.0.1:{port}/x.csv'")))
    with pytest.raises(TimeoutError):
        server.accept()


@pytest.mark.parametrize(("sql", "expected"), [
    ("select count(*) from gpu", [(1,)]),
    ("-- a comment (\nselect /* and /* one */ inside */ name from gpu", [("gemm",)]),
    ("explain select name from gpu where dur_ns > 0", None),
    ("select g.name, r.name from gpu as g join runtime r using (correlation)", None),
    ("select name from gpu where name in ('gemm', 'it''s') and name not in ('x')", [("gemm",)]),
    ("select name from python where name like '%read_csv(%'", []),
    (r"select name from gpu where name similar to 'ge\w+'", None),
    ("with a as (select * from gpu), b as (select * from a) select count(*) from b", [(1,)]),
    ('select sum(dur_ns) as "total (ns)", max(dur_ns)::float from gpu group by (rank)', None),
    ("select row_number() over (partition by rank order by ts_ns) from gpu", None),
    ("select cast(dur_ns as decimal(10, 2)) from gpu", None),
    ("select substring(name, 1, 2) from gpu", [("ge",)]),
    ("select rank from gpu where rank = any(select rank from runtime)", [(0,)]),
    ("select * from unnest([1,2]) as t(x)", [(1,), (2,)]),
    ("(select rank from gpu) union all (select rank from gpu)", [(0,), (0,)]),
    ("select `name` from gpu as x", [("gemm",)]),
    ("select 1e3, .5, -1, 0.25 from gpu", None),
])  # fmt: skip
def test_sql_that_asks_is_answered(
    tables: dict[str, SqlTable], sql: str, expected: list[object] | None
) -> None:
    if expected is not None:
        assert ask(tables, sql).rows() == expected
    else:
        assert not answer(tables, sql).startswith("refused: SQL reads")


# ---- terminals ----


def test_no_view_steers_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(HOSTILE, title=HOSTILE)
    table.add_row(HOSTILE)
    Output().show(lambda _: table, {})
    Output().hint(HOSTILE)
    print_message(f"recording {HOSTILE}")
    shown = capsys.readouterr()
    assert not steers(shown.out + shown.err)
    assert "[link=http://evil]x[/link]" in shown.out.replace("\n", "")
    assert not steers(view_text(table, width=80))


def test_json_for_scripts_is_safe_on_a_terminal_and_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = json_text({"name": HOSTILE})
    assert json.loads(text) == {"name": HOSTILE}
    assert not steers(text)
    Output(json=True).show(lambda _: "", {"name": HOSTILE})
    assert json.loads(capsys.readouterr().out) == {"name": HOSTILE}


def test_names_in_a_trace_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = HOSTILE.replace("\udc80", "")
    events = [step(1, 0, 100), step(2, 100, 100), event(name, "cpu_op", 3, 10), launch(5, 5),
              kernel(name, 10, 20, correlation=5), launch(6, 105),
              kernel(name, 110, 20, correlation=6),
              event(name, "python_function", 1, 90)]  # fmt: skip
    rank_file(tmp_path, 0, events)
    for command in ("trace-report", "functions", "critical-path", "what-if", "memory-timeline"):
        main([command, str(tmp_path)])
    main(["trace-diff", str(tmp_path), str(tmp_path)])
    main(["query", str(tmp_path), f"select name, '{name}' as \"{name}\" from gpu"])
    shown = capsys.readouterr()
    assert "gemm" in shown.out
    assert not steers(shown.out + shown.err)


def test_names_in_a_run_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_many(tmp_path / "run", ranks=2, steps=40, host="node")
    write_flight(root, ranks=2, late_rank=1, late_ns=9_000_000)
    for path in [*root.glob("ranks/*/rank.json"), *root.glob("nodes/*/agent.json")]:
        facts = json.loads(path.read_text())
        new = {name: HOSTILE for name, value in facts.items() if isinstance(value, str)}
        path.write_text(json.dumps({**facts, **new, "argv": [HOSTILE], "notes": [HOSTILE]}))
    manifest = json.loads((root / "run.json").read_text())
    manifest |= {"name": HOSTILE, "command": [HOSTILE], "host": HOSTILE, "cwd": HOSTILE}
    manifest |= {"hook_failures": [HOSTILE], "unreported": [
        {"pid": 1, "command": HOSTILE, "reason": HOSTILE, "remedy": HOSTILE}]}  # fmt: skip
    (root / "run.json").write_text(json.dumps(manifest))
    for words in (["list", str(tmp_path)], ["overview", str(root)], ["rank", str(root), "0"],
                  ["verdict", str(root)],
                  ["report", str(root), "-o", str(tmp_path / "r.html")]):  # fmt: skip
        assert main(words) in (0, 5), words
    shown = capsys.readouterr()
    for form in ("csv", "prometheus", "otlp-json"):
        assert main(["export", str(root), "--format", form, "-o", str(tmp_path / form)]) == 0, form
    assert "run" in shown.out
    assert not steers(shown.out + shown.err)


def test_pages_and_pictures_of_a_run_turn_no_text_around(tmp_path: Path) -> None:
    name = "no\u202ede\x9b\u2066"
    root = write_many(tmp_path / "run", ranks=2, steps=40, host=name)
    manifest = json.loads((root / "run.json").read_text())
    manifest |= {"name": name, "command": [name], "cwd": name}
    (root / "run.json").write_text(json.dumps(manifest))
    pages = {kind: tmp_path / f"{kind}.html" for kind in ("overview", "rank", "report", "verdict")}
    assert main(["overview", str(root), "--html", str(pages["overview"])]) == 0
    assert main(["rank", str(root), "0", "--html", str(pages["rank"])]) == 0
    assert main(["report", str(root), "-o", str(pages["report"])]) == 0
    assert main(["verdict", str(root), "--svg", str(pages["verdict"])]) == 0
    for kind, path in pages.items():
        page = path.read_text()
        assert "no" in page
        assert not [mark for mark in ("\u202e", "\x9b", "\u2066") if mark in page], kind


# ---- values of a wrong kind, found by mutation ----


@pytest.mark.parametrize("value", [{}, [], None, "1", 1.5, 10**30])
def test_process_of_any_kind_in_the_manifest_names_no_rank(tmp_path: Path, value: object) -> None:
    root = write_many(tmp_path / "run", ranks=1, steps=5)
    (root / "traces").mkdir()
    rank_file(root / "traces", 0, [step(1, 0, 100), launch(5, 5), kernel("k", 9, 1, correlation=5)])
    (trace,) = (root / "traces").iterdir()
    path = trace.rename(trace.with_name("node_4711.pt.trace.json"))
    path.write_text(json.dumps({**json.loads(path.read_text()), "distributedInfo": None}))
    for row in ({"rank": 3, "pid": value}, {"rank": value, "pid": 4711}):
        manifest = json.loads((root / "run.json").read_text()) | {"ranks": [row]}
        (root / "run.json").write_text(json.dumps(manifest))
        assert rank_of(path, {}) is None
        assert main(["trace-report", str(root)]) in (0, 4, 5)


# ---- time and memory ----


def seconds_to_load(path: Path) -> float:
    """Processor time of reading a trace."""
    began = time.process_time()
    _, _, report = read_trace(path, lambda table, frame: None)
    assert report.event_count
    return time.process_time() - began


def operators(names: list[str]) -> bytes:
    events = [{"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 1, "ts": at, "dur": 1}
              for at, name in enumerate(names)]  # fmt: skip
    return json.dumps({"traceEvents": events}).encode()


def test_gzip_of_very_many_members_is_read_in_linear_time(tmp_path: Path) -> None:
    text = operators([f"op{number}" for number in range(800)])
    path = tmp_path / "rank0.json.gz"
    cut = [text[at : at + 3] for at in range(0, len(text), 3)]
    assert len(cut) > 18_000
    path.write_bytes(b"".join(gzip.compress(part, 1) for part in cut))
    assert seconds_to_load(path) < 4.0


@pytest.mark.parametrize("before", [b"", b'{"a":1,', b'{"a":"', b'{"traceEvents":[', b"["])
def test_very_many_blanks_are_read_in_linear_time(tmp_path: Path, before: bytes) -> None:
    text = operators(["op"]).removeprefix(b'{"traceEvents":')
    rest = {b"": b'{"traceEvents":' + text, b'{"a":1,': b'"traceEvents":' + text,
            b'{"a":"': b'","traceEvents":' + text}  # fmt: skip
    end = rest.get(before, text.strip()[1:] if before != b"[" else text.strip()[1:-1])
    path = tmp_path / "rank0.json"
    path.write_bytes(before + b" " * (16 << 20) + end)
    assert seconds_to_load(path) < 3.0


MULTIPLIER, SPREAD, WORD = 0xFF51AFD7ED558CCD, 0x9E3779B97F4A7C15, (1 << 64) - 1


def colliding_names(segments: int) -> list[str]:
    """2 ** segments names that one fixed hash puts in one place, as haiprof's once did.

    Each segment of 16 bytes has two forms that lead from one state to the same next one, so that
    any choice of forms ends in the same hash.
    """
    draw = random.Random(5)
    state, choices = (SPREAD + 16 * segments) & WORD, []
    for _ in range(segments):
        aim = draw.getrandbits(64)
        forms: list[str] = []
        while len(forms) < 2:
            first = bytes(draw.choices(b"abcdefghijklmnop", k=8))
            middle = ((state ^ int.from_bytes(first, "little")) * MULTIPLIER) & WORD
            second = ((middle ^ middle >> 32) ^ aim).to_bytes(8, "little")
            if all(32 <= byte < 127 and byte not in b'"\\' for byte in second):
                forms.append((first + second).decode())
        choices.append(forms)
        state = (aim * MULTIPLIER) & WORD
        state ^= state >> 32
    return ["".join(parts) for parts in product(*choices)]


def test_names_that_collide_take_no_longer_than_others(tmp_path: Path) -> None:
    hostile = colliding_names(15)
    assert len(set(hostile)) == 32_768
    draw = random.Random(7)
    usual = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=240)) for _ in hostile]
    seconds = {}
    for kind, names in (("usual", usual), ("hostile", hostile)):
        path = tmp_path / f"{kind}.json"
        path.write_bytes(operators(names))
        seconds[kind] = seconds_to_load(path)
    assert seconds["hostile"] < 4 * seconds["usual"] + 0.5


def bomb(path: Path, begin: bytes, filler: bytes, end: bytes = b"", *, megabytes: int) -> Path:
    """gzip of members, the same one again and again: made at once, a thousand to one."""
    megabyte = gzip.compress(filler * (1_000_000 // len(filler)), 9)
    path.write_bytes(gzip.compress(begin) + megabyte * megabytes + gzip.compress(end))
    assert path.stat().st_size < megabytes * 1_000_000 / 200
    return path


EVENT = b'{"ph":"X","cat":"cpu_op","name":"op","pid":1,"tid":1,"ts":1,"dur":1},' + b" " * 1931
READERS = (
    (lambda path: read_trace(path, lambda *_: None), b'{"traceEvents":[', EVENT),
    (memory_by_category, b"[", b"[1,1,1,1]," + b" " * 990),
    (load_execution_trace, b'{"schema":"1.1.1-chakra.0.0.4","nodes":[', b" "),
    (read_flight, b'{"traces":[', b" "),
)


@pytest.mark.parametrize(("read", "begin", "filler"), READERS, ids=["kineto", "memory", "et", "fr"])
def test_bomb_is_refused_with_the_limit_and_how_to_raise_it(
    tmp_path: Path, read: Callable[[Path], object], begin: bytes, filler: bytes
) -> None:
    path = bomb(tmp_path / "bomb.json.gz", begin, filler, megabytes=3000)
    with pytest.raises(TraceFormatError, match="MiB") as caught:
        read(path)
    assert str(path) in str(caught.value)
    assert "HAIPROF_UNPACK_LIMIT=" in caught.value.hint


def test_limit_of_unpacking_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bomb(tmp_path / "x.raw.json.gz", b"[", b" ", b"[0,2,8,1]]", megabytes=300)
    with pytest.raises(TraceFormatError, match="200 to one"):
        memory_by_category(path)
    monkeypatch.setenv("HAIPROF_UNPACK_LIMIT", "400")
    assert memory_by_category(path)["total_bytes"].to_list() == [8]
    monkeypatch.setenv("HAIPROF_UNPACK_LIMIT", "much")
    with pytest.raises(UsageError, match="HAIPROF_UNPACK_LIMIT=much"):
        memory_by_category(path)
