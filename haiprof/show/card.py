"""The verdict card: the cause, the numbers that prove it, what to do; saved, as Markdown."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from haiprof.base.errors import HaiprofError, convert_os_errors
from haiprof.base.ledger import position_words
from haiprof.base.safe_files import make_folder, write_file
from haiprof.base.units import digits_text, duration_text, ratio_text, visible
from haiprof.diagnosis.engine import STANDSTILL
from haiprof.diagnosis.traced_window import StepWork
from haiprof.diagnosis.verdict import Cost, Finding, Verdict, as_document
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.writer import write_json
from haiprof.show.figures.style import PHASE_COLORS, PHASES, time_unit, write_text
from haiprof.show.run_header import RunHeader, manifest_or_none, run_header
from haiprof.show.terminal import PHASE_OF, SafeConsole, SplitBar, filling
from haiprof.show.text import (
    by_reason,
    count_text,
    fine_ratio_text,
    flops_text,
    markdown_table,
    markdown_text,
    printable,
    steps_text,
    value_text,
)
from haiprof.show.views.deaths import account_text, death_block


def work_text(work: StepWork) -> str:
    """The whole, of one rank; MFU only where the device's peak is known."""
    least = "at least " if work.is_lower_bound else ""
    parts = [f"{least}{flops_text(work.model_flops)} a step", f"{flops_text(work.flops_per_s)}/s"]
    if work.mfu_ratio is not None:
        parts.append(f"MFU {ratio_text(work.mfu_ratio)}")
    return ", ".join(parts)


MAX_WIDTH = 100
_NOTE_LIMIT = 4
_BRIEF_EVIDENCE = 3
_BRIEF_OTHERS = 2
_MORE = "haiprof verdict with --all"
_SHOWN_RATIO = 0.002  # Positions with less of a step are left out of the brief card
_INSIDE = 6  # Columns of the card beside its content: its border and its padding
_AROUND_COMMAND = 16
"""Columns of the card beside the next command: its border, its margins and the label."""
_EVENT_NAMES = {"gc": "garbage collections", "save": "checkpoint saves"}
_DEVICE, _NO_GPU = "device time", "the ranks used no GPU"  # as `diagnosis.run_notes` has them
_NEVER = ("one rank", "torch.compile was not used")
_GPU_RULES = ("slow_kernels", "slow_link")
_HUNG = ("hang", "deadlock", "mismatch")  # Deaths that the headline tells, and the hang with them
_SEVERITY_STYLES = {"critical": "bold red", "warning": "bold yellow", "info": "bold cyan"}


def verdict_card(
    verdict: Verdict, run: RunHeader, *, width: int = MAX_WIDTH, everything: bool = False,
    folder: Path | None = None,
) -> RenderableType:  # fmt: skip
    """The card as the terminal shows it at the end of a run."""
    command = _next_command(verdict, folder)
    fits = len(command) <= min(width, MAX_WIDTH) - _AROUND_COMMAND
    inside = command if fits else ""
    parts = _whole(verdict, width, inside) if everything else _brief(verdict, width, inside)
    title = Text.assemble((" haiprof ", "bold"), (f" {run.name} ", ""), (f" {run.outcome} ", "dim"))
    title.truncate(min(width, MAX_WIDTH) - 8, overflow="ellipsis")
    card = Panel(
        Group(*parts), title=title, title_align="left",
        subtitle=None if everything else Text(f" {_MORE} ", style="dim"), subtitle_align="right",
        border_style="bright_black", padding=(1 if everything else 0, 2),
        width=min(width, MAX_WIDTH),
    )  # fmt: skip
    # Below the card it is one line, however narrow the terminal is: it can be copied.
    return card if fits else Group(card, Text(f"next: {command}", no_wrap=True, overflow="ignore"))


def _next_command(verdict: Verdict, folder: Path | None) -> str:
    """What to run next; a run below the folder is named from there."""
    if folder is None or not Path(verdict.run).is_relative_to(folder):
        return verdict.next_command
    short = str(Path(verdict.run).relative_to(folder))
    words = shlex.split(verdict.next_command)
    return shlex.join(short if word == verdict.run else word for word in words)


