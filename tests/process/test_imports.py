"""What haiprof's imports load, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampling import first_of
from tests.unit.cli.test_kept_answers import ended_run
from tests.unit.test_architecture import PACKAGE, STDLIB


def _loaded_by(code: str) -> set[str]:
    """Top-level modules that a statement loads in a fresh interpreter."""
    program = (
        f"import sys; sys.path.insert(0, {str(PACKAGE.parent)!r}); before = set(sys.modules)\n"
        f"{code}\nprint(*{{m.split('.')[0] for m in set(sys.modules) - before}})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code", ["import haiprof; haiprof.step()", "import haiprof.in_job, haiprof.run_format"]
)
def test_import_loads_nothing_but_the_standard_library(code: str) -> None:
    assert _loaded_by(code) <= STDLIB | {"haiprof"}


def test_launcher_starts_without_torch_polars_or_plotly() -> None:
    loaded = _loaded_by(
        "import haiprof.__main__, haiprof.launch.run, haiprof.launch.supervisor, "
        "haiprof.agent.node_agent, haiprof.agent.samplers"
    )
    heavy = {"torch", "numpy", "polars", "plotly", "rich", "typer", "pynvml", "prometheus_client"}
    heavy |= {"http", "email"}
    assert not loaded & heavy


def test_analyzer_and_its_verdict_load_no_plotly(tmp_path: Path) -> None:
    run = ended_run(tmp_path / "job-1")
    code = f"from haiprof import Analyzer; Analyzer({str(run.root)!r}).verdict()"
    assert not _loaded_by(code) & {"torch", "plotly", "jinja2"}


HEAVY = {
    "torch", "numpy", "polars", "plotly", "rich", "typer", "pydantic", "msgspec", "duckdb",
}  # fmt: skip


@pytest.mark.parametrize("words", first_of([["verdict"], ["overview"], ["rank", "0"]], ["verdict"]))
def test_answer_that_is_kept_is_printed_without_any_library(
    tmp_path: Path, words: list[str]
) -> None:
    run = ended_run(tmp_path / "job-1")
    code = f"from haiprof.cli import main; main({[*words, str(run.root)]!r})"
    quiet = f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    {code}"
    _loaded_by(quiet)
    assert not _loaded_by(quiet) & HEAVY


@pytest.mark.parametrize(
    "command", first_of(["verdict", "overview", "list", "ps"], "overview", "ps")
)
def test_command_loads_nothing_that_it_does_not_need(tmp_path: Path, command: str) -> None:
    run = ended_run(tmp_path / "job-1")
    target = {"list": [str(run.root.parent)], "ps": []}.get(command, [str(run.root)])
    code = f"from haiprof.cli import main; main({[command, *target]!r})"
    quiet = f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    {code}"
    assert not _loaded_by(quiet) & {"torch", "plotly", "duckdb", "jinja2", "pandas"}
