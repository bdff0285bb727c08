from __future__ import annotations

from pathlib import Path

import pytest

from haiprof.agent.node_agent import Unreported, find_unreported, interpreter_flags
from tests.fakes import FakeProcess, FakeTree

BOOT = Path("/logs/run/boot")
GOOD = {"PYTHONPATH": f"{BOOT}:/home/me"}
TORCH = "/site-packages/torch/lib/libtorch_cpu.so"


@pytest.fixture
def tree(tmp_path: Path) -> FakeTree:
    tree = FakeTree(tmp_path)
    tree.process(FakeProcess(pid=10, exe="/bin/bash", argv=("bash", "job.sh")))
    return tree


def found(tree: FakeTree, *reported: int) -> list[Unreported]:
    return find_unreported(10, set(reported), BOOT, root=tree.root)


@pytest.mark.parametrize(("command", "flags"), [
    ("python train.py -I", ""),
    ("python -I train.py", "I"),
    ("python -uI train.py", "uI"),
    ("python -u -S -m pkg.train -E", "uSm"),
    ("python -c print(1) -I", "c"),
    ("python -cprint(1) -I", "c"),
    ("python -W ignore -E train.py", "WE"),
    ("python -Wignore -X dev -XI train.py", "WXX"),
    ("python -BW ignore train.py -S", "BW"),
    ("python --check-hash-based-pycs always -I x.py", "I"),
    ("python - -I", ""),
    ("python", ""),
])  # fmt: skip
def test_interpreter_flags_end_at_the_script(command: str, flags: str) -> None:
    assert interpreter_flags(command.split()) == flags


@pytest.mark.parametrize("flag", ["-I", "-E", "-S", "-uI", "-BsE"])
def test_unreported_blocking_flag_is_named_with_a_remedy(tree: FakeTree, flag: str) -> None:
    argv = ("python", flag, "train.py")
    tree.process(FakeProcess(pid=11, parent=10, argv=argv, environ=GOOD, mapped=TORCH))
    (one,) = found(tree)
    assert (one.pid, one.command) == (11, f"python {flag} train.py")
    letter = f"-{flag[-1]}"
    assert letter in one.reason
    assert letter in one.remedy


@pytest.mark.parametrize(
    ("environ", "words"),
    [({}, "no PYTHONPATH"), ({"PYTHONPATH": "/home/me"}, "overwritten"), ({"PYTHONPATH": ""}, "")],
)
def test_unreported_lost_pythonpath_is_named(
    tree: FakeTree, environ: dict[str, str], words: str
) -> None:
    tree.process(FakeProcess(pid=11, parent=10, environ=environ, mapped=TORCH))
    (one,) = found(tree)
    assert words in one.reason
    assert "$PYTHONPATH" in one.remedy


def test_unreported_foreign_sitecustomize_in_front_is_named(tree: FakeTree) -> None:
    tree.write("home/me/sitecustomize.py", "")
    behind = {"PYTHONPATH": f"{BOOT}:/home/me"}
    before = {"PYTHONPATH": f"/home/me:{BOOT}"}
    tree.process(FakeProcess(pid=11, parent=10, environ=behind, mapped=TORCH))
    assert found(tree) == []
    tree.process(FakeProcess(pid=11, parent=10, environ=before, mapped=TORCH))
    (one,) = found(tree)
    assert "/home/me/sitecustomize.py" in one.reason


def test_unreported_process_that_has_not_trained_is_no_problem(tree: FakeTree) -> None:
    tree.process(FakeProcess(pid=11, parent=10, environ=GOOD, mapped=TORCH))
    assert found(tree) == []
    for pid in (12, 13):
        rank = {"RANK": str(pid - 12), "PYTHONPATH": "/other"}
        tree.process(FakeProcess(pid=pid, parent=11, environ=rank, mapped=TORCH))
    assert [one.pid for one in found(tree)] == [12, 13]


def test_unreported_needs_torch_or_a_rank_label(tree: FakeTree) -> None:
    argv = ("python", "-I", "tool.py")
    tree.process(FakeProcess(pid=11, parent=10, argv=argv))
    assert found(tree) == []
    tree.process(FakeProcess(pid=11, parent=10, argv=argv, environ={"LOCAL_RANK": "0"}))
    assert [one.pid for one in found(tree)] == [11]


def test_unreported_leaves_out_workers_of_ranks_and_forks_of_listed_ones(tree: FakeTree) -> None:
    argv = ("python", "-I", "train.py")
    for pid, parent in ((11, 10), (12, 11), (21, 10), (22, 21)):
        tree.process(FakeProcess(pid=pid, parent=parent, argv=argv, mapped=TORCH))
    assert [one.pid for one in found(tree, 11)] == [21]


def test_unreported_launcher_whose_ranks_are_there_is_left_out(tree: FakeTree) -> None:
    launcher = ("python", "-I", "-m", "torch.distributed.run", "train.py")
    tree.process(FakeProcess(pid=11, parent=10, argv=launcher, mapped=TORCH))
    rank = {**GOOD, "RANK": "0"}
    tree.process(FakeProcess(pid=12, parent=11, environ=rank))
    assert found(tree) == []
    assert found(tree, 12) == []


def test_unreported_other_programs_and_ended_ones_are_no_problem(tree: FakeTree) -> None:
    tree.process(FakeProcess(pid=11, parent=10, exe="/usr/bin/cat", mapped=TORCH))
    tree.process(FakeProcess(pid=12, parent=10, argv=("python", "-I", "x"), mapped=TORCH))
    tree.remove("proc/12/exe")
    assert found(tree) == []
    assert find_unreported(999, (), BOOT, root=tree.root) == []


def test_unreported_maps_are_read_across_pieces(tree: FakeTree) -> None:
    tree.process(FakeProcess(pid=11, parent=10, argv=("python", "-I", "x")))
    for filler in range((1 << 16) - 9, (1 << 16) + 2):
        tree.write("proc/11/maps", "x" * filler + "libtorch_cpu.so\n")
        assert len(found(tree)) == 1
