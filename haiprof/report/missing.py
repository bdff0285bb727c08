"""Why a source has no numbers: the agents' own words, or the option that left it out."""

from __future__ import annotations

from collections.abc import Mapping

from haiprof.errors import RunFormatError
from haiprof.rundir.layout import RunPaths
from haiprof.rundir.manifest import Manifest
from haiprof.rundir.reader import read_lines

_RECORDER_OF = {"host": "host", "process": "process", "gpu": "gpu"}
_TITLES = {"host": "node", "process": "processes", "gpu": "GPU"}


def missing_sources(
    run: RunPaths, manifest: Manifest | None, *, present: set[str]
) -> dict[str, str]:
    """Sources without any sample, each with the reason.

    Args:
        run: The run's paths; the agents' `counter_missing` and `sampler_error` lines are read.
        manifest: For the recorders that were switched on.
        present: Sources that have samples.

    Returns:
        Reason by title: `node`, `processes`, `GPU`.
    """
    reasons = _agent_reasons(run)
    chosen = manifest.options.get("recorder") if manifest else None
    return {
        _TITLES[source]: _reason(source, chosen, reasons)
        for source in _RECORDER_OF
        if source not in present
    }


def _reason(source: str, chosen: object, reasons: Mapping[str, str]) -> str:
    if isinstance(chosen, list) and _RECORDER_OF[source] not in chosen:
        return f"the recorder `{_RECORDER_OF[source]}` was left out by --recorder"
    return reasons.get(source, "no sample was taken")


def _agent_reasons(run: RunPaths) -> dict[str, str]:
    """The first reason that an agent gave for each source."""
    reasons: dict[str, str] = {}
    for _, node in run.node_folders():
        try:
            lines, _ = read_lines(node.events)
        except RunFormatError as error:
            reasons.setdefault("host", str(error))
            continue
        for line in lines:
            if line.get("type") in ("counter_missing", "sampler_error"):
                reasons.setdefault(str(line.get("source")), str(line.get("reason")))
    return reasons
