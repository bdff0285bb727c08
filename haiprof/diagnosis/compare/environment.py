"""What differs around two runs: command, options, code, packages, variables, machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from haiprof.diagnosis.compare.compared_run import ComparedRun
from haiprof.run_analysis.run_files import RankFiles

_NOT_SPEED = ("log_dir", "name", "run_id", "quiet", "tensorboard", "prometheus_port")
_MACHINE = ("cpu_model", "cpu_count", "allowed_cpu_count", "memory", "kernel", "architecture",
            "nvidia_driver")  # fmt: skip
_RANK_FACTS = ("python", "torch", "device", "gpu_name")
_TORCH_FACTS = ("torch_cuda", "torch_hip", "torch_git_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """One thing that is not the same in both runs."""

    kind: str
    """`command`, `code`, `package`, `version`, `variable`, `machine`, `ranks` or `option`."""
    name: str
    before: Any
    """Null where the run has none."""
    after: Any


def differences(before: ComparedRun, after: ComparedRun) -> tuple[Differs, ...]:
    """What differs, most telling first; only what both runs recorded."""
    return (*_of_runs(before, after), *_of_ranks(before, after), *_of_options(before, after))


def unknown(before: ComparedRun, after: ComparedRun) -> tuple[str, ...]:
    """What could not be compared, and why."""
    found = []
    for word, side in (("baseline", before), ("new run", after)):
        environment = _environment(side)
        git = _part(environment, "git")
        if side.manifest is None:
            found.append(f"{word}: run.json is damaged: command, options and code are not compared")
        elif not environment:
            found.append(f"{word}: recorded by a haiprof that did not note its surroundings")
        elif git.get("commit") is None:
            found.append(f"{word}: code not compared by commit: {git.get('reason')}")
        elif git.get("dirty") is None:
            why = git.get("dirty_reason") or "the job or its launcher was over before git answered"
            found.append(f"{word}: whether all changes were committed is not known: {why}")
    return tuple(found)


def _of_runs(before: ComparedRun, after: ComparedRun) -> Iterator[Differs]:
    if before.manifest is None or after.manifest is None:
        return
    if before.manifest.command != after.manifest.command:
        yield Differs(kind="command", name="command", before=before.manifest.command,
                      after=after.manifest.command)  # fmt: skip
    old, new = _environment(before), _environment(after)
    if not old or not new:
        return
    yield from _of_code(old, new)
    machines = _part(old, "machine"), _part(new, "machine")
    yield from _pairs("machine", *machines, _MACHINE)
    if before.manifest.host != after.manifest.host:
        yield Differs(kind="machine", name="host", before=before.manifest.host,
                      after=after.manifest.host)  # fmt: skip


def _of_code(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[Differs]:
    gits = _part(old, "git"), _part(new, "git")
    yield from _pairs("code", *gits, ("commit", "branch", "changes_digest", "dirty"))
    scripts = _part(old, "script"), _part(new, "script")
    if all(script.get("digest") for script in scripts):
        yield from _pairs("code", *scripts, ("digest",), called="script")


def _of_ranks(before: ComparedRun, after: ComparedRun) -> Iterator[Differs]:
    files = [_first_rank(side) for side in (before, after)]
    worlds = [len(side.world) for side in (before, after)]
    if worlds[0] != worlds[1]:
        yield Differs(kind="ranks", name="ranks with steps", before=worlds[0], after=worlds[1])
    if files[0] is None or files[1] is None:
        return
    yield from _pairs("version", files[0].report, files[1].report, _RANK_FACTS)
    lines = [_line(own) for own in files if own is not None]
    if not all(lines):
        return
    yield from _pairs("version", lines[0], lines[1], _TORCH_FACTS)
    tables = [_part(line, "packages") for line in lines]
    if all(tables):
        yield from _pairs("package", tables[0], tables[1])
    elif lines[0].get("packages_digest") != lines[1].get("packages_digest"):
        yield from _pairs("package", lines[0], lines[1], ("packages_digest",))
    yield from _pairs("variable", *(_part(lines[side], "variables") for side in (0, 1)))


def _of_options(before: ComparedRun, after: ComparedRun) -> Iterator[Differs]:
    if before.manifest is None or after.manifest is None:
        return
    options = before.manifest.options, after.manifest.options
    names = [n for n in sorted({*options[0], *options[1]}) if n not in _NOT_SPEED]
    yield from _pairs("option", *options, names)


def _pairs(
    kind: str,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    names: Any = None,  # noqa: ANN401 - any iterable of names; None takes all
    *,
    called: str = "",
) -> Iterator[Differs]:
    for name in sorted({*old, *new}) if names is None else names:
        if old.get(name) != new.get(name):
            yield Differs(kind=kind, name=called or name, before=old.get(name), after=new.get(name))


def _environment(side: ComparedRun) -> Mapping[str, Any]:
    return side.manifest.environment if side.manifest is not None else {}


def _part(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = content.get(name)
    return found if isinstance(found, dict) else {}


def _first_rank(side: ComparedRun) -> RankFiles | None:
    files = [rank for rank in side.analyzer.files.ranks if rank.report]
    return files[0] if files else None


def _line(files: RankFiles) -> Mapping[str, Any]:
    lines = files.of_type("environment")
    return lines[0] if lines else {}