def _whole(verdict: Verdict, width: int, command: str) -> Iterator[RenderableType]:
    yield _headline(verdict)
    if verdict.death is not None:
        yield from (Text(), death_block(verdict))
    if verdict.step_count:
        yield from (Text(), *_split(verdict, width))
    for finding in verdict.findings:
        yield from (Text(), _finding(finding, titled=finding.title != verdict.headline))
    yield from _traced_device(verdict, width, everything=True)
    yield from (Text(), *_closing(verdict))
    if command:
        yield from (Text(), Text.assemble(("next  ", "dim"), (command, "bold")))


def _brief(verdict: Verdict, width: int, command: str) -> Iterator[RenderableType]:
    """About a dozen lines: headline, ledger, the largest opportunities, what to do next."""
    yield _headline(verdict)
    if verdict.death is not None:
        yield death_block(verdict)
    if verdict.step_count:
        yield from _split(verdict, width, brief=True)
    grid = _label_grid(overflow="fold")
    hung = verdict.death is not None and verdict.death.cause in _HUNG
    others = [each for each in verdict.findings if not (hung and each.rule == STANDSTILL)]
    if verdict.death is None and others and verdict.headline == others[0].title:
        first, *others = others
        for row in _reasons(first):
            grid.add_row(*row)
    for finding in others[:_BRIEF_OTHERS]:
        title = Text(printable(finding.title), style=_SEVERITY_STYLES[finding.severity])
        grid.add_row("also", title)
        first_row = finding is verdict.findings[0]
        advised = not verdict.death and (finding.severity != "info" or first_row)
        if advised:
            parts = [f"without it {gain_text(finding)}"] if finding.gain is not None else []
            parts += [f"at {printable(place.location)}" for place in finding.code_lines[:1]]
            grid.add_row("", Text("; ".join([*parts, finding.remedy]), style="dim"))
    if len(others) > _BRIEF_OTHERS:
        grid.add_row("also", Text(count_text(len(others) - _BRIEF_OTHERS, "smaller one")))
    rows = (("own work", _own_work(verdict)), ("noticed", verdict.reactions),
            ("traced", verdict.traces), ("NCCL", _nccl(verdict)),
            ("notes", _own_notes(verdict)))  # fmt: skip
    for label, lines in rows:
        # Where nothing is a problem, what the work is tells most.
        has_problem = any(each.severity != "info" for each in verdict.findings)
        is_all = label == "own work" and not has_problem
        for line in lines if is_all else lines[:1]:
            grid.add_row(label, Text(line, style="dim"))
    if command:
        grid.add_row("next", Text(command, style="bold"))
    yield from _traced_device(verdict, width)
    if grid.row_count:
        yield grid


def _own_work(verdict: Verdict) -> list[str]:
    return [printable(each.describe()) for each in verdict.own_work]


def _own_notes(verdict: Verdict) -> list[str]:
    """Notes that do not repeat what was not measured."""
    known = tuple(why for _, why in verdict.not_measured)
    return [note for note in verdict.notes if not note.endswith(known)]


def _fill_lines(parts: Sequence[Text], width: int) -> list[Text]:
    """As many whole parts on each line as fit: none is torn from its mark."""
    lines: list[Text] = []
    for part in parts:
        longer = Text("   ").join([lines[-1], part]) if lines else part
        if lines and longer.cell_len <= width:
            lines[-1] = longer
        else:
            lines.append(part)
    return lines


def _traced_device(
    verdict: Verdict, width: int, *, everything: bool = False
) -> Iterator[RenderableType]:
    """What the GPUs did with their time, where a window was traced."""
    if verdict.device is None:
        return
    from haiprof.show.views.device_ledger import device_ledger_view  # loads what reads traces

    inner = min(width, MAX_WIDTH) - _INSIDE
    yield from (Text(), device_ledger_view(
        verdict.device, "the traced window", width=inner, everything=everything
    ))  # fmt: skip


