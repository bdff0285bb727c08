"""What `haiprof compare` shows: two runs, or what changed on the device between two traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.text import Text

from haiprof.base.ledger import PROBLEM_RATIO
from haiprof.base.units import MISSING, duration_text, ratio_text, shorten
from haiprof.diagnosis.compare.compared_run import EarlierRun
from haiprof.diagnosis.compare.comparison import (
    AccountChange,
    Change,
    Comparison,
    PositionChange,
    Promise,
    caveats,
    unlike_scripts,
)
from haiprof.diagnosis.thresholds import COMPARE_P_VALUE
from haiprof.run_analysis.ledger import ACTIVITIES, ON_CORE
from haiprof.show.frame_table import Fields, PageTable, heads, page_records, page_table
from haiprof.show.text import markdown_table, markdown_text, printable, value_text
from haiprof.show.views.blocks import more_lines, notes_block, one_line, plain_table, section
from haiprof.show.views.device_ledger import damage_lines
from haiprof.trace_analysis import diff
from haiprof.trace_analysis.device_ledger import remedy_of

_MAIN_RATIO, _ALL_RATIO = 0.5, 0.995
_SHOWN_RATIO = 0.001  # Differences that are a smaller share of the step are in --json alone
_OTHERS_RATIO = 0.1
_WORK = [ACTIVITIES[activity] for activity in ON_CORE]
_DIGEST = 12
_STYLES = {"slower": "bold red", "faster": "bold green", "same": "bold", "undecided": "bold yellow"}
_SHOWN, _KERNELS, _MARKDOWN_ROWS = 8, 5, 20
_FOLDED = ("name", "before", "after")  # Columns of text that take several lines where they are long

_TIME_WORDS = {"slower": "more time", "faster": "less time"}


def headline(found: Comparison) -> str:
    """`the step takes 12.4 % more time (11.2 to 13.5 %): train.py:40 log_step +4.9 ms`."""
    change = found.change
    low, high = change.low_ratio, change.high_ratio
    ends = [] if low is None or high is None else [_percent(low), _percent(high)]
    interval = " to ".join(ends)
    if found.unjudged:
        measured = f"; measured: {_percent(change.ratio)}" if change.ratio > 0 else ""
        text = f"cannot be evaluated: {found.unjudged}{measured}{interval and f' ({interval})'}"
        least = _OTHERS_RATIO * abs(change.difference_ns)
        work = (a for a in found.accounts if a.activity in _WORK and abs(a.difference_ns) >= least)
        part = next((one for one in work if one.is_certain), None)
        return _certain_text(part, text) if part else text
    if found.state == "undecided":
        text = f"inconclusive: too noisy (the change lies between {' and '.join(ends)})"
        main = _main_part(found, found.accounts)
        return _certain_text(main[0], text) if main else text
    if found.state == "same":
        most = 100 * found.most_ratio
        return f"no difference above {most:.1f} %: {_percent(change.ratio)} ({interval})"
    sizes = sorted(abs(ratio - 1) * 100 for ratio in (low or 1.0, high or 1.0))
    text = f"the step takes {abs(change.ratio - 1) * 100:.1f} % {_TIME_WORDS[found.state]} "
    text += f"({sizes[0]:.1f} to {sizes[1]:.1f} %)"
    return text + (_cause(found, found.accounts) or _cause(found, found.positions))


def _certain_text(part: AccountChange | PositionChange, whole: str) -> str:
    """What is certain comes first, then why the whole is not."""
    word = "less" if part.difference_ns < 0 else "more"
    ns = duration_text(abs(part.difference_ns))
    return f"{ns} a step {word} at {printable(part.title)}; the whole step: {whole}"


def _cause(found: Comparison, parts: Sequence[AccountChange | PositionChange]) -> str:
    """What makes most of the difference, where one does."""
    main = _main_part(found, parts)
    if main is None:
        return ""
    part, share = main
    how_much = "all" if share >= _ALL_RATIO else f"{100 * share:.0f} %"
    of = f"{printable(part.title)} ({_signed_ns(part.difference_ns)} a step)"
    return f": {of} makes {how_much} of it"


def _main_part(
    found: Comparison, parts: Sequence[AccountChange | PositionChange]
) -> tuple[AccountChange | PositionChange, float] | None:
    """The first part that is certain and makes most of the difference, with its share of it."""
    whole = found.change.difference_ns or math.inf
    shares = ((one, one.difference_ns / whole) for one in parts)
    return next((it for it in shares if it[0].is_certain and it[1] >= _MAIN_RATIO), None)


def what_would_decide(found: Comparison) -> str:
    """What to change if it cannot be decided whether a limit is exceeded."""
    if found.change.unknown:
        return "record more steps of both: a longer --time"
    if found.unjudged:
        return "record both again while nothing else runs there"
    return "the interval reaches beyond the limit: record longer, or on a steadier machine"


def step_facts(found: Comparison) -> str:
    """The means, the medians beside them, and the number of steps behind them."""
    change = found.change
    return (
        f"mean step {duration_text(change.before_ns)} before, {duration_text(change.after_ns)} "
        f"after (median {duration_text(change.before_median_ns)} and "
        f"{duration_text(change.after_median_ns)}); {change.before_step_count} and "
        f"{change.after_step_count} steps after warm-up"
    )


def headline_notes(found: Comparison, chosen: str) -> list[str]:
    """Lines below the headline: whether a promise came true, and what was compared."""
    unlike = [printable(line) for line in unlike_scripts(found)]
    return [
        *unlike,
        *([printable(promise_text(found.promise))] if found.promise and not unlike else []),
        step_facts(found),
        *([found.load_text] if found.load_text else []),
        printable(f"baseline: {found.before.path}"),
        printable(f"new run: {found.after.path}"),
        *([printable(f"chosen: {chosen}")] if chosen else []),
    ]


_GONE_RATIO = 0.99


def promise_text(promise: Promise) -> str:
    """`without "train.py:40 log_step ...", the step was predicted to become 6.9 ms (...) ...`."""
    titles = [f'"{one.title}"' for one in promise.accounts]
    more = [f"{len(titles) - 2} more"] if len(titles) > 2 else []
    what = titles[0]
    if len(titles) > 1:
        what = f"{len(titles)} accounts ({'; '.join([*titles[:2], *more])})"
    gone = promise.promised_ns / sum(one.gain_ns for one in promise.accounts)
    part = "" if gone > _GONE_RATIO else f"of which {ratio_text(gone)} is gone, "
    others = " and ".join(
        f"{duration_text(ns)} {word}"
        for ns, word in ((promise.others_more_ns, "more"), (promise.others_less_ns, "less"))
        if ns >= _OTHERS_RATIO * promise.promised_ns
    )
    others = others and f", while other accounts take {others}"
    came_true = {True: "as predicted", False: "not as predicted", None: "too noisy to tell"}
    outcome = came_true[promise.came_true]
    if promise.is_outweighed:
        why = "other changes are larger than what was predicted"
        outcome = f"{why}, so whether it came cannot be told"
    return (
        f"without {what}, {part}the step was predicted to become "
        f"{_shorter(promise.promised_ns, promise.low_ns, promise.high_ns)}; it became "
        f"{_shorter(promise.came_ns, promise.came_low_ns, promise.came_high_ns)}{others}: {outcome}"
    )


_NO_DIFFERENCE = (
    "no difference in what was recorded: settings, code, packages, machine, and the variables of "
    "torch, CUDA, NCCL, threads and memory; other variables of the job are never recorded"
)


def notes(found: Comparison) -> list[str]:
    """What a reader must know before trusting the claim, and what could not be compared."""
    accounts = [f"accounts: {found.no_accounts}"] if found.no_accounts else []
    same = [] if found.differs else [_NO_DIFFERENCE]
    said_above = set(unlike_scripts(found))
    more = [each for each in caveats(found) if each not in said_above]
    return [*more, *accounts, *same, *found.unknown]


_COUNTERS: Fields = (
    (lambda one: printable(f"{one.source} {one.metric}"), "counter"),
    (lambda one: value_text(one.before, one.unit), "before"),
    (lambda one: value_text(one.after, one.unit), "after"),
)
_AROUND: Fields = (
    (lambda one: one.kind, ""), (lambda one: printable(one.name), "what"),
    (lambda one: _value(one.before), "before"), (lambda one: _value(one.after), "after"),
)  # fmt: skip
"""Of command, code, packages, variables and machine: only what differs."""


def tables(found: Comparison, *, limit: int) -> list[PageTable]:
    """What makes the difference first, with so many kernels; empty tables are left out."""
    kernels = kernel_table(found, limit=limit)
    several = max(len(side.inputs.by_rank) for side in (found.before, found.after)) > 1
    how = f"{', mean over all ranks' if several else ''}; dim: not certain"
    all_tables = (
        _changes(f"Accounts by how much they changed{how}", found, found.accounts),
        _changes(f"Where in the step, exact by its spans{how}", found, found.positions),
        _changes("Ranks that changed unlike the others: their own time", found, found.ranks),
        page_records("Counters that differ significantly (means over the run)", found.counters,
                     _COUNTERS, left=("counter",)),
        *([kernels] if kernels else []),
        page_records("Differences in settings and environment", found.differs, _AROUND,
                     left=[head for _, head in _AROUND]),
    )  # fmt: skip
    return [table for table in all_tables if table.rows]


def _changes(title: str, found: Comparison, changes: Sequence[Change]) -> PageTable:
    least = _SHOWN_RATIO * found.change.before_ns
    shown = [one for one in changes if abs(one.difference_ns) >= least]
    rows = [
        (
            printable(one.title), *(duration_text(ns) if ns else MISSING
                                    for ns in (one.before_ns, one.after_ns)),
            _signed_ns(one.difference_ns), f"{_signed_ns(one.low_ns)} to {_signed_ns(one.high_ns)}",
        )
        for one in shown
    ]  # fmt: skip
    head = ("", "before", "after", "difference", "interval")
    faint = [number for number, one in enumerate(shown) if not one.is_certain]
    return PageTable(title, head, rows, left=("", "interval"), faint=faint)


def kernel_table(found: Comparison, *, limit: int) -> PageTable | None:
    """What differs between the traced steps; None where they could not be compared."""
    if found.kernels is None:
        return None
    names = found.kernels.names.filter(pl.col("adjusted_p_value") <= COMPARE_P_VALUE)
    is_named = pl.col("name") != diff.NOTHING[diff.KERNEL]
    if names.filter((pl.col("of") == diff.KERNEL) & is_named).is_empty():
        names = names.filter(pl.col("of") != diff.KERNEL)  # without a kernel, no idle time
    columns = heads(of="", name="name", control_ns="before", test_ns="after",
                    difference_ns="difference", adjusted_p_value="p")  # fmt: skip
    title = "Traced steps: significant differences (all: haiprof compare --traces)"
    return page_table(title, names, columns, limit=limit)


def _percent(ratio: float) -> str:
    return f"{(ratio - 1) * 100:+.1f} %"


def _shorter(ns: float, low_ns: float, high_ns: float) -> str:
    """`6.9 ms (5.9 ms to 8.0 ms) shorter`; in words where the interval crosses 0."""
    direction, ends = ("longer", (-high_ns, -low_ns)) if ns < 0 else ("shorter", (low_ns, high_ns))
    size = duration_text(abs(ns))
    if low_ns < 0 < high_ns:
        between = f"{duration_text(-low_ns)} longer and {duration_text(high_ns)} shorter"
        return f"{size} {direction} (between {between})"
    return f"{size} ({' to '.join(map(duration_text, ends))}) {direction}"


def _signed_ns(ns: float) -> str:
    return f"+{duration_text(ns)}" if ns > 0 else duration_text(ns)


def _value(value: Any) -> str:  # noqa: ANN401 - any JSON value
    if value is None:
        return MISSING
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    is_digest = len(text) in (16, 40, 64) and set(text) <= set("0123456789abcdef")
    return printable(text[:_DIGEST] if is_digest else text)


def compare_view(found: Comparison, *, chosen: str = "") -> RenderableType:
    """The whole view; `chosen` says why the baseline is it, where nobody named it."""
    return Group(
        Text(headline(found), style=_STYLES[found.state]),
        *(Text(line, overflow="fold") for line in headline_notes(found, chosen)),
        *(_block(table) for table in tables(found, limit=_KERNELS)),
        notes_block(notes(found)),
    )


def compare_markdown(found: Comparison, *, chosen: str = "") -> str:
    """The same as Markdown: a table for each kind of difference."""
    lines = [f"## {markdown_text(headline(found))}", ""]
    lines += [f"- {markdown_text(line)}" for line in headline_notes(found, chosen)]
    for table in tables(found, limit=_KERNELS):
        lines += ["", f"**{markdown_text(table.title)}**", ""]
        lines += markdown_table(table.head, table.rows[:_MARKDOWN_ROWS])
        if more := len(table.rows[_MARKDOWN_ROWS:]) + table.more:
            lines.append(f"\nand {more} more, in --json")
    lines += ["", *(f"- {markdown_text(note)}" for note in notes(found))]
    return "\n".join(lines).rstrip() + "\n"


def _block(table: PageTable) -> RenderableType:
    """Its first rows, and how many more there are."""
    folded = set(table.left).intersection(_FOLDED)
    shown = plain_table(*table.head, left=table.left)
    for place, (column, name) in enumerate(zip(shown.columns, table.head, strict=True)):
        if name in folded:
            column.no_wrap, column.overflow, column.min_width = False, "fold", 16
        column.no_wrap &= place > 0  # where there is too little room, the first one is cut
    for number, row in enumerate(table.rows[:_SHOWN]):
        cells = [one_line(row[0]), *(Text(cell) for cell in row[1:])]
        shown.add_row(*cells, style="dim" if number in table.faint else "")
    more = len(table.rows) + table.more - len(table.rows[:_SHOWN])
    return section(table.title, shown, *more_lines(more))


def compare_data(
    found: Comparison, *, chosen: str = "", of: Sequence[EarlierRun] = ()
) -> dict[str, Any]:
    """The same for scripts, whole; docs/compare.md describes the fields."""
    change, promise = found.change, found.promise
    return {
        "version": 2,
        "verdict": {"state": found.state, "text": headline(found),
                    "undecided": found.unjudged},
        "baseline": {"path": str(found.before.path), "chosen": chosen or None,
                     "of": [asdict(each) for each in of]},
        "run": {"path": str(found.after.path)},
        "step_time": {**asdict(change), "difference_ns": change.difference_ns},
        "accounts": [_change_data(one) for one in found.accounts],
        "no_accounts": found.no_accounts or None,
        "positions": [_change_data(one) for one in found.positions],
        "promise": promise and {
            **asdict(promise), "others_ns": promise.others_ns,
            "is_outweighed": promise.is_outweighed, "came_true": promise.came_true,
            "accounts": [found.accounts.index(one) for one in promise.accounts],
        },
        "ranks": [_change_data(one) for one in found.ranks],
        "counters": [asdict(one) for one in found.counters],
        "load": [asdict(load) for load in found.loads],
        "kernels": None if found.kernels is None else found.kernels.names.to_dicts(),
        "no_kernels": found.no_kernels or None,
        "differs": [asdict(one) for one in found.differs],
        "caveats": list(caveats(found)),
        "unknown": list(found.unknown),
    }  # fmt: skip


def _change_data(one: Change) -> dict[str, Any]:
    return {**asdict(one), "difference_ns": one.difference_ns, "is_certain": one.is_certain}


_ROWS = 12
_NAMED = 3
_DEPTH = 5
_NUMBERS_WIDTH = 36
_SHARE_RATIO = 0.25  # Roles with at least so much of the whole difference are named in the headline
_UNITS = ((1e9, "s"), (1e6, "ms"), (1e3, "µs"), (1.0, "ns"))
_LEAST_OF_UNIT, _EQUAL_RATIO, _CLOSE_RATIO = 0.1, 0.01, 0.3
"""Of the larger one: 0.29 ms, not 290 µs; 130.9 to 108.9 ms, not 0.13 to 0.11 s."""


def device_comparison_view(found: diff.DeviceComparison, *, width: int) -> RenderableType:
    """The whole view, for a terminal of so many columns."""
    table = plain_table("before", "after", "change", "what", left=("what",))
    changed, room = [row for row in found.rows if row.difference_ns], max(width - _NUMBERS_WIDTH, 2)
    for row in changed[:_ROWS]:
        table.add_row(
            duration_text(row.before_ns), duration_text(row.after_ns),
            _change_text(row.difference_ns),
            shorten(printable(_name_row(row) if row.of == diff.OPERATORS else row.role), room),
        )  # fmt: skip
    device = "device" if found.on_device else "host"
    step = f"step {span_text(found.before_step_ns, found.after_step_ns)}"
    branch = found.branch
    where = []
    if found.is_different and branch is not None and len(branch.path) > 1:
        span = span_text(branch.before_ns, branch.after_ns)
        where = [Text(printable(f"where: {' > '.join(branch.path[-_DEPTH:])}: {span}"))]
    return Group(
        Text(printable(comparison_headline(found)), style="bold"),
        *damage_lines(found.damage),
        *where,
        Text(f"per step; {step}", style="dim"),
        *([section(f"What the {device} did, the largest change first", table)] if changed else []),
    )


def device_comparison_data(found: diff.DeviceComparison) -> dict[str, Any]:
    """The same as JSON."""
    return {"headline": comparison_headline(found), **asdict(found)}


def comparison_headline(found: diff.DeviceComparison) -> str:
    """`GPU busy 2.00 to 0.04 ms: aten::convolution`."""
    span = span_text(found.before_busy_ns, found.after_busy_ns)
    idles = [row for row in found.rows if row.of == diff.IDLE_TIME]
    step_ns = max(found.before_step_ns, found.after_step_ns)
    change = found.after_step_ns - found.before_step_ns
    idle = "".join(
        f"; {_role_text(row.role)} {span_text(row.before_ns, row.after_ns)}"
        for row in idles[:1]
        if row.difference_ns * math.copysign(1, change) >= PROBLEM_RATIO * step_ns
        and abs(change) >= PROBLEM_RATIO * step_ns
    )
    if not found.is_different:
        apart = abs(found.after_busy_ns - found.before_busy_ns)
        what = "GPU busy time" if found.on_device else "the host's operators"
        is_equal = apart <= _EQUAL_RATIO * max(found.before_busy_ns, found.after_busy_ns)
        same = f"{what}: {'equally long' if is_equal else 'no difference that is certain'}"
        return f"{same}: {span}{idle}"
    busy = f"GPU busy {span}" if found.on_device else f"host operators {span}"
    whole = found.after_busy_ns - found.before_busy_ns
    named = [
        _name_row(row) if row.of == diff.OPERATORS else _role_text(row.role) for row in found.rows
        if row.of != diff.IDLE_TIME and row.difference_ns / whole >= _SHARE_RATIO
    ][:_NAMED]  # fmt: skip
    return f"{busy}: {'; '.join(named)}{idle}" if named else f"{busy}{idle}"


def _name_row(row: diff.ComparedRow) -> str:
    """A role with its operators: those of both sides with both times, else what replaced what."""
    old, new = dict(row.before), dict(row.after)
    if old.keys() == new.keys() == {row.role}:
        return row.role
    if old.keys() == new.keys():
        each = [f"{name} {span_text(old[name], new[name])}" for name in list(old)[:_NAMED]]
        return each[0].split(" ")[0] if len(old) == 1 else f"{row.role} ({', '.join(each)})"
    sides = [", ".join(list(side)[:_NAMED]) or "nothing" for side in (old, new)]
    return f"{row.role} ({sides[0]} to {sides[1]})"


def _role_text(activity: str) -> str:
    """An activity of the device in words."""
    remedy = remedy_of(activity)
    return remedy.says if remedy else activity


def _change_text(ns: float) -> str:
    sign = "+" if ns >= 0.5 else "-" if ns <= -0.5 else ""
    return f"{sign}{duration_text(abs(ns))}"


def span_text(before: float, after: float) -> str:
    """`2.00 to 0.04 ms`: both in the unit of the larger one; one number where they are the same."""
    largest = max(before, after)
    is_close = _EQUAL_RATIO * largest < abs(after - before) < _CLOSE_RATIO * largest
    least = 1.0 if is_close else _LEAST_OF_UNIT
    size, unit = next((u for u in _UNITS if largest >= least * u[0]), _UNITS[-1])
    old, new = (f"{each / size:,.2f}" for each in (before, after))
    return f"{old} {unit}" if old == new else f"{old} to {new} {unit}"
