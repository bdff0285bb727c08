"""`haiprof export --to wandb|mlflow`: a run in an experiment tracker."""

from __future__ import annotations

from pathlib import Path

from haiprof.cli.arguments import RunDir
from haiprof.cli.output import Output
from haiprof.cli.target import open_target


def wandb(directory: RunDir = None) -> None:
    """Send verdict, ledger, medians, step times and the page to Weights & Biases.

    Its own variables count: WANDB_PROJECT, WANDB_MODE=offline, WANDB_DIR; with WANDB_RUN_ID and
    WANDB_RESUME=allow they go into the run that the job itself logged to. Needs
    `pip install 'haiprof[wandb]'`.

    For example:

      haiprof export --to wandb                   the newest run of the log directory
      WANDB_RUN_ID=3kx81f WANDB_RESUME=allow haiprof export --to wandb haiprof-logs/train-...
    """
    _send("wandb", directory)


def mlflow(directory: RunDir = None) -> None:
    """Send verdict, ledger, medians, step times and the page to MLflow.

    Its own variables count: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME; with MLFLOW_RUN_ID they go
    into the run that the job itself logged to. Needs `pip install 'haiprof[mlflow]'`.

    For example:

      haiprof export --to mlflow                  the newest run of the log directory
      MLFLOW_TRACKING_URI=http://tracker:5000 haiprof export --to mlflow haiprof-logs/train-...
    """
    _send("mlflow", directory)


def _send(tracker: str, directory: Path | None) -> None:
    from haiprof.base.safe_files import MadeFolder
    from haiprof.compat.trackers import send, tracked_run
    from haiprof.diagnosis.engine import diagnose
    from haiprof.diagnosis.verdict import as_document
    from haiprof.show.markdown import verdict_markdown
    from haiprof.show.page.content import page_content
    from haiprof.show.page.render import report_html

    analyzer = open_target(directory)
    found, manifest = diagnose(analyzer), analyzer.manifest()
    texts = {"command": " ".join(manifest.command), "run": str(analyzer.run.root),
             "version": manifest.haiprof_version}  # fmt: skip
    files = {
        "report.html": report_html(page_content(analyzer)),
        "verdict.md": verdict_markdown(found, found.name),
    }
    sent = tracked_run(analyzer.steps(), as_document(found), texts, files)
    folder = MadeFolder.temporary(f"haiprof-{tracker}-")
    try:
        Output().hint(f"sent to {tracker}: {send(tracker, sent, folder.path)}")
    finally:
        folder.remove()