def _reasons(finding: Finding) -> Iterator[tuple[Text, Text]]:
    """The numbers that prove a finding, its line and its remedy, each with its label."""
    parts = [Text(f"without it {gain_text(finding)}")] if finding.gain is not None else []
    parts += [
        Text.assemble((f"{each.name} ", "dim"), value_text(each.value, each.unit))
        for each in finding.numbers[: _BRIEF_EVIDENCE - len(parts)]
    ]
    parts.append(Text(f"confidence {ratio_text(finding.confidence)}", style="dim"))
    style = _SEVERITY_STYLES[finding.severity]
    yield Text(finding.severity, style=style), Text(" · ", style="dim").join(parts)
    for line in finding.code_lines[:1]:
        yield Text("at"), Text(printable(line.describe()), style="bold")
    yield Text("do", style="bold green"), Text(finding.remedy)


def gain_text(finding: Finding) -> str:
    """`from 37.7 to 30.8 ms a step (29.9 to 31.6)`: what the step becomes without it."""
    gain = finding.gain
    if gain is None:
        return ""
    unit, ns = time_unit(gain.step_ns)
    times = (gain.left_ns, gain.low_ns, gain.high_ns)
    left, low, high = (digits_text(value / ns) for value in times)
    return f"from {digits_text(gain.step_ns / ns)} to {left} {unit} a step ({low} to {high})"


def _label_grid(**text: Any) -> Table:  # noqa: ANN401 - of rich's column
    """Rows of a short label and a text, whose further lines begin below its first."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(**text)
    return grid


def _headline(verdict: Verdict) -> Text:
    if verdict.death is not None:
        return Text(printable(verdict.headline), style=_SEVERITY_STYLES["critical"])
    if verdict.findings:
        first = verdict.findings[0]
        return Text(verdict.headline, style=_SEVERITY_STYLES[first.severity])
    return Text(verdict.headline, style="bold green" if verdict.step_count else "bold yellow")


def _split(verdict: Verdict, width: int, *, brief: bool = False) -> Iterator[RenderableType]:
    """The ledger in two lines: the bar and the positions; then what it is the mean of."""
    yield SplitBar(verdict.split)
    ledger = verdict.ledger
    unit, ns = time_unit(verdict.step_ns)
    positions = {} if ledger is None else ledger.positions
    # In the bar's order: what it draws as one piece stands together.
    shown = [
        (phase, name, value)
        for phase in PHASES
        for name, value in positions.items()
        if PHASE_OF.get(name, "other") == phase
        and (not brief or value >= _SHOWN_RATIO * (verdict.step_ns or 0.0))
    ]
    numbers = [
        Text.assemble(
            (filling(phase, colored=False), PHASE_COLORS[phase]),
            f" {position_words(name)} ",
            (digits_text(value / ns), "bold"),
        )
        for phase, name, value in shown
    ]
    median = "" if ledger is None else f" (median {digits_text(ledger.median_ns / ns)})"
    step = Text.assemble(
        (f"step {digits_text((verdict.step_ns or 0.0) / ns)} {unit}", "bold"), (median, "dim")
    )
    yield from _fill_lines([step, *numbers], min(width, MAX_WIDTH) - _INSIDE)
    of = "mean of " * (len(verdict.ranks) > 1)
    facts = [f"{of}{steps_text(verdict.step_count, len(verdict.ranks))}"]
    facts += [work_text(verdict.work)] if verdict.work else []
    if verdict.compile_ns:
        facts.append(f"{duration_text(verdict.compile_ns)} of compilation")
    facts += [
        f"{_EVENT_NAMES.get(kind, kind)}: {e.count} for {duration_text(e.total_ns)}"
        for kind, e in verdict.events.items()
        if not brief
    ]
    yield Text(" · ".join(facts), style="dim")
    if not brief and ledger is not None:
        yield _run_time(verdict)


def _run_time(verdict: Verdict) -> Text:
    """The whole run's wall time."""
    whole = sum(verdict.run_time.values())
    if not whole:
        return Text("the run's wall time is not known: it has not ended", style="dim")
    parts = [
        f"{account_text(name)} {duration_text(ns)}"
        for name, ns in verdict.run_time.items()
        if ns * 1000 >= whole
    ]
    return Text(f"run {duration_text(whole)}: {' · '.join(parts)}", style="dim")


