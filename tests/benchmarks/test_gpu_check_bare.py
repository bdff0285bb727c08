"""`scripts/gpu-check` on a bare machine: torch alone, no network, packages carried along."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from benchmarks.gpu.bench import ITEMS
from benchmarks.gpu.carried import core_dependencies
from tests.benchmarks.bare_machine import OFFLINE, ROOT, copy_tree, make_python, run_offline

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
CAN_BE_ALONE = shutil.which("unshare") is not None and (
    subprocess.run([*OFFLINE, "true"], capture_output=True, check=False).returncode == 0
)
pytestmark = pytest.mark.skipif(
    not CAN_BE_ALONE, reason="needs unshare, and the right to a network"
)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_python(tmp_path_factory.mktemp("bare") / "venv")


def test_each_lacking_package_is_one_line_with_a_remedy(tmp_path: Path, python: Path) -> None:
    out = tmp_path / "out"
    words = ["--fake", "--wheels", str(tmp_path / "none"), "--out", str(out)]
    done = run_offline(python, copy_tree(tmp_path / "tree"), ["scripts/gpu-check", *words])
    assert (done.returncode, done.stdout, out.exists()) == (2, "", False)
    lines = done.stderr.splitlines()
    # jinja2 is there: torch needs it itself.
    wanted = [need for need in core_dependencies() if Requirement(need).name != "jinja2"]
    remedy = f"install it, or carry it: scripts/gpu-check --pack --python {VERSION}"
    assert lines == [f"lacking: {need} (none is here); {remedy}" for need in wanted]


def test_without_gpu_and_packages_one_line_and_exit_0(tmp_path: Path, python: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    before = sorted(tree.rglob("*"))
    done = run_offline(python, tree, ["scripts/gpu-check", "--out", str(tmp_path / "out")])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("No NVIDIA GPU here")
    assert done.stdout.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert [p for p in sorted(tree.rglob("*")) if "__pycache__" not in p.parts] == before


@pytest.mark.proof(takes_s=600)
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler for the stub of NVML")
def test_packed_tree_runs_every_item_beside_torch_alone(tmp_path: Path, python: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    pack = [sys.executable, "-m", "benchmarks.gpu", "--pack", str(tree / ".whl")]
    subprocess.run([*pack, "--python", VERSION], cwd=ROOT, capture_output=True, check=True)
    out = tmp_path / "out"
    words = ["--fake", "--minutes", "30", "--out", str(out)]
    done = run_offline(python, tree, ["scripts/gpu-check", *words])
    first = done.stdout.splitlines()[0]
    assert "haiprof's wheel" in first, done.stderr
    content = json.loads((out / "gpu-check.json").read_text())
    states = {item["name"]: (item["state"], item["reason"]) for item in content["items"]}
    assert states == {item.name: ("done", "") for item in ITEMS}, done.stdout
    rows = [(item["name"], row["figure"], row["outcome"], row["reason"] or row["measured"])
            for item in content["items"] for row in item["rows"]]  # fmt: skip
    assert not [row for row in rows if row[2] not in ("pass", "fake")]
    assert done.returncode == 0
