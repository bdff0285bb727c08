"""`haiprof COMMAND` as users see it: what is printed, what is written, what is left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import haiprof
from tests.process.jobs import training
from tests.process.live import LiveJob, within

HAIPROF = [sys.executable, "-m", "haiprof"]


def run(*words: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HAIPROF, *words], cwd=cwd, env={**os.environ, **environ}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def runs(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("haiprof-logs/*") if path.is_dir())


def test_first_line_says_what_was_taken(tmp_path: Path) -> None:
    done = run("echo", "hi", "--time", "7", "--lr", "1", cwd=tmp_path)
    assert done.stdout == "hi --lr 1\n"
    warning, first = done.stderr.splitlines()[:2]
    assert "haiprof took --time 7, and echo does not get it; haiprof -- echo --time 7" in warning
    assert "for 7 s; with --time 7" in first


def test_manifest_holds_command_options_and_outcome(tmp_path: Path) -> None:
    run("--name", "my job", "--warmup", "2", "bash", "-c", "exit 3", cwd=tmp_path)
    (folder,) = runs(tmp_path)
    content = json.loads((folder / "run.json").read_text())
    assert folder.name.startswith("my-job-")
    assert content["command"] == ["bash", "-c", "exit 3"]
    assert content["options"]["warmup"] == 2.0
    assert (content["exit_status"], content["signal"]) == (3, None)
    assert content["start_wall_ns"] < content["end_wall_ns"]


@pytest.mark.parametrize(("words", "environ"), [(["--quiet"], {}), ([], {"HAIPROF_ENABLED": "0"})])
def test_quiet_and_disabled_by_the_platform_nothing_of_ours_is_printed(
    tmp_path: Path, words: list[str], environ: dict[str, str]
) -> None:
    done = run(*words, "echo", "hi", cwd=tmp_path, **environ)
    assert (done.stdout, done.stderr) == ("hi\n", "")
    assert bool(runs(tmp_path)) is bool(words)


def test_second_haiprof_inside_leaves_the_first_in_charge(tmp_path: Path) -> None:
    done = run(*HAIPROF, "--time", "5", "echo", "hi", cwd=tmp_path)
    assert done.stdout == "hi\n"
    assert "already recorded" in done.stderr
    assert len(runs(tmp_path)) == 1


def test_log_directory_that_cannot_be_made_leaves_the_job_running(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("--log-dir", "file/logs", "bash", "-c", "echo hi; exit 4", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (4, "hi\n")
    assert "the job runs unrecorded" in done.stderr
    assert str(tmp_path / "file/logs") in done.stderr


def test_launchers_with_one_run_id_share_a_run_directory(tmp_path: Path) -> None:
    words = [*HAIPROF, "--quiet", "--run-id", "job7", "--name", "x", "bash", "-c"]
    last = "touch $0; until [ -e first ] && [ -e second ]; do sleep 0.02; done"
    jobs = [subprocess.Popen([*words, last, name], cwd=tmp_path) for name in ("first", "second")]
    assert [job.wait(60) for job in jobs] == [0, 0], "each ends once both run"
    assert [path.name for path in runs(tmp_path)] == ["x-job7"]


def test_environment_of_the_job_differs_in_few_variables_and_in_none_that_is_set(
    tmp_path: Path,
) -> None:
    own = {"TORCH_FR_BUFFER_SIZE": "100"}
    code = "import os, json; print(json.dumps(dict(os.environ)))"
    bare = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **own}, capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    recorded = run("--quiet", sys.executable, "-c", code, cwd=tmp_path, **own)
    before, after = json.loads(bare.stdout), json.loads(recorded.stdout)
    changed = {key for key in {**before, **after} if before.get(key) != after.get(key)}
    dumps = {"TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"}
    assert changed == {"PYTHONPATH", "HAIPROF_ACTIVE_RUN", *dumps}
    assert Path(after["TORCH_FR_DUMP_TEMP_FILE"]).parent.is_dir()
    assert after["PYTHONPATH"].endswith(before.get("PYTHONPATH", ""))


@pytest.mark.proof
def test_launcher_without_open_streams_still_runs_the_job(tmp_path: Path) -> None:
    script = f"exec {' '.join(HAIPROF)} bash -c 'touch done; exit 5' <&- >&- 2>&-"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 5
    assert (tmp_path / "done").exists()


def test_results_are_complete_while_the_job_still_runs(tmp_path: Path) -> None:
    script = training("while True:", before="print('TRAINS', flush=True)")
    (tmp_path / "train.py").write_text(script)
    with LiveJob(tmp_path, ["python", "train.py"], "--time", "1") as job:
        within(120, lambda: list(job.logs.glob("*/report/verdict.json")))
        assert job.process.poll() is None
        within(60, lambda: "the job runs on without haiprof's hooks" in job.stderr)


@pytest.mark.proof
def test_script_without_a_first_line_runs_as_in_a_shell(tmp_path: Path) -> None:
    script = tmp_path / "job"
    script.write_text("echo hi\nexit 4\n")
    script.chmod(0o755)
    done = run("./job", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (4, "hi\n")


@pytest.mark.proof
def test_deleted_working_directory_leaves_the_job_running(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    command = f"mkdir {gone}; cd {gone}; rmdir {gone}; exec {' '.join(HAIPROF)} echo hi"
    package = str(Path(__file__).parents[3])
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PYTHONPATH": package},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "hi\n")
    assert "the job runs unrecorded" in done.stderr


@pytest.mark.proof
def test_log_directory_that_pythonpath_cannot_carry_is_said(tmp_path: Path) -> None:
    done = run("--log-dir", "a:b", "echo", "hi", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "hi\n")
    assert "PYTHONPATH cannot carry" in done.stderr


@pytest.mark.proof
def test_plain_run_has_the_shells_pipe_signal(tmp_path: Path) -> None:
    code = "set -o pipefail; yes | head -1 >/dev/null; echo $?"
    done = run("bash", "-c", code, cwd=tmp_path, HAIPROF_ENABLED="0")
    assert done.stdout == "141\n"


def test_agent_that_fails_does_not_reach_the_job(tmp_path: Path) -> None:
    broken = tmp_path / "haiprof-logs" / "x-1"
    script = f"sleep 0.1; rm -rf {broken}; sleep 1; exit 6"
    done = run("--run-id", "1", "--name", "x", "bash", "-c", script, cwd=tmp_path)
    assert done.returncode == 6
    assert "Traceback" not in done.stderr


def test_file_of_the_user_is_not_taken_for_pythons(tmp_path: Path) -> None:
    (tmp_path / "calendar.py").write_text("raise SystemExit('the job ran in our process')\n")
    (tmp_path / "polars.py").write_text("raise SystemExit('the job ran in our process')\n")
    script = tmp_path / "train" / "train.py"
    script.parent.mkdir()
    script.write_text(training("for _ in range(30):", each=""))
    done = run("train/train.py", cwd=tmp_path)
    assert "our process" not in done.stderr
    assert "30 steps" in done.stderr


def test_trace_in_place_of_a_script_is_judged_as_a_trace(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 5}
    trace = {"schemaVersion": 1, "traceEvents": [event]}
    (tmp_path / "t.json").write_text(json.dumps(trace))
    done = run("t.json", cwd=tmp_path)
    assert "Syntax" not in done.stderr
    assert "t.json" in done.stdout
    assert not runs(tmp_path)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["nosuch.py"], 2, "nosuch.py: no such file"),
        (["env.sh"], 127, "neither a Python script nor a program"),
        (["verdct"], 127, "did you mean: haiprof verdict"),
        (["-m", "nosuch.train"], 2, "-m nosuch.train: no module named 'nosuch'"),
    ],
)
def test_what_cannot_start_is_said_and_leaves_no_run(
    tmp_path: Path, words: list[str], status: int, said: str
) -> None:
    (tmp_path / "env.sh").write_text("echo\n")
    done = run(*words, cwd=tmp_path)
    assert done.returncode == status
    assert said in done.stderr
    assert not runs(tmp_path)


@pytest.mark.proof
def test_second_start_of_a_running_job_names_attach(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, subprocess, sys\n"
        "if os.environ.get('INNER'): raise SystemExit\n"
        "for name in [n for n in os.environ if n.startswith('HAIPROF')]: del os.environ[name]\n"
        "os.environ.pop('PYTHONPATH', None)\n"
        "os.environ['INNER'] = '1'\n"
        "program = 'import sys; sys.path.insert(0, sys.argv.pop(1));'\n"
        "program += 'from haiprof.__main__ import main; sys.exit(main())'\n"
        "words = ['--log-dir', 'logs', '--time', '5', 'train.py']\n"
        "subprocess.run([sys.executable, '-c', program, sys.argv[1], *words])\n"
    )
    root = str(Path(haiprof.__file__).parent.parent)
    done = run("--log-dir", "logs", "train.py", root, cwd=tmp_path)
    assert "haiprof attach train-" in done.stderr
    assert "--time 5" in done.stderr
