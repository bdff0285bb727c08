"""A preflight of four real ranks: on one machine, and on two nodes with a fault on each kind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from haiprof.diagnosis.preflight import judge_preflight
from haiprof.in_job.preflight_probe import gpu_facts, loaded_clock, read_xids
from tests.process.jobs import run_command
from tests.security.second_user import as_second_user
from tests.two_nodes import ENVIRONMENT, INTERFACE, Node, two_nodes
from tests.unit.diagnosis.test_preflight import measured

GROUPS = Path("/sys/fs/cgroup/cpu")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SLOW_RANK = 3
WRAPPER = """#!/bin/sh
[ "$RANK" = {rank} ] && echo $$ > {group}/cgroup.procs
exec "$@"
"""


def words_of(node: int, address: str, *program: str) -> list[str]:
    return [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}",
            f"--master-addr={address}", "--master-port=29507", *program]  # fmt: skip


def start(node: Node, place: int, address: str, *program: str, folder: Path) -> Any:
    own = [sys.executable, "-m", "haiprof", "preflight", "--json", "--folder", str(folder)]
    return subprocess.Popen(
        node.words(*own, *words_of(place, address, *program), folder=folder),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip


def ask(nodes: tuple[Node, Node], folder: Path, *program: str) -> tuple[list[Any], list[int]]:
    """What each node's command printed, and its exit status."""
    jobs = [
        start(node, place, nodes[0].address, *program, folder=folder)
        for place, node in enumerate(nodes)
    ]
    said = [job.communicate(timeout=150) for job in jobs]
    assert all(out for out, _ in said), said
    return [json.loads(out) for out, _ in said], [job.returncode for job in jobs]


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A control group with a fifth of a core."""
    group = GROUPS / "haiprof-preflight-test"
    try:
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_quota_us").write_text("20000")
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    yield group
    ended = time.monotonic() + 10
    while (group / "cgroup.procs").read_text() and time.monotonic() < ended:
        time.sleep(0.1)
    group.rmdir()


@pytest.mark.slow
@pytest.mark.proof  # tests beside it would make a healthy rank slow
@pytest.mark.xdist_group("two nodes")
def test_preflight_names_a_throttled_link_and_a_rank_in_a_small_group(
    tmp_path: Path, small_group: Path
) -> None:
    if shutil.which("tc", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("no tc (apt-get install iproute2)")
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(WRAPPER.format(rank=SLOW_RANK, group=small_group))
    wrapper.chmod(0o755)
    with two_nodes() as nodes:
        nodes[1].run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", "100mbit",
                     "burst", "64k", "latency", "100ms")  # fmt: skip
        begun = time.monotonic()
        (found, same), statuses = ask(nodes, tmp_path, "--no-python", str(wrapper))
        seconds = time.monotonic() - begun
    print(json.dumps({**found, "ranks": [r["rates"] for r in found["ranks"]]}, indent=1), seconds)
    assert statuses == [1, 1]
    assert found["suspects"] == same["suspects"]
    links = {(one["host"], one["to_host"]) for one in found["suspects"] if one["to_host"]}
    ranks = {one["rank"] for one in found["suspects"] if not one["to_host"]}
    assert links == {("node-2", "node-1")}
    assert ranks == {SLOW_RANK}
    whats = {one["what"] for one in found["suspects"] if one["rank"] == SLOW_RANK}
    assert "limit cpu_cores" in whats  # how slow it is then shows on quiet cores alone
    assert (found["leave_out"], found["slurm"]) == (["node-2"], "--exclude=node-2")


@pytest.mark.slow
def test_preflight_keeps_a_baseline_and_its_status_says_what_it_names(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    words = ["preflight", "--json", "--folder", str(tmp_path), "--keep-baseline", str(baseline),
             *TORCHRUN, "--standalone", "--nproc-per-node=2", "train.py", "--lr", "1"]  # fmt: skip
    logs = tmp_path / "logs"
    done = run_command(words, folder=tmp_path, extra_environment={"HAIPROF_LOG_DIR": str(logs)})
    found = json.loads(done.stdout)
    (kept,) = (logs / "preflight").iterdir()  # for verdicts of later runs
    assert json.loads(kept.read_text())["suspects"] == found["suspects"]
    # Both are healthy, but other tests run beside them.
    assert done.returncode == (1 if found["suspects"] else 0), done.stdout
    assert found["rates"]
    assert json.loads(baseline.read_text()) == found["rates"]


def test_preflight_tells_why_a_launcher_failed(tmp_path: Path) -> None:
    done = run_command(["preflight", "false"], folder=tmp_path)
    assert done.returncode not in (0, 1)
    assert "exit status 1" in done.stderr


NVIDIA_SMI = """#!/bin/sh
case "$*" in
    *--query-gpu=pcie.link.width.current,pcie.link.gen.max,clocks.max.sm,power.limit*)
        echo "8, 5, 1980, 700.00" ;;
    *--query-remapped-rows=remapped_rows.failure,remapped_rows.pending*) echo "No, Yes" ;;
    *--query-gpu=gpu_recovery_action*) echo "Drain and Reset" ;;
    *--query-gpu=clocks.sm,clocks.max.sm,clocks_throttle_reasons.active*)
        sleep 0.3; echo "1095, 1980, 0x0000000000000040" ;;
    *) echo "Field \\"x\\" is not a valid field to query."; exit 2 ;;
