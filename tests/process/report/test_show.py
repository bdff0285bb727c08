from __future__ import annotations

import html
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import haiprof
from haiprof import Analyzer
from tests.unit.analysis.recorded import spans_of, write_rank, write_run
from tests.unit.report.fake_run import empty_run


@pytest.fixture
def analyzer(tmp_path: Path) -> Analyzer:
    run = write_run(tmp_path / "job-1")
    write_rank(run, spans_of("D F B O " * 40, span_ns=1_000_000, gap_ns=10_000))
    return Analyzer(run.root)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "job-0")
    write_rank(run, spans_of("D F B O " * 40, span_ns=1_000_000, gap_ns=10_000))
    return run.root


def test_show_in_a_terminal_prints(
    analyzer: Analyzer, other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    analyzer.show_overview()
    analyzer.show_ranks()
    analyzer.show_one_rank(0)
    analyzer.show_comparison(other)
    text = capsys.readouterr().out
    assert "no difference above" in text  # a run against itself
    assert "Processes" in text
    assert "Slowest steps" in text


@pytest.mark.slow
def test_show_in_a_notebook_displays_the_page_and_needs_no_network(
    analyzer: Analyzer,
    other: Path,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    root = str(Path(haiprof.__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    code = f"from haiprof import Analyzer\na = Analyzer({str(analyzer.path)!r})\n"
    cells = {
        code + "a.show_overview()": "verdict", "a.show_one_rank(0)": "rank",
        "a.show_ranks()": "collectives", f"a.show_comparison({str(other)!r})": "comparison",
    }  # fmt: skip
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    for cell, section in zip(notebook.cells, cells.values(), strict=True):
        (output,) = cell.outputs
        shown = output["data"]["text/html"]
        assert shown.startswith('<iframe title="job-1"')
        page = html.unescape(shown)
        assert f'<section id="{section}"' in page or section == "collectives"
        assert "cdn.plot.ly" not in page
        assert output["data"]["text/plain"] == "<haiprof page: job-1>"


@pytest.mark.proof
def test_scalars_follow_ends_on_sigterm(tmp_path: Path) -> None:
    empty_run(tmp_path, end_wall_ns=None, exit_status=None, start_wall_ns=time.time_ns())
    process = subprocess.Popen(
        [sys.executable, "-m", "haiprof", "scalars", str(tmp_path), "--follow", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(6)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=90)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    assert '"point_count": 0' in output
