"""Submission: what each engine is told, word for word, and jobs that outlive who submitted them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from haiprof.base.errors import MissingExtraError, UsageError
from haiprof.launch.submit.engines import (
    JobSpec,
    node_words,
    parse_directives,
    parse_environment,
    parse_time_limit,
    resolve_options,
    script_words,
    yaml_text,
)
from haiprof.launch.submit.submission import FORMS, emit, submit_slurm
from haiprof.live.find import running_jobs
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import find_runs, has_ended, read_manifest
from tests.commands import Run
from tests.process.jobs import PYTHON, environment
from tests.process.live import within
from tests.sampling import examples

HOSTILE = (
    "", " ", "a b", "it's", '"', "$(touch pwned)", "`touch pwned`", "; touch pwned", "&& touch x",
    "$HOME", "${HOME}", "\\", "\\n", "new\nline\n#SBATCH --nodes=9", "-n", "--n", "--", "--time=1",
    "*", "~", "!x", "#no", "$$", "$(HOME)", "${local_rank}", "{{x}}", "%j", "\t", "ü🙂",
)  # fmt: skip

# torchrun makes of these what they were: test_torchrun_leaves_the_scripts_arguments_alone
FOR_TORCHRUN = tuple({"$$": "$$$$", "${local_rank}": "$${local_rank}"}.get(w, w) for w in HOSTILE)

_TRAIN = """

import json, os, sys, time
import torch

if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
if "RANK" in os.environ:
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(os.environ.get("STEPS", "40"))):
    loss = model(torch.ones(2, 4)).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.02)
print("ARGUMENTS " + json.dumps(sys.argv[1:]) + "\\n", end="", flush=True)
if "RANK" in os.environ:
    torch.distributed.barrier()
    time.sleep(0.2)  # tests/process/loops.py says why
    torch.distributed.destroy_process_group()
