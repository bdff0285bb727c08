"""`haiprof export --to wandb|mlflow`: read back as the trackers themselves keep it."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Run

RUNS = Path(__file__).parents[2] / "data/runs"
_MLFLOW = """
import json, mlflow
from mlflow.artifacts import download_artifacts
run = mlflow.search_runs(output_format="list")[0]
page = download_artifacts(run_id=run.info.run_id, artifact_path="haiprof/report.html")
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "haiprof/step_ms")
print(json.dumps({"metrics": run.data.metrics, "tags": run.data.tags, "page": open(page).read(),
    "steps": [each.step for each in history],
    "files": [each.path for each in mlflow.artifacts.list_artifacts(
        run_id=run.info.run_id, artifact_path="haiprof")]}))
"""


def export(tracker: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "haiprof", "export", "--to", tracker, str(RUNS / "two_ranks")]
    environment = {**os.environ, **variables}
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


def wandb_records(path: Path) -> Iterator[Any]:
    """W&B's offline file: a LevelDB log, blocks of 32 KiB, of protobuf records."""
    from wandb.proto import wandb_internal_pb2

    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32_768 - place % 32_768 < 7:
            place += 32_768 - place % 32_768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # FULL, LAST
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


def test_wandb_has_the_verdict_the_ledger_the_step_times_and_the_page(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="pip install 'haiprof[wandb]'")
    export("wandb", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    (log,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = list(wandb_records(log))
    history = [{"/".join(i.nested_key) or i.key: i.value_json for i in r.history.item}
               for r in records if r.WhichOneof("record_type") == "history"]  # fmt: skip
    steps = [float(row["haiprof/step_ms"]) for row in history if "haiprof/step_ms" in row]
    assert len(steps) > 20
    assert all(step > 0 for step in steps)
    summary = {"/".join(i.nested_key) or i.key: i.value_json
               for r in records for i in r.summary.update}  # fmt: skip
    assert float(summary["haiprof/median_step_ms"]) > 0
    assert "haiprof/verdict" in summary
    tables = list(log.parent.glob("files/media/table/haiprof/ledger*.json"))
    assert "forward" in tables[0].read_text()
    names = {e.path for r in records for e in r.request.log_artifact.artifact.manifest.contents}
    names |= {e.path for r in records for e in r.artifact.manifest.contents}
    assert {"report.html", "verdict.json", "verdict.md", "ledger.csv"} <= names


def test_mlflow_has_the_verdict_the_ledger_the_step_times_and_the_page(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="pip install 'haiprof[mlflow]'")
    store = {
        "MLFLOW_TRACKING_URI": (tmp_path / "store").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    export("mlflow", tmp_path, **store)
    line = [sys.executable, "-c", _MLFLOW]
    done = subprocess.run(line, env={**os.environ, **store}, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["metrics"]["haiprof/median_step_ms"] > 0
    assert found["tags"]["haiprof.verdict"]
    assert found["tags"]["haiprof.command"].endswith(".py")
    assert found["steps"] == sorted(found["steps"])
    assert len(found["steps"]) > 20
    assert found["page"].startswith("<!DOCTYPE html>")
    assert {"haiprof/ledger.csv", "haiprof/verdict.json"} <= set(found["files"])


@pytest.mark.parametrize("tracker", ["wandb", "mlflow"])
def test_missing_package_names_its_extra(
    tracker: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    refused = run("export", "--to", tracker, RUNS / "two_ranks", status=6)
    assert f"pip install 'haiprof[{tracker}]'" in refused.err