def _finding(finding: Finding, *, titled: bool) -> RenderableType:
    """Its severity and numbers, and its title where that is not the headline."""
    head = Text()
    head.append(finding.severity, style=_SEVERITY_STYLES[finding.severity])
    if titled:
        head.append(f"  {finding.title}", style="bold")
    sure = f"confidence {ratio_text(finding.confidence)}".replace(" ", "\N{NO-BREAK SPACE}")
    head.append(f"  {sure}", style="dim")
    rows = Table.grid(padding=(0, 2, 0, 0))
    rows.add_column(overflow="fold")
    rows.add_column(justify="right", no_wrap=True)
    if finding.gain is not None:
        rows.add_row(Text("without it", style="dim"), Text(gain_text(finding)))
    for evidence in finding.numbers:
        rows.add_row(Text(evidence.name, style="dim"), value_text(evidence.value, evidence.unit))
    parts: list[RenderableType] = [
        head,
        Padding(rows, (0, 0, 0, 2)),
        *(
            _with_label("at", printable(line.describe()), style="bold")
            for line in finding.code_lines
        ),
        _with_label("do", finding.remedy),
    ]
    if finding.missing:
        parts.append(_with_label("not known", ", ".join(finding.missing), style="dim"))
    return Group(*parts)


def _with_label(label: str, text: str, *, style: str = "") -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_row(
        Text(f"  {label}:", style="bold green" if label == "do" else "dim"), Text(text, style=style)
    )
    return grid


def _nccl(verdict: Verdict) -> list[str]:
    return [] if verdict.nccl is None else list(verdict.nccl.lines())


def _closing(verdict: Verdict) -> Iterator[RenderableType]:
    grid = _label_grid(overflow="fold", style="dim")
    rules = abstentions(verdict)
    told = {why for _, why in rules}
    known = [row for row in verdict.not_measured
             if row[1] not in told and not is_foreign(verdict, *row)]  # fmt: skip
    notes = _own_notes(verdict)
    more = len(notes) - _NOTE_LIMIT
    rest = [f"and {more} more, in --json"] if more > 0 else []
    rows: list[tuple[str, Sequence[str]]] = [
        ("own work", _own_work(verdict)),
        ("noticed", verdict.reactions),
        ("traced", verdict.traces),
        ("NCCL", _nccl(verdict)),
        ("machine", [verdict.machine] if verdict.machine else []),
        ("not measured", [f"{what}: {why}" for what, why in known]),
        ("not evaluated", [f"{names}: {why}" for names, why in rules]),
        ("notes", [*notes[:_NOTE_LIMIT], *rest]),
        ("own cost", [cost_text(verdict.cost)]),
    ]
    for label, lines in rows:
        for place, line in enumerate(lines):
            grid.add_row("" if place else label, line)
    yield grid


def abstentions(verdict: Verdict) -> list[tuple[str, str]]:
    """(rules, why), the rules that abstain for one reason together."""
    own = ((rule, why) for rule, why in verdict.abstained if not is_foreign(verdict, rule, why))
    return by_reason({rule.replace("_", " "): why for rule, why in own})


def is_foreign(verdict: Verdict, what: str, why: str) -> bool:
    """Whether a job of this kind cannot have it: a GPU's numbers on CPUs, others of one rank."""
    if why in _NEVER:
        return True
    no_gpu = (_DEVICE, _NO_GPU) in verdict.not_measured
    return no_gpu and (what == _DEVICE or "GPU" in what or "GPU" in why or what in _GPU_RULES)


