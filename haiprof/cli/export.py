"""`haiprof export`: tables as CSV or Parquet, counters for Prometheus or OpenTelemetry."""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated

from haiprof.base.errors import UsageError
from haiprof.cli.arguments import RunDir
from haiprof.cli.command_line import Opt
from haiprof.cli.names import TABLES, nearest, second_words
from haiprof.cli.output import Output
from haiprof.cli.target import open_target


class Format(str, Enum):
    """What `--format` takes."""

    CSV = "csv"
    PARQUET = "parquet"
    PROMETHEUS = "prometheus"
    OTLP_JSON = "otlp-json"


class Table(str, Enum):
    """What `--what` takes."""

    COUNTERS = "counters"
    STEPS = "steps"
    PHASES = "phases"
    RANKS = "ranks"


_TABULAR = (Format.CSV, Format.PARQUET)
_FORMAT_HELP = (
    "csv and parquet: a table, rates per second. prometheus: last values, text format. "
    "otlp-json: every sample. The last two hold counters as they were read."
)


def _known_format(text: str) -> Format:
    """The format of that name.

    Raises:
        UsageError: There is none: all that `--to` takes are named, other commands' too.
    """
    forms = second_words("export")
    if text in TABLES:
        return Format(text)
    near = nearest(text, forms)
    raise UsageError(
        f"--to: expected one of {', '.join(forms)}, got {text!r}",
        hint=f"did you mean haiprof export --to {near}?" if near else "haiprof export --help",
    )


FormatOption = Annotated[str, Opt("--to FORMAT", _FORMAT_HELP, old=("--format",))]
TableOption = Annotated[Table, Opt("--what VALUE", "The table, for csv and parquet.")]
OutputFile = Annotated[
    Path | None,
    Opt("-o --output FILE", "Where to write. Left out: standard output, but for parquet."),
]
Force = Annotated[bool, Opt("--force", "Replace FILE if it already exists.")]
Lines = Annotated[bool, Opt("--lines", "otlp-json: a line for each node and rank, for large runs.")]


def export(
    directory: RunDir = None,
    to: FormatOption = "csv",
    what: TableOption = Table.COUNTERS,
    output: OutputFile = None,
    force: Force = False,
    lines: Lines = False,
) -> None:
    """Write a run's data for other tools. What was not measured is left out, never 0.

    Other forms have options of their own, which `haiprof export --to FORM --help` shows:
    tensorboard and scalars, perfetto, merged (one trace with all ranks), linked (execution traces
    with times), chakra, wandb, mlflow.

    For example:

      haiprof export --to parquet -o counters.parquet
      haiprof export --what steps | head              the newest run's steps as CSV
      haiprof export --to prometheus -o job.prom  OpenTelemetry's names in Prometheus' form
      haiprof export --to otlp-json --lines -o job.jsonl
    """
    from haiprof.compat.exports import Export, write_export

    format_ = _known_format(to)
    if format_ is Format.PARQUET and output is None:
        raise UsageError("parquet is not text: it needs a file", hint="-o FILE.parquet")
    if format_ not in _TABULAR and what is not Table.COUNTERS:
        raise UsageError(
            f"{format_.value} holds counters only", hint=f"--to csv --what {what.value}"
        )
    if lines and format_ is not Format.OTLP_JSON:
        raise UsageError("--lines is for --to otlp-json")
    analyzer = open_target(directory)
    wanted = Export(format=format_.value, what=what.value, lines=lines)
    written = write_export(analyzer, wanted, output, force=force, stdout=sys.stdout.buffer)
    for note in written.notes:
        Output().hint(note)
    if output is not None:
        Output().hint(f"wrote {written.count} {written.unit} to {output}")
