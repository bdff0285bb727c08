"""What differs around two runs: command, options, code, packages, variables, machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from haiprof.base.options import ENV_FLIGHT_DUMPS, ENV_FLIGHT_SIZES, FLIGHT_ENTRIES
from haiprof.diagnosis.compare.compared_run import ComparedRun
from haiprof.run_analysis.run_files import mapping

_NOT_SPEED = ("log_dir", "name", "run_id", "quiet", "tensorboard", "prometheus_port")
_CODE = ("commit", "branch", "changes_digest", "dirty")
_MACHINE = ("cpu_model", "cpu_count", "allowed_cpu_count", "memory", "kernel", "architecture",
            "nvidia_driver")  # fmt: skip
_VERSIONS = ("python", "torch", "device", "gpu_name")
_TORCH_VERSIONS = ("torch_cuda", "torch_hip", "torch_git_version")
_OPEN = ("package", "variable", "option")
"""Of these the names are the run's own: one that a run lacks is a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differs:
    """One thing that is not the same in both runs."""

    kind: str
    """`command`, `code`, `package`, `version`, `variable`, `machine`, `ranks` or `option`."""
    name: str
    before: Any
    """None where the run has none."""
    after: Any


def differences(before: ComparedRun, after: ComparedRun) -> tuple[Differs, ...]:
    """What differs, most telling first; only what both runs recorded."""
    sides = _read_facts(before), _read_facts(after)
    found = []
    for kind, old in sides[0].items():
        new = sides[1][kind]
        if old is None or new is None:
            continue
        names = sorted({*old, *new}) if kind in _OPEN else list(old)
        for name in names:
            known = kind in _OPEN or None not in (old[name], new[name])
            if known and old.get(name) != new.get(name):
                found.append(
                    Differs(kind=kind, name=name, before=old.get(name), after=new.get(name))
                )
    return tuple(found)


def _read_facts(side: ComparedRun) -> dict[str, Mapping[str, Any] | None]:
    """By kind and name; None where the run did not record that kind."""
    manifest = side.manifest
    environment = manifest.environment if manifest else {}
    files = next((rank for rank in side.analyzer.files.ranks if rank.report), None)
    report = files.report if files else {}
    line = next(iter(files.of_type("environment")), {}) if files else {}
    packages = mapping(line.get("packages")) or {"packages_digest": line.get("packages_digest")}
    options = dict(manifest.options) if manifest else {}
    # Those that haiprof's launcher did not set.
    return {
        "command": {"command": manifest.command if manifest else None},
        "code": {
            **{name: mapping(environment.get("git")).get(name) for name in _CODE},
            "script": mapping(environment.get("script")).get("digest"),
        },
        "machine": {
            **{name: mapping(environment.get("machine")).get(name) for name in _MACHINE},
            "host": manifest.host if manifest else None,
        },
        "ranks": {"ranks with steps": len(side.inputs.world)},
        "version": {
            **{name: report.get(name) for name in _VERSIONS},
            **{name: line.get(name) for name in _TORCH_VERSIONS},
        },
        "package": packages if line else None,
        "variable": (
            {
                name: value
                for name, value in mapping(line.get("variables")).items()
                if name not in ENV_FLIGHT_DUMPS
                and not (name in ENV_FLIGHT_SIZES and value == FLIGHT_ENTRIES)
            }
        )
        if line
        else None,
        "option": {n: options[n] for n in options if n not in _NOT_SPEED} if manifest else None,
    }


def unknown(before: ComparedRun, after: ComparedRun) -> tuple[str, ...]:
    """What could not be compared, and why."""
    found = []
    for word, side in (("baseline", before), ("new run", after)):
        git = mapping(side.manifest.environment.get("git")) if side.manifest else {}
        if side.manifest is None:
            found.append(f"{word}: run.json is damaged: command, options and code are not compared")
        elif not side.manifest.environment:
            found.append(f"{word}: recorded by a haiprof that did not note its surroundings")
        elif git.get("commit") is None:
            found.append(f"{word}: code not compared by commit: {git.get('reason')}")
        elif git.get("dirty") is None:
            why = git.get("dirty_reason") or "the job or its launcher was over before git answered"
            found.append(f"{word}: whether all changes were committed is not known: {why}")
    return tuple(found)
