"""What a run records of its surroundings: the code's state, listed variables, never a secret."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from haiprof.agent.job_environment import Surroundings, at_launch
from haiprof.run_format.environment import git_head, installed_packages, named_variables

HAIPROF = [sys.executable, "-m", "haiprof"]
WAIT = "until {grep} -q cpu_coun[t] {logs}/*/run.json; do {sleep} 0.1; done"
"""Until the surroundings are in run.json, where this command itself is, too."""
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words],
        cwd=folder, capture_output=True, text=True, check=True,
        env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"},
    )  # fmt: skip
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    (folder / "train.py").write_text("print('training')\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def waits(logs: Path) -> list[str]:
    """A job that runs until then, and needs no PATH."""
    tools = {name: shutil.which(name) for name in ("grep", "sleep")}
    return ["/bin/sh", "-c", WAIT.format(logs=logs, **tools)]


def recorded(folder: Path, *command: str, **environ: str) -> dict[str, Any]:
    """The environment in run.json of a job there."""
    logs = folder.parent / "logs"
    subprocess.run(
        [*HAIPROF, "run", "--quiet", "--log-dir", str(logs), "--", *command],
        cwd=folder, env={**os.environ, **environ}, check=True, timeout=120,
    )  # fmt: skip
    (manifest,) = logs.glob("*/run.json")
    found: dict[str, Any] = json.loads(manifest.read_text())["environment"]
    return found


def found(folder: Path, *command: str) -> dict[str, Any]:
    """What the thread finds, without a job."""
    asked = Surroundings(at_launch(str(folder), os.environ), command, os.environ)
    asked.start()
    result = asked.take(wait_s=30)
    assert result is not None
    return result


@needs_git
def test_commit_is_recorded_with_the_run(repository: Path) -> None:
    environment = recorded(repository, *waits(repository.parent / "logs"))
    assert environment["git"]["commit"] == git(repository, "rev-parse", "HEAD")
    assert environment["git"]["branch"] == "main"
    assert environment["git"]["dirty"] is False
    assert environment["machine"]["cpu_count"] == os.cpu_count()


@needs_git
def test_uncommitted_changes_are_told_apart(repository: Path) -> None:
    script = repository / "train.py"
    script.write_text("print('one')\n")
    first = found(repository, "python", str(script))
    script.write_text("print('two')\n")
    second = found(repository, "python", str(script))
    assert first["git"]["dirty"] is True
    assert first["git"]["changed_files"] == ["train.py"]
    assert first["git"]["changes_digest"] != second["git"]["changes_digest"]
    assert first["script"]["digest"] != second["script"]["digest"]


@needs_git
def test_asking_git_writes_nothing_and_runs_no_hook_or_monitor(repository: Path) -> None:
    trap = repository / "trap.sh"
    trap.write_text(f"#!/bin/sh\ntouch {repository}/ran\n")
    trap.chmod(0o755)
    git(repository, "config", "core.fsmonitor", str(trap))
    git(repository, "config", "diff.external", str(trap))
    (repository / "train.py").write_text("print('changed')\n")
    index = repository / ".git/index"
    os.utime(repository / "train.py", (1, 1))  # git would refresh its index
    before = (index.stat().st_mtime_ns, index.read_bytes())
    assert found(repository, "true")["git"]["dirty"] is True
    assert (index.stat().st_mtime_ns, index.read_bytes()) == before
    assert not (repository / "ran").exists()


@needs_git
@pytest.mark.parametrize("branch", ["feature/x", "$(touch ran)", "--upload-pack=x", "\x1b[31mred"])
def test_hostile_branch_names_are_plain_text(repository: Path, branch: str) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    ref = repository / ".git/refs/heads" / branch
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit + "\n")
    (repository / ".git/HEAD").write_text(f"ref: refs/heads/{branch}\n")
    assert git_head(str(repository)) == {
        "root": str(repository), "branch": branch, "commit": commit,
    }  # fmt: skip
    assert not (repository / "ran").exists()


@pytest.mark.parametrize("ref", ["../../../secret", "refs/../../secret", "/etc/passwd", "refs//x"])
def test_head_cannot_lead_out_of_the_repository(tmp_path: Path, ref: str) -> None:
    (tmp_path / "secret").write_text("a" * 40)
    (tmp_path / "code/.git").mkdir(parents=True)
    (tmp_path / "code/.git/HEAD").write_text(f"ref: {ref}\n")
    assert set(git_head(str(tmp_path / "code"))) == {"reason"}


@needs_git
def test_packed_branch_detached_head_and_worktree_are_read(repository: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    git(repository, "pack-refs", "--all")
    assert git_head(str(repository))["commit"] == commit
    git(repository, "worktree", "add", "-q", "-b", "other", "../tree")
    other = git_head(str(repository.parent / "tree"))
    assert (other["branch"], other["commit"]) == ("other", commit)
    git(repository, "checkout", "-q", "--detach")
    assert git_head(str(repository))["branch"] is None
    assert git_head(str(repository))["commit"] == commit


def test_head_that_is_a_pipe_does_not_stop_the_launch(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    os.mkfifo(tmp_path / ".git/HEAD")
    assert "cannot be read" in git_head(str(tmp_path))["reason"]


def test_folder_outside_any_repository_says_so(tmp_path: Path) -> None:
    assert git_head(str(tmp_path)) == {"reason": "no git repository here"}


def test_job_runs_where_git_is_missing(tmp_path: Path) -> None:
    folder = tmp_path / "code"
    (folder / ".git/refs/heads").mkdir(parents=True)
    (folder / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (folder / ".git/refs/heads/main").write_text("b" * 40)
    environment = recorded(folder, *waits(tmp_path / "logs"), PATH="/nowhere")
    assert environment["git"]["commit"] == "b" * 40
    assert environment["git"]["dirty"] is None
    assert "git" in environment["git"]["dirty_reason"]


@pytest.mark.proof
def test_launcher_that_is_nicer_already_stays_so(tmp_path: Path) -> None:
    nicer = ["nice", "-n", "15"]
    if os.getuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root may always be less nice again")
        nicer += ["setpriv", "--bounding-set", "-sys_nice"]
    job = [*HAIPROF, "run", "--quiet", "--log-dir", str(tmp_path), "--", *waits(tmp_path)]
    done = subprocess.run(
        [*nicer, *job], capture_output=True, text=True, check=True, timeout=120, cwd=tmp_path
    )
    assert done.stderr == ""
    (manifest,) = tmp_path.glob("*/run.json")
    assert "machine" in json.loads(manifest.read_text())["environment"]


def test_variables_off_the_list_are_left_out() -> None:
    kept = named_variables(
        {"NCCL_DEBUG": "INFO", "HOME": "/root", "MY_CUDA_X": "1", "LD_PRELOAD": "a"}
    )
    assert kept == {"LD_PRELOAD": "a", "NCCL_DEBUG": "INFO"}


def test_first_import_path_that_has_a_package_wins(tmp_path: Path) -> None:
    for folder, name in (("a", "Some_Thing-1.0.dist-info"), ("b", "some_thing-2.0.dist-info")):
        (tmp_path / folder / name).mkdir(parents=True)
    paths = [str(tmp_path / name) for name in ("missing", "a", "b")]
    assert installed_packages(paths) == {"some-thing": "1.0"}
