"""Notes of a verdict: traced windows, reactions, restarts, and what could not be measured."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from haiprof.base import units
from haiprof.base.ledger import GROWING, PROBLEM_RATIO, Ledger
from haiprof.base.log_addresses import shown_path
from haiprof.diagnosis.machine_causes import DRIFT_PHASE_RATIO, NEIGHBOURS, starvation
from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.diagnosis.thresholds import UNTRACED_MIN_RATIO
from haiprof.run_analysis.reactions import Reaction, outcome_text, watched_frame
from haiprof.run_analysis.restarts import find_late_start
from haiprof.run_analysis.run_files import integer, number, text
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.layout import RunPaths

PHASES = ("dataloader", "forward", "backward", "optimizer")
_LINE_LIMIT = 6
_NAMED = 4
_NAMED_METRICS = 3
_EVERY = "all"
_NEARLY_ALL = 0.9  # the first steps of a run are never watched: what is usual must be known
_SIDE_BY_SIDE_RATIO = 0.1
_STATES = {"failed": "failed", "refused": "refused", "dropped": "not kept"}
_JUDGED_SOURCES = {"host": "node", "process": "process", "gpu": "GPU"}
_OPTIONAL_SOURCES = ("dcgm", "gpu_health", "infiniband_health")
"""They only stand in for another source, or add to one that is named already."""
_NOBODY = (
    "no process of the job reported in: it called no module, loader or collective of PyTorch, "
    "ended before its first step, or ran a Python that ignores PYTHONPATH"
)
_NOT_YET = (
    "no process of the job has reported in so far: it imports, starts, or was killed (the run has "
    "no end yet)"
)
_DAMAGED = "run.json is damaged, so that what the job did is not known"
_SAMPLED = (
    "the job was only sampled from outside, where none are counted (haiprof attach --inject counts "
    "them, and so does a start under haiprof)"
)
_NO_OPTIMIZER = (
    "no optimizer stepped while haiprof recorded, and no repeated pattern could be a step: the "
    "job hung (haiprof snapshot shows where), it ended before its first step, the warm-up was "
    "longer than the job, or the optimizer is not torch's (haiprof.step() at the end of each step "
    "marks it)"
)


def not_measured(inputs: RuleInputs, ledger: Ledger | None) -> tuple[tuple[str, str], ...]:
    """(what, why): phases that are null, code, counters that are missing, processes unseen."""
    return tuple(dict.fromkeys(_gaps(inputs, ledger)))


def _gaps(inputs: RuleInputs, ledger: Ledger | None) -> Iterator[tuple[str, str]]:
    analyzer, steps, ranks = inputs.analyzer, inputs.steps, inputs.ranks
    notes = [note for notes in ranks["notes"].to_list() for note in notes or []]
    for phase in PHASES:  # that are null in a rank that has steps, with that rank's own words
        if inputs.marked_by and phase in ("backward", "optimizer"):
            continue
        if steps[f"{phase}_host_ns"].null_count():
            head = f"{phase}: "
            why = next((n.removeprefix(head) for n in notes if n.startswith(head)), "not seen")
            yield phase, why
    yield from (("code", why) for why in (ledger.missing if ledger is not None else ()))
    if steps.height and not steps["other_device_ns"].drop_nulls().len():
        on_cpu = set(ranks["device"].drop_nulls().to_list()) <= {"cpu"}
        yield "device time", "the ranks used no GPU" if on_cpu else "no complete device times"
    yield from _counters(analyzer)
    failures = analyzer.files.hook_failures[:_NAMED]
    yield from (("phases of a process", f"hook: {line}") for line in failures)
    yield from _processes(analyzer)


def why_no_steps(inputs: RuleInputs) -> str:
    """The likeliest reason for a run without steps."""
    analyzer = inputs.analyzer
    if not inputs.ranks.height:
        failed = [f"haiprof's hook failed in {line}" for line in analyzer.files.hook_failures[:1]]
        unseen = [f"process {what}: {why}" for what, why in _processes(analyzer)]
        manifest = analyzer.files.manifest
        nobody = _DAMAGED if manifest is None else _NOBODY if manifest.end_wall_ns else _NOT_YET
        return (failed or unseen or [nobody])[0]
    if inputs.ranks["step_count"].null_count() == inputs.ranks.height:
        sampled = analyzer.run.external_samples_json.exists()
        return _SAMPLED if sampled else "no rank's spans can be read"
    if inputs.ranks["step_count"].sum():
        return (
            "none began in the time that is judged: if the job hangs, haiprof snapshot shows where"
        )
    if inputs.ranks["eval_ns"].sum():
        return "the ranks only evaluated: forward passes without gradients, no optimizer step"
    return _NO_OPTIMIZER


def _counters(analyzer: RunFrames) -> Iterable[tuple[str, str]]:
    """What rules look at is named with its metrics; other sources together, each once."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    others: dict[str, None] = {}
    for node in analyzer.files.nodes:
        for line in node.of_type("counter_missing"):
            source, metric = text(line.get("source")) or "?", text(line.get("metric")) or _EVERY
            if source in _JUDGED_SOURCES:
                reason = text(line.get("reason")) or "unknown"
                found.setdefault((_JUDGED_SOURCES[source], reason), {})[metric] = None
            elif metric == _EVERY and source not in _OPTIONAL_SOURCES:
                others[source.replace("_", " ")] = None
    for (source, reason), metrics in found.items():
        more = len(metrics) - _NAMED_METRICS
        names = ", ".join(list(metrics)[:_NAMED_METRICS]) + (f" and {more} more" * (more > 0))
        yield source if _EVERY in metrics else f"{source} {names}", reason
    if others:
        yield ", ".join(others), "`haiprof doctor` says what each would need"


