"""A page as HTML, of a run or of traces: one self-contained file, or with its parts beside it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, Template
from markupsafe import Markup

from haiprof.base.errors import HaiprofError
from haiprof.base.ledger import position_words
from haiprof.base.safe_files import file_size, output_file
from haiprof.base.units import MISSING, SPACES, bytes_text, duration_text, visible
from haiprof.base.version import __version__
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.show import text
from haiprof.show.card import abstentions, cost_text, gain_text
from haiprof.show.figures.style import FONT, write_text
from haiprof.show.flame import RunFlames, other_run, run_flames
from haiprof.show.page.content import PageContent, page_content
from haiprof.show.page.counter_data import json_for_script, squeeze
from haiprof.show.page.ledger_part import device_part
from haiprof.show.page.run_sections import page_pictures, report_tables
from haiprof.show.run_header import RunHeader, manifest_or_none, run_header
from haiprof.show.text import by_reason, count_text, printable
from haiprof.trace_analysis.device_verdict import device_ledger
from haiprof.trace_analysis.files import fault_lines
from haiprof.trace_analysis.questions.all_ranks import TraceQuestions
from haiprof.trace_analysis.report import TraceReport
from haiprof.trace_format.launch_checks import EVERYTHING

STATIC = Path(__file__).parent / "static"
_SCRIPTS = ("units.js", "tables.js", "time.js", "live.js", "flame.js", "page.js")
_OVERVIEW = ("verdict", "death", "overview", "ranks", "rank", "phases", "counters", "memory",
             "collectives")  # fmt: skip
_RANK = ("rank", "lines", "ranks", "phases")
_ROW_PX, _FRAME_PX, _LEAST_PX, _MOST_PX = 14, 60, 220, 720
# Plotly sets styles on its elements; scripts are those of the page, by their hash.
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; "
    "form-action 'none'; script-src {}"
)

_UNIT = re.compile(r"(?<=\d) (?=%|[nµm]?s\b|[KMGT]iB\b)")
"""Where no line may be broken: between a number and its unit."""

_FILTERS = (text.printable, text.value_text, text.moment_text, text.steps_text,
            text.share_text, position_words, gain_text, duration_text, bytes_text)  # fmt: skip
"""What templates have under these names."""
Link = Callable[[Path], str]  # Address at which a trace opens in Perfetto; empty for none


def write_report(content: PageContent, path: Path, *, below: Path | None = None) -> Path:
    """Writes the page as one self-contained file; returns its path."""
    return write_text(path, report_html(content), below=below)


def report_html(
    content: PageContent, *, only: Collection[str] | None = None, rank: int | None = None
) -> str:
    """The page with plotly, its own script and all numbers inside; it needs no network."""
    return _render(content, only=only, rank=rank, **_inside(content.data, with_plotly=True))


def lines_html(flames: RunFlames, header: RunHeader) -> str:
    """The flame graph alone, as a page that needs no network."""
    data = {"flame": flames.graph.as_json()}
    return _template("lines.html").render(
        header=header, sections=[("lines", "Lines of your code")], flames=flames,
        version=__version__, **_inside(data, with_plotly=False),
    )  # fmt: skip


def write_lines_page(analyzer: RunFrames, path: Path, *, baseline: str | None = None) -> Path:
    """Writes the flame graph of a run alone; returns its path."""
    flames = run_flames(analyzer, other_run(analyzer, baseline) if baseline else None)
    header = run_header(analyzer.run, manifest_or_none(analyzer.run))
    return write_text(path, lines_html(flames, header))


def page_part(
    analyzer: RunFrames, *, rank: int | None = None, only: Collection[str] | None = None,
    baseline: str | None = None,
) -> str:  # fmt: skip
    """The sections of the page about the whole job, about one rank first, or those named."""
    content = page_content(analyzer, read_traces=False, baseline=baseline)
    return report_html(content, only=only or (_OVERVIEW if rank is None else _RANK), rank=rank)


def _inside(data: Mapping[str, Any], *, with_plotly: bool) -> dict[str, Any]:
    """What a page holds that has no server: its style, its scripts and its numbers."""
    # Own files and base64 are `Markup`, which stands in the page as it is.
    script, numbers = page_js(), squeeze(json_for_script(data))
    allowed = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in ([script, plotly_js()] if with_plotly else [script])
    ]
    packed = _squeezed_plotly() if with_plotly else ""
    return {
        "live": False, "policy": _POLICY.format(" ".join(allowed)),
        "style": Markup(static_text("page.css")), "script": Markup(script),
        "plotly": Markup(packed), "data": Markup(numbers),
        "size": bytes_text(len(script) + len(packed) + len(numbers)),
    }  # fmt: skip


def served_html(content: PageContent, link: Link) -> str:
    """The page whose parts the server has beside it."""
    return _render(content, live=True, link=link)


def static_text(name: str) -> str:
    """A file that came with haiprof."""
    return (STATIC / name).read_text(encoding="utf-8")


def page_js() -> str:
    """The page's own script."""
    return "".join(map(static_text, _SCRIPTS))


