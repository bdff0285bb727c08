"""The GitHub Action's steps and the GitLab snippet, carried out as their runners do."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from tests.process.jobs import environment, training

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github/actions/haiprof"
LOOP = training("for number in range(80):", each="time.sleep(float(sys.argv[1]))")

pytestmark = pytest.mark.slow


def run_steps(folder: Path, variables: Mapping[str, str], script: str) -> int:
    own = {"GITHUB_ACTION_PATH": str(ACTION), "GITHUB_STEP_SUMMARY": str(folder / "step.md"),
           "GITHUB_OUTPUT": str(folder / "output"),
           "HAIPROF_CI_HAIPROF": f"{sys.executable} -m haiprof"}  # fmt: skip
    line = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    done = subprocess.run(line, cwd=folder, env=environment({**own, **variables}), check=False)
    return done.returncode


def run_action(folder: Path, **inputs: str) -> int:
    action = yaml.safe_load((ACTION / "action.yml").read_text())
    assert set(inputs) <= set(action["inputs"])
    (step,) = action["runs"]["steps"]
    values = {
        name: inputs.get(name, each.get("default")) for name, each in action["inputs"].items()
    }
    variables = {
        name: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: values[found[1]], text)
        for name, text in step["env"].items()
    }
    return run_steps(folder, variables, step["run"])


def train(folder: Path, step_s: float, **inputs: str) -> int:
    (folder / "loop.py").write_text(LOOP)
    command = f"{sys.executable} loop.py {step_s}"
    return run_action(folder, command=command, **{"fail-if-slower": "50%"}, **inputs)


def test_action_fails_where_the_step_became_slower_and_says_why_in_the_summary(
    tmp_path: Path,
) -> None:
    assert train(tmp_path, 0.01) == 0  # there is no baseline yet
    assert train(tmp_path, 0.08) == 10
    written = (tmp_path / "step.md").read_text()
    titles = re.findall(r"^### haiprof: (.*)", written, re.MULTILINE)
    assert titles == ["not decided whether it is slower than 50%", "slower than 50%"]
    assert written.endswith((tmp_path / "haiprof-summary.md").read_text())
    assert (tmp_path / "output").read_text().endswith("summary=haiprof-summary.md\nstatus=10\n")
    slower = written.rpartition("### haiprof: ")[2]
    assert "loop.py:10" in slower
    assert slower.count("\n## ") == 2, "comparison and verdict, each under its heading"


@pytest.mark.proof
def test_action_is_strict_where_asked(tmp_path: Path) -> None:
    assert train(tmp_path, 0.01, strict="true") == 5


def test_failing_job_keeps_its_status_and_is_explained(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'raise SystemExit(7)'"
    assert run_action(tmp_path, command=command) == 7
    assert "### haiprof: the job ended with exit status 7" in (tmp_path / "step.md").read_text()


@pytest.mark.proof
def test_gitlab_snippet_runs_the_same_script(tmp_path: Path) -> None:
    document = (ROOT / "docs/ci.md").read_text()
    (snippet,) = (yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", document, re.S)
                  if "HAIPROF_CI_COMMAND" in text)  # fmt: skip
    job = snippet["step-time"]
    (tmp_path / "haiprof").symlink_to(ROOT)
    (tmp_path / "loop.py").write_text(LOOP)
    _install, script = job["script"]
    variables = {**job["variables"], "HAIPROF_CI_COMMAND": f"{sys.executable} loop.py 0.01",
                 "GITHUB_STEP_SUMMARY": "", "GITHUB_OUTPUT": ""}  # fmt: skip
    assert run_steps(tmp_path, variables, script) == 0
    (summary,) = job["artifacts"]["paths"]
    assert "### haiprof: not decided" in (tmp_path / summary).read_text()