def cost_text(cost: Cost) -> str:
    """The cost of haiprof itself, in the job and beside it."""
    inside = "of the training thread not recorded"
    if cost.hook_ns_per_step is not None:
        share = f" ({fine_ratio_text(cost.hook_ratio)})" if cost.hook_ratio is not None else ""
        inside = f"{duration_text(cost.hook_ns_per_step)} per step of the training thread{share}"
    if cost.threads_cpu_ratio is not None:
        inside += f"; {fine_ratio_text(cost.threads_cpu_ratio)} of one CPU in other threads"
    if cost.agent_cpu_ratio is None:
        return f"{inside}; beside the job not recorded"
    return f"{inside}; {fine_ratio_text(cost.agent_cpu_ratio)} of one CPU beside the job"


# rich's own format loads its font from a content network; ours needs no network. Characters have
# fixed widths (textLength), so that any monospace font fits.
_SVG_FORMAT = re.sub(r"\s*@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def save_verdict(verdict: Verdict, header: RunHeader, run: RunPaths) -> None:
    """Writes report/verdict.json and report/verdict.txt."""
    with convert_os_errors(HaiprofError, f"{run.report}: the verdict cannot be saved"):
        make_folder(run.report, below=run.root)
        write_json(run.verdict_json, as_document(verdict), below=run.root)
        text = view_text(verdict_card(verdict, header, everything=True))
        write_file(run.verdict_text, text.encode(), below=run.root)


def save_card_svg(verdict: Verdict, header: RunHeader, path: Path) -> Path:
    """Writes the card as a picture of a terminal; returns the path, or raises UsageError."""
    console = SafeConsole(
        file=io.StringIO(), width=MAX_WIDTH, record=True, force_terminal=True,
        color_system="truecolor", force_jupyter=False,
    )  # fmt: skip
    console.print(verdict_card(verdict, header))
    title = visible(f"haiprof {header.name}")
    return write_text(path, console.export_svg(title=title, code_format=_SVG_FORMAT))


def verdict_text(verdict: Verdict) -> str:
    """The card without colour, 100 columns wide."""
    run = RunPaths(Path(verdict.run))
    return view_text(verdict_card(verdict, run_header(run, manifest_or_none(run))))


def view_text(view: RenderableType, *, width: int = MAX_WIDTH) -> str:
    """A view without colour."""
    console = SafeConsole(
        file=io.StringIO(), width=width, color_system=None,
        force_jupyter=False,  # a notebook would show an empty output beside the text
    )  # fmt: skip
    with console.capture() as capture:
        console.print(view, crop=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def verdict_markdown(verdict: Verdict, name: str) -> str:
    """Headline, the step by position, the causes with their gain, what is not known."""
    lines = [f"## {markdown_text(name)}: {markdown_text(verdict.headline)}", ""]
    ledger = verdict.ledger
    if ledger is not None:
        parts = (f"{position_words(k)} {duration_text(ns)}" for k, ns in ledger.positions.items())
        step = f"{duration_text(ledger.mean_ns)} (median {duration_text(ledger.median_ns)})"
        lines += [f"Step {step}: {', '.join(parts)}.", ""]
    if verdict.findings:
        head = ("", "cause", "step without it", "at", "do")
        lines += [*markdown_table(head, map(_cause_row, verdict.findings)), ""]
    unknown = [f"{what}: {why}" for what, why in verdict.not_measured]
    lines += [f"- not measured: {markdown_text(text)}" for text in unknown]
    lines += [f"- {markdown_text(note)}" for note in verdict.notes]
    return "\n".join(lines).rstrip() + "\n"


def _cause_row(finding: Finding) -> tuple[str, ...]:
    gain = finding.gain
    low, high = (duration_text(gain.low_ns), duration_text(gain.high_ns)) if gain else ("", "")
    without = gain and f"{duration_text(gain.left_ns)} ({low} to {high})"
    at = "; ".join(place.location for place in finding.code_lines[:2])
    return finding.severity, finding.title, without or "not known", at, finding.remedy