@cache
def plotly_js() -> str:
    """Plotly's script, from its package."""
    spec = find_spec("plotly")
    folder = Path(str(spec.origin)).parent if spec else Path()
    return (folder / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


@cache
def _squeezed_plotly() -> str:
    return squeeze(plotly_js())


def _render(
    content: PageContent, *, link: Link = lambda _: "", only: Collection[str] | None = None,
    rank: int | None = None, **parts: Any,  # noqa: ANN401
) -> str:  # fmt: skip
    sections = [one for one in _sections(content) if only is None or one[0] in only]
    windows = [
        [{"name": path.name, "size": file_size(path), "link": link(path)} for path in files]
        for files in content.windows
    ]
    verdict = content.verdict
    known = content.data["map"]
    rank_count = len(known["ranks"]) if known else 0
    return _template("page.html").render(
        c=content, header=content.header, chosen_rank=rank, windows=windows, sections=sections,
        shown={name for name, _ in sections}, folded=True,
        first=verdict.findings[0] if verdict.findings and not content.death else None,
        abstained=abstentions(verdict), cost=cost_text(verdict.cost),
        parts=[name for name, ms in known["typical_ms"].items() if ms is not None] if known else [],
        map_height=min(_MOST_PX, max(_LEAST_PX, _ROW_PX * rank_count + _FRAME_PX)),
        version=__version__, **parts,
    )  # fmt: skip


@cache
def _template(name: str) -> Template:
    """A page; everything put into it is escaped, but for the page's own files."""
    environment = Environment(
        loader=FileSystemLoader(STATIC), autoescape=True, finalize=_escape_value,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(
        {each.__name__: each for each in _FILTERS},
        unbroken=lambda line: _UNIT.sub("\N{NO-BREAK SPACE}", line),
        with_code=_with_code,
        by_reason=lambda pairs: by_reason(dict(pairs)),
    )
    environment.globals["zip"] = zip
    environment.globals["missing"] = MISSING
    return environment.get_template(name)


def _escape_value(value: object) -> object:
    """Escapes a value for the page; its own files are marked as such and stay unchanged."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return visible(str(value), keep=SPACES) if is_text else value


def _with_code(line: str) -> object:
    """Text whose words between backticks are shown as code."""
    parts = visible(line, keep=SPACES).split("`")
    if len(parts) % 2 == 0:
        return line
    shown = (Markup("<code>{}</code>").format(part) if place % 2 else Markup.escape(part)
             for place, part in enumerate(parts))  # fmt: skip
    return Markup().join(shown)


def _sections(content: PageContent) -> list[tuple[str, str]]:
    """Id and title of the sections that have something to show."""
    memory, traces = content.memory, content.traces
    pictures = [each for each in traces.pictures if each.name != "trace-memory"]
    kernels = any(table.rows for table in traces.kernels)
    sections: Sequence[tuple[str, str, object]] = (
        ("verdict", "Verdict", True),
        ("device", "GPUs' time", content.device),
        ("death", "The end", content.death),
        ("comparison", "Comparison", content.comparison),
        ("overview", "Overview", content.has_ranks),
        ("ranks", "Ranks over time", len(content.ranks.rows) > 1),
        ("rank", "One rank" if content.has_ranks else "Steps", content.data["steps"]),
        ("lines", "Lines of your code", not content.flames.missing),
        ("phases", "Phases", content.verdict.step_count),
        ("counters", "Counters", content.data["counters"]["panels"] or memory.data["panels"]),
        ("memory", "Memory", memory.gpu.rows or memory.held.rows or traces.memory),
        ("collectives", "Collectives", content.late.rows or content.collectives.rows),
        ("kernels", traces.title, pictures or kernels or traces.notes),
        ("operators", "Operators", traces.operators),
        ("functions", "Functions", traces.functions),
        ("traces", "Traces", content.windows or content.verdict.traces),
        ("snapshots", "Snapshots", content.snapshots),
        ("environment", "Environment", True),
    )
    return [(name, title) for name, title, is_there in sections if is_there]


def write_trace_page(
    report: TraceReport, traces: TraceQuestions, path: Path, *, force: bool
) -> None:
    """Writes `trace_page_html` into a file; one that exists is replaced only with `force`."""
    with output_file(path, force=force) as file:
        file.write(trace_page_html(report, traces).encode())


def trace_page_html(report: TraceReport, traces: TraceQuestions) -> str:
    """Pictures and tables of traces as a page that needs no network."""
    pictures, missing = page_pictures(traces, report.steps)
    try:
        part = device_part(device_ledger(report.path))
    except HaiprofError as error:
        part = None
        missing = (*missing, ("verdict", str(error)))
    events = count_text(int(report.tables["files"]["event_count"].sum()), "event")
    facts = f"{count_text(len(report.ranks), 'rank')} · {events}"
    reasons = [(name.replace("_", " "), why) for name, why in report.missing.items()]
    data = {"style": {"font": FONT}, "figures": {each.name: each.figure for each in pictures}}
    return _template("trace.html").render(
        header={"name": report.path.name, "facts": facts},
        sections=[*([("verdict", "Verdict")] if part else []), ("pictures", "Pictures"),
                  ("tables", "Tables")],
        part=part, version=__version__, faults=fault_lines(report.tables["checks"], EVERYTHING),
        pictures=pictures, tables=report_tables(report),
        missing=[(what, printable(why)) for what, why in [*missing, *reasons]],
        notes=[printable(note) for note in report.notes], **_inside(data, with_plotly=True),
    )  # fmt: skip
