"""Recorded settings on disk: what each field of the lines `settings` and `settings_seen` means.

The fields with their meanings are data, in setting_lines.json.
"""

from __future__ import annotations

from collections.abc import Mapping

from haiprof.base.version import read_data

SETTINGS, SEEN = "settings", "settings_seen"
UNUSED, DISCARDED = "unused_gradients", "discarded_gradients"
"""What a line of a rank's events.jsonl is, in its field `type`: once per process, counts, and what
optimizer steps left behind."""

_FIELDS: Mapping[str, Mapping[str, str]] = read_data("run_format/setting_lines.json")
SETTINGS_FIELDS, SEEN_FIELDS = _FIELDS[SETTINGS], _FIELDS[SEEN]
"""The fields of these lines; those of `settings_seen` are counts of the whole recording."""
FLAGS = _FIELDS["flags"]
"""Switches by their name in `flags`, and where they are set."""
MODEL_FIELDS, OPTIMIZER_FIELDS, HOOK_FIELDS = (
    _FIELDS[name] for name in ("models", "optimizers", "hooks")
)
"""The fields of one of `models`, `optimizers` and `hooks`."""
UNUSED_FIELDS, DISCARDED_FIELDS = _FIELDS[UNUSED], _FIELDS[DISCARDED]
"""The fields of one of `roots` in these lines; their `step`, `time_ns` and `cost_ns` are those of
the look."""
