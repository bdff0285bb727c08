"""What could not be measured in a run, and why."""

from __future__ import annotations

from collections.abc import Iterable

from haiprof.diagnosis.rule_inputs import RuleInputs
from haiprof.run_analysis.run_files import integer, text
from haiprof.run_analysis.run_frames import RunFrames

PHASES = ("dataloader", "forward", "backward", "optimizer")
_NAMED_PROCESSES = 4
_NAMED_METRICS = 3
_ALL = "all"
_JUDGED_SOURCES = {"host": "node", "process": "process", "gpu": "GPU"}
_NOBODY = (
    "no process of the job reported in: it called no module, loader or collective of PyTorch, "
    "ended before its first step, or ran a Python that ignores PYTHONPATH"
)
_NO_OPTIMIZER = (
    "no optimizer stepped while haiprof recorded, and nothing repeats that could be a step: the "
    "job ended before its first step, the warm-up was longer than the job, or the optimizer is not "
    "torch's (haiprof.step() at the end of each step marks it)"
)


def not_measured(analyzer: RunFrames, inputs: RuleInputs) -> tuple[tuple[str, str], ...]:
    """(what, why): phases that are null, counters that are missing, processes unseen."""
    hooks = [("phases of a process", f"hook: {line}") for line in analyzer.files.hook_failures]
    gaps = [*_phases(inputs), *_device(inputs), *_counters(analyzer), *hooks[:_NAMED_PROCESSES]]
    gaps += _processes(analyzer)
    return tuple(dict.fromkeys(gaps))


def why_no_steps(analyzer: RunFrames, inputs: RuleInputs) -> list[str]:
    """Likely reasons for a run without steps, the likeliest first."""
    if not inputs.ranks.height:
        failed = [f"haiprof's hook failed in {line}" for line in analyzer.files.hook_failures[:1]]
        unseen = [f"process {what}: {why}" for what, why in _processes(analyzer)]
        return failed or unseen or [_NOBODY]
    evaluated = inputs.ranks["eval_ns"].sum()
    unread = inputs.ranks["step_count"].null_count()
    if unread == inputs.ranks.height:
        return ["no rank's spans can be read", *analyzer.notes()[:1]]
    if evaluated:
        return ["the ranks only evaluated: forward passes without gradients, no optimizer step"]
    return [_NO_OPTIMIZER]


def _phases(inputs: RuleInputs) -> Iterable[tuple[str, str]]:
    """Phases that are null in a rank that has steps, with that rank's own words."""
    for phase in PHASES:
        if inputs.marked_by and phase in ("backward", "optimizer"):
            continue
        if not inputs.steps.height or not inputs.steps[f"{phase}_host_ns"].null_count():
            continue
        prefix = f"{phase}: "
        notes = [note for notes in inputs.ranks["notes"].to_list() for note in notes or []]
        why = next((n.removeprefix(prefix) for n in notes if n.startswith(prefix)), "not seen")
        yield phase, why


def _device(inputs: RuleInputs) -> Iterable[tuple[str, str]]:
    if not inputs.steps.height or inputs.steps["other_device_ns"].drop_nulls().len():
        return
    devices = set(inputs.ranks["device"].drop_nulls().to_list())
    why = "the ranks used no GPU" if devices <= {"cpu"} else "no complete device times"
    yield "device time", why


def _counters(analyzer: RunFrames) -> Iterable[tuple[str, str]]:
    """What rules look at is named with its metrics; other sources together, each once."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    others: dict[str, None] = {}
    for node in analyzer.files.nodes:
        for line in node.of_type("counter_missing"):
            source, metric = text(line.get("source")) or "?", text(line.get("metric")) or _ALL
            if source in _JUDGED_SOURCES:
                reason = text(line.get("reason")) or "unknown"
                found.setdefault((_JUDGED_SOURCES[source], reason), {})[metric] = None
            elif metric == _ALL and not _is_optional(source):
                others[source.replace("_", " ")] = None
    for (source, reason), metrics in found.items():
        yield source if _ALL in metrics else f"{source} {_join_names(list(metrics))}", reason
    if others:
        yield ", ".join(others), "`haiprof doctor` says what each would need"


def _is_optional(source: str) -> bool:
    """Whether a source only stands in for another one, or adds to one that is named already."""
    return source in ("dcgm", "gpu_health", "infiniband_health")


def _join_names(names: list[str]) -> str:
    """The first few, and how many more there are."""
    more = len(names) - _NAMED_METRICS
    return ", ".join(names[:_NAMED_METRICS]) + (f" and {more} more" if more > 0 else "")


def _processes(analyzer: RunFrames) -> Iterable[tuple[str, str]]:
    lines = [line for node in analyzer.files.nodes for line in node.of_type("unreported")]
    for line in lines[:_NAMED_PROCESSES]:
        what = f"{integer(line.get('pid')) or '?'} ({text(line.get('command')) or '?'})"
        words = [text(line.get(name)) for name in ("reason", "remedy")]
        yield what, "; ".join(word for word in words if word) or "it did not report in"
    if len(lines) > _NAMED_PROCESSES:
        yield "more processes", f"{len(lines) - _NAMED_PROCESSES} others did not report in"
