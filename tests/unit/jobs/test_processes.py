"""Training processes are found, and entered only where that is allowed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from haiprof.base.errors import RunNotFoundError, UsageError
from haiprof.live.external_sampling import judge, phase_of, training_processes, why_not_enter
from haiprof.run_format.layout import RunPaths

MAPS = "7f00 r-xp /usr/lib/libpython3.11.so.1.0\n7f10 r-xp /x/torch/lib/libtorch_python.so\n"


class Fake:
    """A /proc with a few processes."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.add(1000, state="R", caps=0)

    def add(
        self, pid: int, *, parent: int = 1, state: str = "S", environ: str = "", torch: bool = True,
        caps: int = 0, uid: int | None = None, tracer: int = 0, command: str = "python train.py",
    ) -> None:  # fmt: skip
        folder = self.proc / str(pid)
        (folder / "ns").mkdir(parents=True)
        fields = [state, str(parent), *["0"] * 17, str(pid), *["0"] * 30]
        (folder / "stat").write_text(f"{pid} (python) {' '.join(fields)}")
        (folder / "cmdline").write_text(command.replace(" ", "\0") + "\0")
        (folder / "environ").write_text(environ.replace(" ", "\0") + "\0")
        (folder / "maps").write_text(MAPS if torch else "")
        owner = os.getuid() if uid is None else uid
        (folder / "status").write_text(
            f"TracerPid:\t{tracer}\nUid:\t{owner}\t{owner}\t{owner}\t{owner}\nCapEff:\t{caps:016x}\n"
        )
        for space in ("pid", "mnt"):
            (folder / "ns" / space).symlink_to(f"{space}:[1]")

    def why(self, pid: int) -> str | None:
        return why_not_enter(pid, proc=self.proc, me="1000")

    def found(self, name: str) -> list[int]:
        return [process.pid for process in training_processes(name, proc=self.proc)]


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path)


def test_ranks_of_torchrun_are_found_without_their_workers(fake: Fake) -> None:
    fake.add(20, command="python torchrun train.py")
    fake.add(22, parent=20, environ="RANK=1 WORLD_SIZE=2")
    fake.add(21, parent=20, environ="RANK=0 WORLD_SIZE=2")
    fake.add(23, parent=21, environ="RANK=0 WORLD_SIZE=2")  # a forked DataLoader worker
    fake.add(24, parent=21, environ="RANK=0", command="python -c multiprocessing.spawn")
    assert fake.found("20") == [21, 22]
    assert fake.found("22") == [22]


def test_script_is_found_by_name_and_its_parent_without_torch_is_not(fake: Fake) -> None:
    fake.add(30, command="bash run.sh", torch=False)
    fake.add(31, parent=30, command="python other.py --x")
    assert fake.found("other.py") == [31]
    assert fake.found("30") == [31]
    assert training_processes("31", proc=fake.proc)[0].python == 11


def test_processes_that_haiprof_records_are_not_looked_at_from_outside(
    fake: Fake, tmp_path: Path
) -> None:
    run = RunPaths(tmp_path / "train-20261129-0123")
    run.rank(0).root.mkdir(parents=True)
    run.rank(0).report.write_text('{"rank": 0, "pid": 31}')
    under = f"HAIPROF_ACTIVE_RUN={run.root}"
    fake.add(30, command="bash run.sh", torch=False)
    fake.add(31, parent=30, environ=under)
    with pytest.raises(UsageError) as caught:
        fake.found("30")
    assert "train-20261129-0123" in str(caught.value.hint)
    fake.add(32, parent=30, environ=under)  # python -I: it does not report in
    assert fake.found("30") == [32]