esac
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


@pytest.mark.usefixtures("nvidia_smi")
def test_links_of_gpus_are_limits_and_remapped_rows_faults() -> None:
    limits, faults, why = gpu_facts("GPU-1")
    assert why == ""
    assert limits == {"gpu_link_width": 8, "gpu_link_generation": 5, "gpu_clock_mhz": 1980,
                      "gpu_power_limit_watts": 700}  # fmt: skip
    assert faults == {"gpu_rows_failed": 0, "gpu_rows_pending": 1, "gpu_recovery_needed": 1}
    ranks = measured(4, per_node=1)
    for own in ranks:
        own["limits"] = limits if own["rank"] == 2 else {**limits, "gpu_link_width": 16}
    ranks[1]["faults"] = faults
    found = {(one.what, one.host) for one in judge_preflight(ranks).suspects}
    assert found == {("limit gpu_link_width", "n2"), ("gpu_rows_pending", "n1"),
                     ("gpu_recovery_needed", "n1")}  # fmt: skip
    assert judge_preflight(ranks).slurm == "--exclude=n1,n2"


@pytest.mark.usefixtures("nvidia_smi")
def test_clock_is_asked_while_the_gpu_works_of_older_drivers_too() -> None:
    done: list[float] = []

    def work() -> None:
        time.sleep(0.01)
        done.append(time.monotonic())

    assert loaded_clock(work, "GPU-1") == ({"mhz": 1095, "max_mhz": 1980, "reasons": 0x40}, "")
    assert done, "it works until nvidia-smi has answered"


def test_why_nvidia_smi_tells_nothing_is_said(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed; exit 9\n")
    assert loaded_clock(lambda: None, "GPU-1")[1] == "nvidia-smi: NVIDIA-SMI has failed"
    monkeypatch.setenv("PATH", "/nowhere")
    assert loaded_clock(lambda: None, "GPU-1")[1] == "nvidia-smi: No such file or directory"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a second user")
def test_why_xids_cannot_be_read_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found, why = as_second_user(read_xids)
    if not why:
        pytest.skip("everybody may read the log of this kernel")
    assert found == []
    assert why.startswith("/dev/kmsg: ")
    assert "journalctl: No such file" in why


@pytest.mark.parametrize("said", ["", "[N/A], [Not Supported], x", "ERROR: no GPU"])
def test_what_nvidia_smi_does_not_tell_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{said}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert [set(facts.values()) for facts in gpu_facts("GPU-1")[:2]] == [{None}, {None}]