def _processes(analyzer: RunFrames) -> Iterable[tuple[str, str]]:
    lines = [line for node in analyzer.files.nodes for line in node.of_type("unreported")]
    for line in lines[:_NAMED]:
        what = f"{integer(line.get('pid')) or '?'} ({text(line.get('command')) or '?'})"
        words = [text(line.get(name)) for name in ("reason", "remedy")]
        yield what, "; ".join(word for word in words if word) or "it did not report in"
    if len(lines) > _NAMED:
        yield "more processes", f"{len(lines) - _NAMED} others did not report in"


def traced_lines(analyzer: RunFrames, *, since_ns: int | None = None) -> tuple[str, ...]:
    """What was traced, in a line each: which steps, where the files are, why the rest was not."""
    since = pl.lit(value=True) if since_ns is None else pl.col("start_ns") >= since_ns
    run, windows = analyzer.run, analyzer.windows().filter(since)  # some have no time
    watched = tuple(_slow_step_lines(watched_frame(analyzer.files)))
    kept, path = windows.filter(pl.col("path").is_not_null()), shown_path(run.root)
    lines = list(_stored_windows(kept, run))
    lines += _others(windows.filter(pl.col("path").is_null()))
    if len(lines) > _LINE_LIMIT:
        more = len(lines) - _LINE_LIMIT + 1
        lines[_LINE_LIMIT - 1 :] = [f"and {more} more: haiprof trace query {path} --schema"]
    if kept.height:
        see = f"see them: haiprof trace report {path}, haiprof export --to tensorboard {path}"
        lines += [_left_out(analyzer.steps().filter(since), kept), see]
    return (*watched, *filter(None, lines))