def test_only_the_ranks_of_one_job_are_found_below_a_process(fake: Fake) -> None:
    fake.add(1, parent=0, command="bash", torch=False)
    fake.add(30, command="bash run.sh", torch=False)
    for rank in (0, 1):
        fake.add(31 + rank, parent=30, environ=f"RANK={rank} WORLD_SIZE=2")
    fake.add(40, command="mpirun -np 2 python train.py", torch=False)
    fake.add(41, parent=40, command="python other.py")
    fake.add(42, parent=40, command="python other.py")
    fake.add(50, command="python third.py")
    assert fake.found("30") == [31, 32]
    assert fake.found("40") == [41, 42]
    assert fake.found("50") == [50]
    with pytest.raises(UsageError) as caught:
        fake.found("1")
    assert "process 1: several jobs run below it: 31 (python train.py); " in str(caught.value)
    assert "; 40 (mpirun -np 2 python train.py); 50 (python third.py)" in str(caught.value)


def test_a_name_that_unrelated_runs_share_is_not_taken_for_one_job(fake: Fake) -> None:
    fake.add(40, command="mpirun -np 2 python other.py", torch=False)
    fake.add(41, parent=40, command="python other.py")
    fake.add(42, parent=40, command="python other.py")
    assert fake.found("other.py") == [41, 42]
    fake.add(50, command="python other.py --seed 2")
    with pytest.raises(UsageError, match=r"other.py: several jobs run: 40 .*; 50 \(python other"):
        fake.found("other.py")


def test_process_without_torch_and_missing_ones_are_named(fake: Fake) -> None:
    fake.add(40, torch=False)
    with pytest.raises(RunNotFoundError, match="PyTorch"):
        fake.found("40")
    with pytest.raises(RunNotFoundError, match="no process 41"):
        fake.found("41")
    with pytest.raises(RunNotFoundError, match="no job of that name"):
        fake.found("nothing.py")


def test_process_of_another_user_is_refused(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.add(50)
    monkeypatch.setattr(os, "getuid", lambda: 123_456)
    with pytest.raises(UsageError, match="another user"):
        fake.found("50")
    with pytest.raises(RunNotFoundError):
        fake.found("train.py")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"state": "T"}, "stopped"),
        ({"state": "Z"}, "ended"),
        ({"tracer": 77}, "process 77 traces it"),
        ({"uid": 123_456}, "another user"),
    ],
)
def test_process_that_must_not_be_entered_says_why(
    fake: Fake, how: dict[str, object], said: str
) -> None:
    fake.add(60, **how)  # type: ignore[arg-type]
    assert said in (fake.why(60) or "")


def test_yama_and_containers_forbid_and_a_capability_allows(fake: Fake) -> None:
    fake.add(70)
    assert fake.why(70) is None
    yama = fake.proc / "sys/kernel/yama"
    yama.mkdir(parents=True)
    (yama / "ptrace_scope").write_text("1\n")
    assert "ptrace_scope is 1" in (fake.why(70) or "")
    (fake.proc / "1000" / "status").write_text(f"CapEff:\t{1 << 19:016x}\n")
    assert fake.why(70) is None
    (fake.proc / "70/ns/mnt").unlink()
    (fake.proc / "70/ns/mnt").symlink_to("mnt:[2]")
    assert "container" in (fake.why(70) or "")


def test_outermost_frame_tells_the_phase() -> None:
    forward = "Module._wrapped_call_impl (/x/site-packages/torch/nn/modules/module.py:1779)"
    backward = "_engine_run_backward (/x/site-packages/torch/autograd/graph.py:800)"
    loader = "_BaseDataLoaderIter.__next__ (/x/site-packages/torch/utils/data/dataloader.py:700)"
    assert [phase_of(f) for f in (forward, backward, loader)] == [
        "forward",
        "backward",
        "dataloader",
    ]
    own = "step (/home/me/train.py:4)"
    seen = judge(3, 9, [((own, backward, forward), 30), ((own, loader), 60), ((own,), 10)])
    assert seen.shares == {"backward": 0.3, "dataloader": 0.6, "other": 0.1}
    assert seen.hottest[0] == (own, 1.0)
    assert seen.margin("dataloader") == pytest.approx(0.096, abs=1e-3)
