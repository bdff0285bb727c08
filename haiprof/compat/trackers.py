"""A run in an experiment tracker: verdict, ledger, medians, step times and page."""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from haiprof.base.errors import HaiprofError, MissingExtraError
from haiprof.base.units import NS_PER_MS
from haiprof.compat.exports import write_csv
from haiprof.show.figures.style import write_text
from haiprof.show.summary import select_judged_steps

MOST_POINTS = 2_000  # Steps in the series of step times: evenly spread ones of a longer run
_COLUMNS = ("position", "activity", "code", "ms_per_step", "low_ms", "high_ms", "gain_ms",
            "gain_low_ms", "gain_high_ms", "when", "explanation")  # fmt: skip
_PHASES = ("dataloader", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """What a tracker gets of a run."""

    name: str  # Of the run directory
    texts: Mapping[str, str]  # Headline and identity
    values: Mapping[str, float]
    """Medians over judged steps of all ranks, in ms; the mean step; how many problems there are."""
    series: Sequence[tuple[int, int, float]]
    """(step, Unix time in ms, median of the ranks' step times in ms)."""
    ledger: pl.DataFrame  # One row per account
    files: Mapping[str, str]  # Content by name


def tracked_run(
    steps: pl.DataFrame, verdict: Mapping[str, Any], texts: Mapping[str, str],
    files: Mapping[str, str],
) -> Tracked:  # fmt: skip
    """What is sent of a run, of which `verdict` is the document of `haiprof verdict --json`."""
    judged = select_judged_steps(steps)
    columns = {"step": "step_ns", **{phase: f"{phase}_host_ns" for phase in _PHASES}}
    medians = judged.select(
        pl.col(column).median().alias(f"median_{name}_ms") for name, column in columns.items()
    ).to_dicts()[0]
    values = {**medians, "mean_step_ms": (verdict["step"] or {}).get("mean_ns")}
    by_step = (
        steps.group_by("step")
        .agg(pl.col("start_ns").min() // NS_PER_MS, pl.col("step_ns").median() / NS_PER_MS)
        .drop_nulls().sort("step")
    )  # fmt: skip
    ledger, table = _ledger(verdict["ledger"]), io.BytesIO()
    write_csv(ledger, table)
    known = {name: ns / NS_PER_MS for name, ns in values.items() if ns is not None}
    own = {"ledger.csv": table.getvalue().decode(), "verdict.json": json.dumps(verdict, indent=1)}
    return Tracked(
        name=Path(verdict["run"]).name, texts={"verdict": verdict["headline"], **texts},
        values={**known, "problems": verdict["problem_count"]},
        series=by_step.gather_every(-(-by_step.height // MOST_POINTS) or 1).rows(),
        ledger=ledger, files={**own, **files},
    )  # fmt: skip


def _ledger(accounts: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    rows = [
        {
            **account,
            "code": account["file"]
            and f"{account['file']}:{account['line']} {account['function']}",
            "ms_per_step": account["ns_per_step"] / NS_PER_MS,
            **{f"{name}_ms": account[f"{name}_ns"] / NS_PER_MS
               for name in ("low", "high", "gain", "gain_low", "gain_high")},
        }
        for account in accounts
    ]  # fmt: skip
    types = {name: pl.Float64 if name.endswith("_ms") or name == "ms_per_step" else pl.String
             for name in _COLUMNS}  # fmt: skip
    return pl.DataFrame([{name: row[name] for name in _COLUMNS} for row in rows], schema=types)


def send(tracker: str, run: Tracked, folder: Path) -> str:
    """Sends it to `wandb` or `mlflow`, by way of files in an empty folder; returns where it is.

    Their own variables say to where: project, server, mode, and which of their runs is continued.
    """
    try:
        module = importlib.import_module(tracker)
    except ImportError as error:
        raise MissingExtraError(
            f"--to {tracker} needs the package {tracker} ({error})",
            hint=f"pip install 'haiprof[{tracker}]'",
        ) from None
    for name, text in run.files.items():
        write_text(folder / name, text)
    try:
        return {"wandb": _send_to_wandb, "mlflow": _send_to_mlflow}[tracker](module, run, folder)
    except Exception as error:
        raise HaiprofError(
            f"{tracker} did not take the run: {type(error).__name__}: {error}"
        ) from error


def _send_to_wandb(wandb: Any, run: Tracked, folder: Path) -> str:  # noqa: ANN401 (no types without it)
    with wandb.init(name=run.name, job_type="haiprof") as sent:
        sent.config.update({"haiprof": dict(run.texts)}, allow_val_change=True)
        sent.define_metric("haiprof/step_ms", step_metric="haiprof/step")
        for step, _, step_ms in run.series:
            sent.log({"haiprof/step": step, "haiprof/step_ms": step_ms})
        table = wandb.Table(columns=list(_COLUMNS), data=run.ledger.rows())
        sent.log({"haiprof/ledger": table})
        for name, value in {**run.values, "verdict": run.texts["verdict"]}.items():
            sent.summary[f"haiprof/{name}"] = value
        artifact = wandb.Artifact(f"haiprof-{sent.id}", type="haiprof")
        artifact.add_dir(str(folder))
        sent.log_artifact(artifact)
        return str(sent.url or sent.dir)


def _send_to_mlflow(mlflow: Any, run: Tracked, folder: Path) -> str:  # noqa: ANN401
    with mlflow.start_run(run_name=run.name) as sent:
        client, number = mlflow.MlflowClient(), sent.info.run_id
        mlflow.set_tags({f"haiprof.{name}": text for name, text in run.texts.items()})
        mlflow.log_metrics({f"haiprof/{name}": value for name, value in run.values.items()})
        points = [
            mlflow.entities.Metric("haiprof/step_ms", step_ms, time_ms, step)
            for step, time_ms, step_ms in run.series
        ]
        for first in range(0, len(points), 1_000):  # of one request
            client.log_batch(number, metrics=points[first : first + 1_000])
        mlflow.log_artifacts(str(folder), "haiprof")
        return f"run {number} in {mlflow.get_tracking_uri()}"
