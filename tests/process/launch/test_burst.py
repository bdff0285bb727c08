"""`--burst` with a stand-in for nsys: what is sampled, what is said, and that the job is alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from haiprof.agent.burst import (
    Burst,
    Nsys,
    Refusal,
    find_nsys,
    has_trained,
    prepare_burst,
    probe_nsys,
)
from haiprof.agent.node_agent import Agent
from haiprof.base.errors import UsageError
from haiprof.base.options import Options
from haiprof.cli.names import own_command
from haiprof.launch.job import Job
from haiprof.run_format.layout import NodePaths
from haiprof.run_format.manifest import read_manifest
from tests.fake_nsys import install
from tests.process.jobs import training
from tests.process.live import within
from tests.unit.analysis.recorded import packed, spans_of, write_rank, write_run

SHORT = Options(burst=True, burst_time_s=0.2, burst_hz=1000)
TRAIN = training(
    "while time.monotonic() < end:", before="end = time.monotonic() + float(sys.argv[1])"
)


@pytest.fixture
def node(tmp_path: Path) -> NodePaths:
    paths = NodePaths(tmp_path / "node")
    paths.root.mkdir()
    return paths


def nsys_of(tmp_path: Path, behaviour: str = "works") -> Nsys:
    path = install(tmp_path / "bin", behaviour)
    return Nsys(path=str(path), device_option="--gpu-metrics-devices", devices="all", gpu_count=2)


def burst_of(node: NodePaths, nsys: Nsys | Refusal, **more: Any) -> Burst:
    given = {"has_trained": lambda: True, "delay_s": 0.0, **more}
    return Burst(node, SHORT, nsys, **given)


def run_until(burst: Burst, *ends: str) -> None:
    def is_over() -> bool:
        burst.tick()
        return burst.status in ends

    within(60, is_over, f"{burst.status} {burst.reason}")


def lines(node: NodePaths) -> list[dict[str, Any]]:
    if not node.events.exists():
        return []
    return [json.loads(line) for line in node.events.read_text().splitlines()]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def seen(node: NodePaths) -> dict[str, Any]:
    content = json.loads((node.bursts / "gpu.seen").read_text())
    assert isinstance(content, dict)
    return content


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def test_nsys_is_found_by_variable_then_path_then_newest_installed(tmp_path: Path) -> None:
    mine = install(tmp_path / "mine")
    on_path = install(tmp_path / "path")
    install(tmp_path / "opt/nvidia/nsight-systems/2024.5.1/bin")
    newest = install(tmp_path / "opt/nvidia/nsight-systems/2025.10.1/bin")
    everywhere = {"PATH": str(on_path.parent)}
    assert find_nsys({**everywhere, "HAIPROF_NSYS": str(mine)}, root=tmp_path) == str(mine)
    assert find_nsys(everywhere, root=tmp_path) == str(on_path)
    assert find_nsys({"PATH": ""}, root=tmp_path) == str(newest)


def test_nsys_that_is_nowhere_is_said_with_where_it_was_looked_for(tmp_path: Path) -> None:
    found = find_nsys({"PATH": str(tmp_path)}, root=tmp_path)
    assert isinstance(found, Refusal)
    assert "PATH" in found.reason
    assert "opt/nvidia/nsight-systems" in found.reason
    assert "install Nsight Systems" in found.remedy
    named = find_nsys({"PATH": "", "HAIPROF_NSYS": "/no/nsys"}, root=tmp_path)
    assert isinstance(named, Refusal)
    assert "/no/nsys" in named.reason


@pytest.mark.parametrize(
    ("behaviour", "environ", "reasons", "remedy"),
    [
        ("denied", {}, ("may not read the GPU's performance counters", "NVIDIA H200"),
         "RestrictProfilingToAdminUsers"),
        ("busy", {}, ("another tool holds", "NVIDIA H200"), "dcgmi profile --pause"),
        ("volta", {}, ("cannot sample this GPU", "NVIDIA H200"), "Turing or newer"),
        ("mute", {}, ("no answer within 0.5 s",), ""),
        ("works", {"CUDA_VISIBLE_DEVICES": ""}, ("CUDA_VISIBLE_DEVICES",), ""),
    ],
)  # fmt: skip
def test_probe_says_why_the_gpus_cannot_be_sampled(
    tmp_path: Path, behaviour: str, environ: dict[str, str], reasons: tuple[str, ...], remedy: str
) -> None:
    environ = {"PATH": os.environ["PATH"], **environ}
    limit_s = 0.5 if behaviour == "mute" else 60.0
    answer = probe_nsys(str(install(tmp_path, behaviour)), environ, timeout_s=limit_s)
    assert isinstance(answer, Refusal)
    assert all(reason in answer.reason for reason in reasons)  # the GPU's name in nsys's own words
    assert remedy in answer.remedy


@pytest.mark.parametrize(
    ("behaviour", "option", "environ", "devices"),
    [
        ("works", "--gpu-metrics-devices", {}, "all"),
        ("works", "--gpu-metrics-devices", {"CUDA_VISIBLE_DEVICES": "1"}, "cuda-visible"),
        ("old", "--gpu-metrics-device", {}, "all"),
    ],
)
def test_probe_counts_the_gpus_that_can_be_sampled_in_the_words_of_the_version(
    tmp_path: Path, behaviour: str, option: str, environ: dict[str, str], devices: str
) -> None:
    path = str(install(tmp_path, behaviour))
    found = probe_nsys(path, environ)
    assert isinstance(found, Nsys)
    assert (found.path, found.device_option, found.devices) == (path, option, devices)
    assert found.gpu_count == 2 or environ


def test_burst_needs_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"PATH": str(install(tmp_path / "bin").parent)}
    assert isinstance(prepare_burst(environ, log_dir=tmp_path, options=SHORT), Nsys)
    large = Options(burst=True, burst_time_s=5, burst_hz=200_000)
    monkeypatch.setattr("haiprof.agent.burst.RESERVE_BYTES", 1 << 60)
    answer = prepare_burst(environ, log_dir=tmp_path, options=large)
    assert isinstance(answer, Refusal)
    assert f"{tmp_path} has" in answer.reason
    assert "free space" in answer.remedy


@pytest.mark.parametrize(
    "wrong", [{"burst_hz": 5}, {"burst_hz": 500_000}, {"burst_time_s": 0.0}, {"burst_time_s": 900}]
)
def test_burst_options_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="burst"):
        Options(burst=True, **wrong)


def test_burst_samples_exports_and_leaves_only_its_files(tmp_path: Path, node: NodePaths) -> None:
    burst = burst_of(node, nsys_of(tmp_path))
    run_until(burst, "recorded")
    names = sorted(path.name for path in node.bursts.iterdir())
    assert names == ["gpu.nsys-rep", "gpu.seen", "gpu.sqlite", "nsys.log"]
    first, last = lines(node)
    assert (first["status"], first["hz"]) == ("sampling", 1000)
    assert last["status"] == "recorded"
    assert last["end_wall_ns"] - last["start_wall_ns"] > 0.2e9
    facts = seen(node)
    assert facts["argv"][-2:] == ["sleep", "0.2"]
    assert facts["session"] != os.getsid(0), "no Ctrl-C of the job's terminal reaches it"
    assert facts["terminal"] is False


def test_burst_waits_for_training_and_a_moment_more(tmp_path: Path, node: NodePaths) -> None:
    trained = False
    burst = burst_of(node, nsys_of(tmp_path), has_trained=lambda: trained, delay_s=0.3)
    burst.tick()
    burst.tick()
    assert burst.status == "waiting"
    trained = True
    burst.tick()
    assert burst.status == "waiting"
    run_until(burst, "recorded")


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("crashes", "the daemon went away"),
        ("no-report", "wrote no report"),
        ("no-export", "the disk is full"),
        ("fills", "more than"),
        ("hangs", "did not end in time"),
    ],
)
def test_burst_that_goes_wrong_says_so_and_leaves_nothing_half(
    tmp_path: Path, node: NodePaths, behaviour: str, words: str
) -> None:
    grace_s = 1.0 if behaviour == "hangs" else 30.0
    burst = burst_of(node, nsys_of(tmp_path, behaviour), grace_s=grace_s)
    run_until(burst, "failed")
    last = lines(node)[-1]
    assert last["status"] == "failed"
    assert words in last["reason"]
    assert not node.burst_export.exists()
    assert not node.burst_scratch.exists()
    within(60, lambda: not alive(seen(node)["pid"]))


def test_burst_that_is_refused_is_written_down(node: NodePaths) -> None:
    burst = burst_of(node, Refusal("no nsys on PATH", "install it"))
    burst.tick()
    (line,) = lines(node)
    assert (line["status"], line["reason"]) == ("unavailable", "no nsys on PATH")
    assert line["remedy"] == "install it"
    assert not node.bursts.exists()


def test_burst_is_given_up_with_its_processes_when_the_job_ends(
    tmp_path: Path, node: NodePaths
) -> None:
    burst = burst_of(node, nsys_of(tmp_path, "hangs"))
    run_until(burst, "sampling")
    within(60, (node.bursts / "gpu.seen").exists)
    burst.finish("the job ended", lambda: True)
    assert burst.status == "stopped"
    assert lines(node)[-1]["reason"] == "the job ended"
    within(60, lambda: not alive(seen(node)["pid"]))


def test_burst_that_is_nearly_ready_when_the_job_ends_becomes_so(
    tmp_path: Path, node: NodePaths
) -> None:
    burst = burst_of(node, nsys_of(tmp_path))
    run_until(burst, "exporting")
    burst.finish("the job ended", threading.Event().is_set)
    assert burst.status == "recorded"


def test_training_is_seen_by_its_spans_not_by_evaluation(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, spans_of("D E D E"))
    phases = run.rank(0).phases
    assert not has_trained(phases)
    with phases.open("ab") as file:
        file.write(packed(spans_of("D F B O")) + b"torn")
    assert has_trained(phases)
    with phases.open("r+b") as file:
        file.truncate(phases.stat().st_size - 4)
    with phases.open("ab") as file:
        file.write(packed(spans_of("D F " * 3000)) + packed(spans_of("O")))
    assert has_trained(phases)
    assert not has_trained(tmp_path / "none")


def launch(tmp_path: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "haiprof", "--burst", *words], cwd=tmp_path,
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def only_node(tmp_path: Path) -> NodePaths:
    (folder,) = tmp_path.glob("haiprof-logs/*/nodes/*")
    return NodePaths(folder)


def test_job_without_nsys_runs_on_after_one_clear_line(tmp_path: Path) -> None:
    done = launch(tmp_path, "--quiet", "bash", "-c", "echo hi; exit 3", HAIPROF_NSYS="/no/nsys")
    assert (done.returncode, done.stdout) == (3, "hi\n")
    (line,) = done.stderr.splitlines()
    assert "no burst of GPU metrics: HAIPROF_NSYS=/no/nsys: no such program" in line
    found = [line for line in lines(only_node(tmp_path)) if line["type"] == "burst"]
    assert [line["status"] for line in found] == ["unavailable"]


def test_killed_recording_process_takes_nsys_with_it(tmp_path: Path, sleepers: list[int]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    nsys = install(tmp_path / "bin", "hangs")
    job = subprocess.Popen(
        [sys.executable, "-m", "haiprof", "--quiet", "--burst", "train.py", "40"], cwd=tmp_path,
        env={**os.environ, "HAIPROF_NSYS": str(nsys), "CUDA_VISIBLE_DEVICES": "0"},
    )  # fmt: skip
    within(60, lambda: list(tmp_path.glob("haiprof-logs/*/nodes/*/bursts/gpu.seen")))
    time.sleep(0.5)  # it ignores the signals that ask it to end
    pid = seen(only_node(tmp_path))["pid"]
    sleepers.append(pid)
    assert alive(pid)
    os.kill(json.loads(only_node(tmp_path).agent.read_text())["pid"], signal.SIGKILL)
    within(60, lambda: not alive(pid), "the end of nsys")
    assert job.poll() is None, "the job goes on"
    job.terminate()
    assert job.wait() == -signal.SIGTERM


def test_burst_that_fails_within_is_said_once_and_the_agent_goes_on(
    tmp_path: Path, node: NodePaths, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def broken() -> bool:
        asked.append(True)
        raise ValueError("no such number")

    run, supervisor = write_run(tmp_path / "run"), SimpleNamespace()
    job = Job(run, read_manifest(run), Options(), created=True, subcommand=own_command,
              supervisor=supervisor)  # type: ignore[arg-type]  # fmt: skip
    job._agent = agent = Agent(run, Options())
    job._burst = burst_of(node, nsys_of(tmp_path), has_trained=broken)
    for _ in range(3):
        job._tick()
    assert len(asked) == 1
    assert capfd.readouterr().err.count("no such number") == 1
    assert job._agent is agent