def _slow_step_lines(frame: pl.DataFrame) -> Iterable[str]:
    """How many steps `--keep-slow` looked at, what that took, and how it would be more."""
    frame = frame.filter(pl.col("step_count") > 0, pl.col("watched_count").is_not_null())
    if frame.is_empty():
        return
    most = frame.sort("step_count").row(-1, named=True)
    steps, seen, budget, limit = (
        most[name] for name in ("step_count", "watched_count", "budget_ratio", "kept_limit")
    )
    cost, memory, slow, kept = (
        _most(frame[name]) for name in ("cost_ratio", "memory_bytes", "slow_count", "kept_count")
    )
    disk, share = int(frame["kept_bytes"].sum() or 0), seen / steps
    line = f"watched for slow steps: {seen:,} of {steps:,} steps ({units.ratio_text(share)})"
    if cost is not None:
        line += f" for {units.ratio_text(cost)} of the time"
        line += "" if budget is None else f" (--slow-cost {budget:g})"
    line += "" if memory is None else f", at most {units.bytes_text(memory)} of memory per rank"
    yield line + (f", {units.bytes_text(disk)} of disk before compression" if disk else "")
    if slow is not None and kept is not None:
        line = f"{_number(slow, 'slow step')} on the rank with most, {_number(kept, 'window')} kept"
        if limit is not None and kept >= limit:
            line += f", as many as --repeat {limit} asks for: no later step was watched"
        yield line + _more(most, share)
    for (reason,), rows in frame.drop_nulls("refused").group_by("refused", maintain_order=True):
        yield f"{units.ranks_text(rows['rank'].to_list())}: not watched at the end: {reason}"


def _number(count: float, what: str) -> str:
    return f"{count:,.0f} {what}" + ("" if count == 1 else "s")


def _more(most: Mapping[str, Any], share: float) -> str:
    """With which chance one slow step is caught, and which option makes that larger."""
    if share >= _NEARLY_ALL:
        return ""
    line = f"; one that comes once is caught with a chance of {units.ratio_text(share)}"
    cost_ns, usual_ns = most["cost_ns"], most["usual_ns"]
    if not (cost_ns and usual_ns and most["watched_count"]):
        return line + ": a higher --slow-cost watches more"
    price = cost_ns / most["watched_count"] / usual_ns
    unit = 10.0 ** math.floor(math.log10(price))
    price = round(math.ceil(price / unit - 1e-9) * unit, 9)  # to one digit
    return line + f", with --slow-cost {price:g} nearly always"


def _stored_windows(windows: pl.DataFrame, run: RunPaths) -> Iterable[str]:
    """Windows with a file, those of the same steps together."""
    keys = ("first_step", "end_step", "trigger", "state", "reason")
    for (first, end, trigger, state, reason), rows in windows.group_by(keys, maintain_order=True):
        steps, last, files = "steps that are not known", (integer(end) or 0) - 1, rows.height
        if first is not None and end is not None:
            steps = f"step {first}" if last == first else f"steps {first} to {last}"
        files += rows["et_path"].drop_nulls().len()
        size = int(rows["bytes"].sum() or 0) + int(rows["et_bytes"].sum() or 0)
        line = f"{steps} on {units.ranks_text(rows['rank'].to_list())}: "
        line += f"{_number(files, 'file')}, {units.bytes_text(size)}, in {run.traces}"
        if rows["stall_ns"].max() is not None:
            line += f"; training stopped for {units.duration_text(_most(rows['stall_ns']))} at most"
        if trigger == "slow":
            line += "; kept because a step was slow"
        yield line + (f"; {state}: {reason}" if reason else "")


def _others(windows: pl.DataFrame) -> Iterable[str]:
    """Windows without a file, by why."""
    for (state, reason), rows in windows.group_by("state", "reason", maintain_order=True):
        who = units.ranks_text(rows["rank"].to_list())
        if state == "dropped":
            yield f"{rows.height} windows of {who} not kept: {reason or 'no step was slow'}"
        elif state in ("recorded", "cut"):
            yield f"{who}: recorded, and the files are gone"
        else:
            yield f"{who}: not traced: {reason or _STATES.get(str(state), state)}"


def _left_out(steps: pl.DataFrame, kept: pl.DataFrame) -> str:
    """Steps of all ranks that are in no average: those in the traces, and those around them."""
    traced = int(steps["traced"].sum() or 0)
    if not traced:
        return ""
    if steps.height - traced <= UNTRACED_MIN_RATIO * steps.height:
        return f"{traced} of {steps.height} steps were traced, which makes steps slower"
    inside = int((kept["end_step"] - kept["first_step"]).sum() or 0)
    why = f"{inside} in the traces, {traced - inside} in which the profiler started or stopped"
    return f"{traced} steps of all ranks are left out of averages and findings: {why}"