sys.exit(int(os.environ.get("STATUS", "0")))
"""


def job_spec(**facts: Any) -> JobSpec:
    usual: dict[str, Any] = {"program": "train.py", "name": "train"}
    return JobSpec(**{**usual, "options": {"log-dir": "/logs", "name": "train"}, **facts})


def pods_of(text: str) -> dict[str, Any]:
    """The pod template of a Job or of a JobSet's only group."""
    body = list(yaml.safe_load_all(text))[-1]["spec"]
    job = body["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in body else body
    pod: dict[str, Any] = job["template"]["spec"]
    return pod


def test_options_of_all_places_are_passed_on_each_once(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.haiprof]\ntime = 1\nlog-dir = "/shared/logs"\n')
    texts, log_dir = resolve_options(
        ["profile.time=120", "profile.trace=1", "profile.trace_limit=50"],
        {"time": None, "recorder": "basic,gpu"},
        {"HAIPROF_TIME": "60", "HAIPROF_GPU_INTERVAL": "0.5", "HAIPROF_QUIET": "1"},
        program="src/my train.py",
        pyproject=project,
    )
    assert texts == {
        "time": "120", "trace": "1", "trace-limit": "50", "quiet": "1", "recorder": "basic,gpu",
        "interval.gpu": "0.5", "log-dir": "/shared/logs", "name": "my-train",
    }  # fmt: skip
    assert log_dir == Path("/shared/logs")
    words = node_words(job_spec(options=texts), rendezvous=())
    assert [word.partition("=")[0] for word in words].count("--time") == 1


def test_published_options_are_split_at_the_first_equals_sign_and_others_refused() -> None:
    texts, _ = resolve_options(["profile.run-id=a=b=c"], {}, {}, program="train.py")
    assert texts["run-id"] == "a=b=c"
    with pytest.raises(UsageError, match="tiem"):
        resolve_options(["profile.tiem=1"], {}, {}, program="train.py")


@pytest.mark.parametrize("module", [False, True])
def test_torchrun_leaves_the_scripts_arguments_alone(module: bool) -> None:
    from torch.distributed.elastic.utils.api import macros
    from torch.distributed.run import parse_args

    spec = job_spec(program="pkg.train" if module else "train.py", module=module, arguments=HOSTILE)
    parsed = parse_args(["--nnodes=2", *script_words(spec)])  # type: ignore[no-untyped-call]
    words = macros.substitute([parsed.training_script, *parsed.training_script_args], "7")
    assert (words, parsed.module) == ([spec.program, *HOSTILE], module)


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """Commands that write their words and the variable A into files instead of doing anything."""
    folder = tmp_path / "bin"
    folder.mkdir()
    code = (
        f"#!{sys.executable}\nimport json, os, sys\n"
        "told = {'words': sys.argv[1:], 'A': os.environ.get('A')}\n"
        "open(sys.argv[0] + '.json', 'w').write(json.dumps(told))\n"
        "sys.exit(int(os.environ.get('STUB_STATUS', '0')))\n"
    )
    for name in ("srun", "haiprof"):
        (folder / name).write_text(code)
        (folder / name).chmod(0o755)
    return folder


def run_script(text: str, stubs: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    usual = {"PATH": f"{stubs}:/usr/bin:/bin", "SLURM_JOB_ID": "123457"}
    folder = stubs.parent / "work"
    folder.mkdir()
    done = subprocess.run(
        ["bash", "-euc", text], env={**usual, **variables}, cwd=folder, capture_output=True
    )
    assert not list(folder.iterdir())
    return done


def told(stubs: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((stubs / f"{name}.json").read_text())
    return found


def test_sbatch_script_passes_hostile_words_as_they_are(stubs: Path) -> None:
    spec = job_spec(nodes=2, arguments=HOSTILE, environment={"A": "".join(HOSTILE)})
    assert run_script(emit(spec, "slurm"), stubs).returncode == 0
    srun = told(stubs, "srun")
    words = srun["words"]
    assert srun["A"] == "".join(HOSTILE)
    assert words[0] == "--export=ALL"
    assert words[-len(HOSTILE) :] == list(FOR_TORCHRUN)
    host = subprocess.run(["hostname"], capture_output=True, text=True, check=True).stdout.strip()
    assert f"--rdzv-endpoint={host}:23457" in words
    assert "--rdzv-id=123457" in words
    assert words.index("--name=train") < words.index("--") < words.index("--nnodes=2")


def test_sbatch_directives_say_what_was_asked_for() -> None:
    spec = job_spec(
        nodes=8, gpus_per_node=8, gpu_type="h100", cpus_per_node=96, time_limit_s=90_061,
        partition="gpu", account="me", requeue=True, directives={"qos": "high", "exclusive": ""},
    )  # fmt: skip
    lines = emit(spec, "slurm").splitlines()
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "--job-name=train", "--nodes=8", "--ntasks-per-node=1", "--gpus-per-node=h100:8",
        "--cpus-per-task=96", "--time=1-01:01:01", "--partition=gpu", "--account=me", "--requeue",
        "--open-mode=append", "--qos=high", "--exclusive",
    ]  # fmt: skip
    assert "--cpus-per-task=96" in lines[-2].split()  # srun does not inherit it
    assert "--nproc-per-node=8" in lines[-1]


@pytest.mark.parametrize(
    "facts",
    [
        {"partition": "a b"}, {"account": "x\n#SBATCH --uid=0"}, {"gpu_type": "$(x)"},
        {"directives": {"comment": "a\nb"}}, {"directives": {"Qos": "x"}},
        {"directives": {"comment": "a 'b"}}, {"nodes": 0}, {"gpus_per_node": 0},
    ],
)  # fmt: skip
def test_words_that_sbatch_would_read_otherwise_are_refused(facts: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        job_spec(**facts)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("10:30", 630), ("12:00:00", 43_200), ("1-12", 129_600), ("2-0:30:5", 174_605),
     *((none, None) for none in ("", "0", "2h", "-1", "1:2:3:4", "1-", "٣"))],
)  # fmt: skip
def test_time_limits_are_read_as_slurm_does(text: str, seconds: int | None) -> None:
    with contextlib.nullcontext() if seconds else pytest.raises(UsageError, match="time-limit"):
        assert parse_time_limit(text) == seconds


def test_variables_are_given_or_taken_from_here() -> None:
    assert parse_environment(["A=x=y", "B", "C="], {"B": "here"}) == {
        "A": "x=y", "B": "here", "C": "",
    }  # fmt: skip
    assert parse_directives(["--qos=high", "exclusive"]) == {"qos": "high", "exclusive": ""}
    for word in ("GONE", "9=x", "a-b=1", "=x"):
        with pytest.raises(UsageError, match="--env"):
            parse_environment([word], {})


_NODE_TASK = """
import sys
from haiprof.launch.submit.submission import NodeTask
from haiprof.launch.submit.engines import JobSpec
spec = JobSpec(program="train.py", name="train", nodes=2, environment={"A": "x y"})
NodeTask(spec, haiprof=(sys.argv[1],), torchrun="torchrun")()
"""


def test_task_of_a_node_outlives_submitits_signal_and_ends_as_the_job(tmp_path: Path) -> None:
    stub = tmp_path / "haiprof"
    stub.write_text('#!/bin/sh\nkill -USR2 $$ $PPID\necho "$A/$HAIPROF_RENDEZVOUS" "$@"\nexit 7\n')
    stub.chmod(0o755)
    done = subprocess.run(
        [PYTHON, "-c", _NODE_TASK, str(stub)],
        env=environment({"HAIPROF_RENDEZVOUS": "n1:20007", "SLURM_JOB_ID": "7"}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith("x y/ -- torchrun --nnodes=2 --nproc-per-node=1 ")
    assert "--rdzv-endpoint=n1:20007 --rdzv-id=7 -- train.py" in done.stdout


def expanded(word: str, variables: dict[str, str]) -> str:
    """As a kubelet expands $(NAME): k8s.io/kubernetes third_party/forked/golang/expansion."""
    out, left = "", word
    while left:
        head, dollar, left = left.partition("$")
        out += head
        if dollar and left.startswith("$"):
            out, left = out + "$", left[1:]
        elif dollar and left.startswith("(") and ")" in left:
            name, _, left = left[1:].partition(")")
            out += variables.get(name, f"$({name})")
        elif dollar:
            out += "$"
    return out


@pytest.mark.parametrize("form", ["kubernetes", "jobset"])
def test_pods_run_hostile_words_as_they_are(form: str) -> None:
    spec = job_spec(nodes=2, image="r/x:1", arguments=HOSTILE, environment={"A": "".join(HOSTILE)})
    container = pods_of(emit(spec, form))["containers"][0]
    variables = {"JOB_COMPLETION_INDEX": "1", "RUN_ID": "uid-0", "HOME": "/root"}
    words = [expanded(word, variables) for word in container["command"]]
    head = {"kubernetes": "train-0.train", "jobset": "train-node-0-0.train"}[form]
    assert words == [
        "haiprof", "--log-dir=/logs", "--name=train", "--run-id=uid-0", "--", "torchrun",
        "--nnodes=2", "--nproc-per-node=1", "--node-rank=1", f"--master-addr={head}",
        "--master-port=29500", "--", "train.py", *FOR_TORCHRUN,
    ]  # fmt: skip
    assert expanded(container["env"][-1]["value"], variables) == "".join(HOSTILE)


def test_trainjob_leaves_the_meeting_to_its_runtime() -> None:
    spec = job_spec(nodes=2, gpus_per_node=8, image="r/x:1", arguments=("--lr", "0.1"))
    trainer = yaml.safe_load(emit(spec, "trainjob"))["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert not [word for word in trainer["command"] if "master" in word or "rdzv" in word]
    assert trainer["command"][-4:] == ["--", "train.py", "--lr", "0.1"]


@pytest.mark.parametrize("form", ["kubernetes", "jobset", "trainjob"])
def test_every_field_is_one_of_the_published_api(form: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")  # 2.3: Trainer, JobSet, batch/v1
    facts: dict[str, Any] = {"claim": "c", "requeue": True, "time_limit_s": 60}
    spec = job_spec(
        nodes=2, gpus_per_node=8, cpus_per_node=4, image="r/x:1", environment={"A": "1"},
        **(facts if form != "trainjob" else {}),
    )  # fmt: skip
    document = list(yaml.safe_load_all(emit(spec, form)))[-1]
    name = {
        "kubernetes": "IoK8sApiBatchV1Job",
        "jobset": "JobsetV1alpha2JobSet",
        "trainjob": "TrainerV1alpha1TrainJob",
    }[form]
    model = getattr(models, name).from_dict(document)
    assert _lost(document, model.to_dict()) == []


def _lost(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """What of ours the published model does not know, or reads otherwise."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [x for k, v in ours.items() for x in _lost(v, theirs.get(k), f"{path}.{k}")]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [x for i, (a, b) in pairs for x in _lost(a, b, f"{path}[{i}]")]
    return [] if ours == theirs else [f"{path}: {ours!r} {theirs!r}"]


def test_skypilot_runs_hostile_words_as_they_are(stubs: Path) -> None:
    spec = job_spec(nodes=2, arguments=HOSTILE, environment={"A": "".join(HOSTILE)})
    task = yaml.safe_load(emit(spec, "skypilot"))
    variables = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_TASK_ID": "sky-7",
    }
    assert task["num_nodes"] == 2
    assert run_script(task["run"], stubs, **variables).returncode == 0
    haiprof = told(stubs, "haiprof")
    assert haiprof["A"] == "".join(HOSTILE)
    assert haiprof["words"] == [
        "--log-dir=/logs", "--name=train", "--run-id=sky-7", "--", "torchrun", "--nnodes=2",
        "--nproc-per-node=1", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=29500",
        "--", "train.py", *FOR_TORCHRUN,
    ]  # fmt: skip


_FAKE_RAY = {
    "__init__": """
class _Remote:
    def __init__(self, function): self.function = function
    def options(self, **options): return self
    def remote(self, *words): return (self.function, words)
def remote(**options): return _Remote
def init(): pass
def get(made): return made[0](*made[1]) if isinstance(made, tuple) else made
from ray import util
def wait(left): return left[:1], left[1:]
""",
    "util/__init__": "def get_node_ip_address(): return '10.0.0.1'",
    "util/placement_group": """
class placement_group:
    def __init__(self, bundles, strategy): print(bundles, strategy)
    def ready(self): return None
""",
    "util/scheduling_strategies": (
        "def PlacementGroupSchedulingStrategy(group, placement_group_bundle_index): pass"
    ),
}


def test_ray_driver_starts_each_node_with_words_as_they_are_and_ends_as_the_job(
    stubs: Path,
) -> None:
    packages = stubs.parent / "packages"
    for name, text in _FAKE_RAY.items():
        (packages / f"ray/{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (packages / f"ray/{name}.py").write_text(text)
    usual = {"PATH": f"{stubs}:/usr/bin:/bin", "PYTHONPATH": str(packages)}
    spec = job_spec(
        nodes=2, gpus_per_node=4, arguments=HOSTILE, environment={"A": "".join(HOSTILE)}
    )
    failed, done = (
        subprocess.run([PYTHON, "-c", emit(spec, "ray")], env={**usual, "STUB_STATUS": status},
                       capture_output=True, text=True)
        for status in "70"
    )  # fmt: skip
    assert (failed.returncode, done.returncode) == (7, 0), done.stderr
    assert done.stdout.strip() == "[{'CPU': 1, 'GPU': 4}, {'CPU': 1, 'GPU': 4}] STRICT_SPREAD"
    haiprof = told(stubs, "haiprof")  # of the second node, which came last
    assert haiprof["A"] == "".join(HOSTILE)
    words = haiprof["words"]
    assert words[words.index("torchrun") :] == [
        "torchrun", "--nnodes=2", "--nproc-per-node=4", "--node-rank=1", "--master-addr=10.0.0.1",
        "--master-port=29500", "--", "train.py", *FOR_TORCHRUN,
    ]  # fmt: skip


_TEXT = st.text(max_size=20)
_VALUES = st.recursive(
    _TEXT | st.integers() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=examples(60), deadline=None)
@given(st.dictionaries(_TEXT, _VALUES, min_size=1, max_size=3))
def test_yaml_comes_back_as_it_was(value: dict[str, Any]) -> None:
    assert yaml.safe_load(yaml_text(value)) == value


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "no script"),
        (["train.py", "--nodes", "2"], "one machine"),
        (["train.py", "--partition", "gpu"], "--partition"),
        (["train.py", "--requeue"], "--requeue"),
        (["train.py", "--on", "kubernetes"], "--emit kubernetes"),
        (["train.py", "--on", "moon"], "--on: unknown target 'moon'"),
        (["train.py", "--emit", "moon"], "--emit moon"),
        (["gone.py"], "gone.py: no such file"),
        (["gone.py", "--on", "slurm"], "gone.py: no such file"),
        (["prog", "--emit", "slurm"], "prog"),
        (["train.py", "--emit", "jobset"], "--image"),
        (["train.py", "--emit", "trainjob", "--image", "i", "--claim", "c"], "--claim"),
        (["train.py", "--emit", "jobset", "--image", "i", "--claim", "c"], "not an absolute path"),
        (["train.py", "--emit", "skypilot", "--gpus-per-node", "8"], "--gpu-type"),
        (["train.py", "--on", "slurm", "--sbatch", "array=0-3"], "--emit slurm"),
        (["train.py", "--options", "time=1"], "profile.NAME=VALUE"),
        (["train.py", "--lr", "1"], "--lr"),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    words: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    run: Run,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    shown = run("submit", *words, status=2).err
    assert part in shown
    assert "Traceback" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_without_submitit_the_extra_is_named_and_without_slurm_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "submitit", None)
        with pytest.raises(MissingExtraError) as caught:
            submit_slurm(job_spec(), log_dir=tmp_path)
    assert "haiprof[slurm]" in caught.value.hint
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="srun"):
        submit_slurm(job_spec(), log_dir=tmp_path)


def test_emit_prints_the_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["submit", "-m", "pkg.train", "-n", "2", "--emit", "slurm", "--name", "[red]x"]
    shown = run(*words, "--", "--time", "7", "--", "x")
    assert shown.out.startswith("#!/bin/bash\n#SBATCH --job-name=red-x\n")
    assert shown.out.endswith(" -m -- pkg.train --time 7 -- x\n")
    assert "sbatch FILE" in shown.err
    assert not list(tmp_path.iterdir())
    assert run(*words, "--json").data["next"] == FORMS["slurm"].next


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "it's a 'job' #1"
    folder.mkdir()
    (folder / "train.py").write_text(_TRAIN)
    monkeypatch.chdir(folder)
    return folder


def submitted(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PYTHON, "-m", "haiprof", "submit", *words], env=environment(variables),
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


def arguments_in(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("ARGUMENTS ")]
    return [json.loads(line.removeprefix("ARGUMENTS ")) for line in lines]


@pytest.mark.slow
def test_job_outlives_who_submitted_it(work: Path) -> None:
    words = [PYTHON, "-m", "haiprof", "submit", "train.py", "--wait"]
    submitter = subprocess.Popen(
        [*words, "--", *HOSTILE], env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    logs = work / "haiprof-logs"
    within(90, lambda: logs.is_dir() and find_runs(logs))
    run = RunPaths(find_runs(logs)[0])
    within(90, lambda: run.root in [job.run.root for job in running_jobs([])])
    os.killpg(submitter.pid, signal.SIGHUP)  # its terminal is closed
    os.killpg(submitter.pid, signal.SIGKILL)
    submitter.wait()
    launcher = read_manifest(run).launcher_pid
    assert os.getsid(launcher) == launcher
    within(90, lambda: read_manifest(run).end_wall_ns is not None)
    assert read_manifest(run).exit_status == 0
    assert [rank["rank"] for rank in read_manifest(run).ranks] == [0]
    log = Path(f"{run.root}.log")
    assert arguments_in(log.read_text()) == [list(HOSTILE)]
    within(90, run.verdict_json.exists)


@pytest.mark.proof
@pytest.mark.slow
def test_wait_shows_the_log_and_ends_with_the_jobs_status(work: Path) -> None:
    done = submitted("train.py", "--wait", "--env", "STATUS=7", "--", "--n", "5")
    assert done.returncode == 7
    assert arguments_in(done.stdout) == [["--n", "5"]]
    assert "haiprof verdict" in done.stderr
    assert "kill " in done.stderr


@pytest.mark.proof
@pytest.mark.slow
def test_kill_ends_the_job(work: Path) -> None:
    done = submitted("train.py", "--json", STEPS="100000")
    assert done.returncode == 0, done.stderr
    job = json.loads(done.stdout)
    run = RunPaths(Path(job["target"]))
    within(90, run.rank_folders)
    assert job["exit_status"] is None
    subprocess.run(job["stop"], check=True)
    within(90, lambda: read_manifest(run).end_wall_ns is not None)
    assert read_manifest(run).signal == "SIGTERM"


@pytest.mark.slow
def test_job_that_cannot_start_is_said_at_once(work: Path) -> None:
    done = submitted("no-such-program-here")
    assert done.returncode == 1
    assert "no-such-program-here" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_two_nodes_of_slurm_record_one_run(work: Path) -> None:
    asked = ("--on", "slurm", "--nodes", "2", "--wait", "--time-limit", "5", "--env", "A=x y")
    # A site that lets no environment travel: the job must not need it.
    done = submitted("train.py", *asked, "--", *HOSTILE, SBATCH_EXPORT="NONE")
    assert done.returncode == 0, done.stderr + done.stdout
    assert arguments_in(done.stdout) == [list(HOSTILE)] * 2
    (root,) = find_runs(work / "haiprof-logs")
    assert f"haiprof verdict haiprof-logs/{root.name}" in done.stderr
    manifest = read_manifest(RunPaths(root))
    assert (manifest.exit_status, [rank["rank"] for rank in manifest.ranks]) == (0, [0, 1])
    assert RunPaths(root).verdict_json.exists()


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_status_and_refusals_of_slurm_come_back(work: Path) -> None:
    done = submitted("train.py", "--on", "slurm", "--wait", "--env", "STATUS=3", STEPS="5")
    assert done.returncode == 1, done.stderr  # torchrun's, whatever its ranks ended with
    refused = submitted("train.py", "--on", "slurm", "--partition", "nowhere")
    assert refused.returncode == 2
    assert "invalid partition" in refused.stderr
    assert refused.stderr.count("\n") == 1


def sbatch(work: Path, *options: str, nodes: int = 2) -> str:
    """Submits the printed script, and returns the job's id."""
    done = submitted("train.py", "--nodes", str(nodes), "--emit", "slurm", *options, "--", *HOSTILE)
    (work / "job.sh").write_text(done.stdout)
    command = ["sbatch", "--parsable", "--export=NONE", "--output=out.txt", "job.sh"]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return ran.stdout.strip()


@pytest.mark.proof
@pytest.mark.usefixtures("slurm")
def test_requeued_job_records_a_run_of_its_own_beside_the_first(work: Path) -> None:
    endless = 'os.environ["STEPS"] = "40" if "SLURM_RESTART_COUNT" in os.environ else "99999"'
    (work / "train.py").write_text(f"import os\n{endless}\n{_TRAIN}")
    job = sbatch(work, "--requeue")
    runs = [RunPaths(work / "haiprof-logs" / f"train-{job}.0{end}") for end in ("", ".r1")]
    within(90, lambda: len(runs[0].rank_folders()) == 2)
    subprocess.run(["scontrol", "requeue", job], check=True)
    within(180, lambda: runs[1].root.exists() and has_ended(runs[1]))
    first, second = map(read_manifest, runs)
    assert (second.exit_status, [rank["rank"] for rank in second.ranks]) == (0, [0, 1])
    assert (first.exit_status, first.signal) != (0, None)
    assert list(HOSTILE) in arguments_in((work / "out.txt").read_text())
    assert sorted(find_runs(work / "haiprof-logs")) == [run.root for run in runs]


@pytest.mark.proof
@pytest.mark.usefixtures("slurm")
def test_elements_of_an_array_record_a_run_each(work: Path) -> None:
    sbatch(work, "--sbatch", "array=0-1", nodes=1)
    logs = work / "haiprof-logs"
    within(90, lambda: logs.is_dir() and sum(has_ended(RunPaths(r)) for r in find_runs(logs)) == 2)
    ended = [read_manifest(RunPaths(root)) for root in find_runs(logs)]
    assert [(run.exit_status, len(run.ranks)) for run in ended] == [(0, 1), (0, 1)]