def _most(values: pl.Series) -> float | None:
    return number(values.max())


_CLOSURE_RATIO = 1.5
"""Spans of an optimizer so much longer than its account hold a closure. Own choice."""


def reacted_lines(inputs: RuleInputs, ledger: Ledger | None) -> Iterator[str]:
    """What haiprof noticed and did while the job ran, in a line each; a growth is told once."""
    run = inputs.analyzer.run
    accounts, positions = (ledger.accounts, ledger.positions) if ledger else ((), {})
    growing_ns = sum(each.ns_per_step for each in accounts if each.when == GROWING)
    for each in inputs.reactions:
        said, why = outcome_text(each), list[str]()
        if each.trigger != "slow":
            where = f"; {each.path}" if each.path else ""
            yield f"{each.reason} at {_clock_text(each.wall_ns)}: {said}{where}"
            continue
        before, after = each.before_ns, each.after_ns
        if each.window is None and before and after and growing_ns >= (after - before) / 2:
            continue
        grown = after / before - 1 if before and after else None
        see = f": haiprof trace report {shown_path(run.root)} --window {each.window}"
        times = _inputs_grew(inputs.input_sizes, each)
        if grown and times and times - 1 >= grown / 2:
            larger = f"{units.number_text(times)} times as large"
            why = [f"its inputs are {larger} from then on, on average"]
        else:
            starved, why = starvation(inputs), [grown_phase(inputs, each, positions)]
            if starved is not None and starved.rule == NEIGHBOURS:
                why.append("other processes use the CPUs, too: it may be theirs")
        yield (
            f"step {each.step} on became {units.ratio_text(grown)} slower on rank {each.rank} "
            f"({units.duration_text(before)} to {units.duration_text(after)}) at "
            + "; ".join(filter(None, [_clock_text(each.since_wall_ns), *why, said]))
            + ("" if each.window is None else see)
        )


def grown_phase(inputs: RuleInputs, reaction: Reaction, positions: Mapping[str, float]) -> str:
    """`most of it in optimizer`: the phase that grew most; empty: none grew by half of the growth.

    `positions` are the ledger's: an optimizer that is longer than there has a closure in it.
    """
    own = inputs.by_rank.get(reaction.rank if reaction.rank is not None else -1)
    if own is None or reaction.step is None:
        return ""
    names = [*PHASES, "other"]
    parts = [
        part.select("step_ns", *(f"{name}_host_ns" for name in names)).mean().row(0)
        for part in (own.filter(pl.col("step") < reaction.step),
                     own.filter(pl.col("step") >= reaction.step))
    ]  # fmt: skip
    if None in (parts[0][0], parts[1][0]):
        return ""
    grown = [(after or 0.0) - (before or 0.0) for before, after in zip(*parts, strict=True)]
    most = max(range(1, len(grown)), key=grown.__getitem__)
    told = (reaction.after_ns or 0.0) - (reaction.before_ns or 0.0)  # of the steps around it
    if grown[0] <= 0 or grown[most] < DRIFT_PHASE_RATIO * max(grown[0], told):
        return ""
    name = names[most - 1] if most <= len(PHASES) else "what is outside of the phases"
    whole = number(own["optimizer_host_ns"].mean()) or 0.0
    if name == "optimizer" and whole > _CLOSURE_RATIO * positions.get("optimizer", whole):
        return ""
    said = f"most of it in {name}"
    # Adam's averages of gradients that became 0 go through numbers that a CPU is slow at.
    slow_numbers = ", which torch.set_flush_denormal(True) prevents where numbers became tiny"
    return said + slow_numbers * (name == "optimizer" and not inputs.uses_gpu)


def _inputs_grew(sizes: pl.DataFrame, reaction: Reaction) -> float | None:
    """How many times larger the inputs of a rank are from then on; None where that is not plain."""
    # A model is called for other things than training, too: single calls may be of any size.
    own = sizes.filter(pl.col("rank") == reaction.rank, pl.col("number_count") > 0)
    if own.is_empty():
        return None
    own = own.filter(pl.col("root") == own["root"].mode().min())
    later = own["time_ns"] >= reaction.since_wall_ns
    counts = [own.filter(part)["number_count"].to_numpy() for part in (~later, later)]
    if not all(map(len, counts)) or np.quantile(counts[0], 0.75) > np.quantile(counts[1], 0.25):
        return None
    return float(counts[1].mean() / counts[0].mean())


def _clock_text(wall_ns: int) -> str:
    """`14:02:11` in the reader's time zone."""
    return time.strftime("%H:%M:%S", time.localtime(wall_ns / units.NS_PER_S))


def untrained_notes(ranks: Sequence[int]) -> list[str]:
    """Whose steps are not judged."""
    if not ranks:
        return []
    return [f"{units.ranks_text(ranks)}: no optimizer seen: the steps are those of the others"]


def late_start_notes(analyzer: RunFrames) -> Iterator[str]:
    """Who came late to init_process_group, where others waited a problem's share of the run."""
    wall_ns = analyzer.goodput().wall_ns
    found = find_late_start(analyzer.files, PROBLEM_RATIO * wall_ns) if wall_ns else None
    if found is None:
        return
    them, process_ns = "it" if len(found.late) == 1 else "them", found.process_late_ns
    why = "see what its code does before that call (with a shorter --hang-limit a snapshot names "
    why += "its line)"
    if found.at is not None:
        why = f"meanwhile at {found.at}"
    elif process_ns is not None and 2 * process_ns > found.wait_ns:
        late = units.duration_text(process_ns)
        why = f"the process had begun {late} after theirs: see its launcher"
    late, waited = units.ranks_text(found.late), units.ranks_text(found.waited)
    yield (
        f"{late} came {units.duration_text(found.wait_ns)} late to init_process_group: {waited} "
        f"waited for {them}, {units.ratio_text(found.wait_ns / wall_ns)} of the run; {why}"
    )


def attempt_notes(analyzer: RunFrames) -> Iterator[str]:
    """What is said where a rank had several processes: restarts, or jobs side by side."""
    if not (analyzer.ranks()["attempt"] > 0).any():
        return
    begin, end, steps = pl.col("begin"), pl.col("end"), analyzer.steps()
    spans = steps.group_by("rank", "attempt").agg(
        pl.len(), begin=pl.col("start_ns").min(), end=(pl.col("start_ns") + pl.col("step_ns")).max()
    )
    shorter = pl.max_horizontal(pl.min_horizontal(end - begin, (end - begin).shift(-1)), 1)
    common = pl.min_horizontal(end, end.shift(-1)) - begin.shift(-1)
    for (rank,), rows in spans.sort("rank", "attempt").group_by("rank", maintain_order=True):
        if rows.height < 2:
            continue
        shown = [f"{count:,}" for count in rows["len"].to_list()]
        more = [f"{len(shown) - _NAMED} more"] if len(shown) > _NAMED else []
        *first, final = [*shown[:_NAMED], *more]
        counts = f"{', '.join(first)} and {final}"
        overlap = rows.sort("begin", "end").select((common > _SIDE_BY_SIDE_RATIO * shorter).any())
        if overlap.item():
            yield (
                f"{rows.height} processes trained at the same time and none had a rank of its own: "
                f"they are jobs of their own ({counts} steps), and this verdict covers the one "
                f"that began last (ranks/{rank}.{rows['attempt'][-1]})"
            )
        else:
            gap = max(0, int(rows["begin"][-1]) - int(rows["end"][-2]))
            yield (
                f"rank {rank} was started {rows.height} times ({counts} steps): only the last "
                f"start is evaluated, {units.duration_text(gap)} after the step before it"
            )
