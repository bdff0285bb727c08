"""`scripts/gpu-check`: the dry run of every item, items that break, and a machine without a GPU."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import carried, pack
from benchmarks.gpu.items import ITEMS

ROOT = Path(__file__).parents[2]
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def gpu_check(*words: str, path: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """The command as the script starts it, under this interpreter."""
    found = {k: v for k, v in os.environ.items() if not k.startswith(("HAIPROF_", "OUT"))}
    found["PATH"] = path or os.pathsep.join((str(Path(sys.executable).parent), found["PATH"]))
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", *words], cwd=ROOT, env={**found, **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def broken(out: Path, *names: str, seconds: float = 60) -> subprocess.Popen[bytes]:
    """A run of items that fail in the ways that they are named for."""
    command = [sys.executable, "-m", "tests.benchmarks.items", str(out), str(seconds), *names]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)


def results(out: Path) -> dict[str, dict[str, Any]]:
    content = json.loads((out / "gpu-check.json").read_text())
    return {item["name"]: item for item in content["items"]}


# -- without a GPU ---------------------------------------------------------------------------------


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
def test_without_a_gpu_one_line_exit_0_and_nothing_written(tmp_path: Path) -> None:
    nothing = tmp_path / "bin"
    nothing.mkdir()
    done = gpu_check("--out", str(tmp_path / "out"), path=str(nothing))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    assert "No NVIDIA GPU here" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["bin"]


def test_an_item_that_is_not_there_is_named() -> None:
    done = gpu_check("--fake", "--only", "no-such-item")
    assert done.returncode == 2
    assert "no item no-such-item: --list names them all" in done.stderr


# -- the dry run -----------------------------------------------------------------------------------


@pytest.mark.proof
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler for the stub of NVML")
def test_dry_run_executes_every_item_and_gets_every_figure(tmp_path: Path) -> None:
    done = gpu_check("--fake", "--minutes", "19", "--out", str(tmp_path / "out"))
    found = results(tmp_path / "out")
    assert list(found) == [item.name for item in ITEMS]
    states = {name: (item["state"], item["reason"]) for name, item in found.items()}
    assert states == {item.name: ("done", "") for item in ITEMS}, done.stdout
    rows = [(name, row["figure"], row["outcome"], row["reason"] or row["measured"])
            for name, item in found.items() for row in item["rows"]]  # fmt: skip
    assert not [row for row in rows if row[2] not in ("pass", "fake")]
    assert done.returncode == 0
    table = (tmp_path / "out" / "gpu-check.md").read_text()
    assert "Simulated: nothing here is a measurement." in table
    with tarfile.open(tmp_path / "out" / "gpu-check-recordings.tar.gz") as archive:
        names = archive.getnames()
    kept = ("flight-recorder.json", "memory-snapshot.pickle",
            "run-training/run.json", "window-of-four-steps.trace.json")  # fmt: skip
    assert set(kept) <= set(names)


def test_every_expectation_has_a_source_and_every_item_a_function() -> None:
    assert len({item.name for item in ITEMS}) == len(ITEMS)
    for item in ITEMS:
        module, _, name = item.function.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
        figures = [expect.figure for expect in item.expects]
        assert len(set(figures)) == len(figures) > 0
        for expect in item.expects:
            assert expect.source
            assert (expect.low, expect.high, expect.equals) != (None, None, None), expect.figure


def test_documentation_has_every_item_and_figure() -> None:
    text = (ROOT / "docs" / "gpu-check.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in text.splitlines()
            if line.startswith("| `") and "gpu-check" not in line]  # fmt: skip
    assert rows == [
        [f"`{item.name}`", item.question, "; ".join(expect.words for expect in item.expects)]
        for item in ITEMS
    ]


# -- items that break ------------------------------------------------------------------------------


def test_items_that_break_are_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ways = ("wrong", "raises", "crashes", "hangs", "exits", "ends_mid_line", "no.such:module")
    assert broken(out, *ways, "works").wait(60) == 0
    found = results(out)
    states = {name: (item["state"], item["reason"]) for name, item in found.items()}
    assert states == {
        "wrong": ("done", ""),
        "raises": ("failed", "ValueError: no such luck"),
        "crashes": ("crashed", "SIGSEGV"),
        "hangs": ("timed out", ""),
        "exits": ("failed", "SystemExit: 0"),
        "ends_mid_line": ("done", ""),
        "no.such:module": ("failed", "ModuleNotFoundError: No module named 'no'"),
        "works": ("done", ""),
    }
    outcomes = {name: item["rows"][0]["outcome"] for name, item in found.items()}
    assert outcomes == {
        "wrong": "fail", "raises": "missing", "crashes": "pass", "hangs": "pass",
        "exits": "missing", "ends_mid_line": "pass", "no.such:module": "missing", "works": "pass",
    }  # fmt: skip
    assert not is_alive(found["hangs"]["notes"]["beside"])
    table = (out / "gpu-check.md").read_text()
    assert "- crashes: crashed: SIGSEGV" in table
    assert "no such luck" in (out / "gpu-check.log").read_text()


def test_run_that_is_ended_keeps_what_it_had(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = broken(out, "works", "hangs", "wrong")
    until = time.monotonic() + 30
    while not (out / "gpu-check.json").exists() and time.monotonic() < until:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    found = results(out)
    assert found["works"]["rows"][0]["outcome"] == "pass"
    assert found["wrong"]["state"] == "not reached"
    with tarfile.open(out / "gpu-check-recordings.tar.gz") as archive:
        assert archive.getnames() == ["one.json"]


def test_items_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    assert broken(tmp_path / "out", "works", seconds=1).wait(30) == 0
    item = results(tmp_path / "out")["works"]
    assert (item["state"], item["reason"], item["rows"]) == ("not reached", "the time was up", [])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- packages that are carried ---------------------------------------------------------------------


def test_wheels_fit_by_python_and_machine() -> None:
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert carried.fits("a-1-py3-none-any.whl")
    assert carried.fits("a-1-py2.py3-none-any.whl")
    assert carried.fits(f"a-1-{own}-{own}-manylinux_2_17_{os.uname().machine}.whl.xz")
    assert carried.fits(f"a-1-cp39-abi3-manylinux_2_17_{os.uname().machine}.whl")
    assert not carried.fits(f"a-1-cp36-cp36m-manylinux_2_17_{os.uname().machine}.whl")
    assert not carried.fits(f"a-1-{own}-{own}-win_amd64.whl")


@pytest.mark.parametrize(
    ("version", "limits", "holds"),
    [
        ("2.11.0+cu130", ">=2.5", True),
        ("1.26", "==1.26.0", True),
        ("2.1.0", "==2.1.*", True),
        ("2.9", ">=2.10", False),
        ("3.1.6", "<4, >=3.1, !=3.1.6", False),
        ("2.4.1", "~=2.2", True),
        ("3.0", "~=2.2", False),
        ("2.3", "~=2.2.3", False),
        ("7", "", True),
    ],
)
def test_version_is_within_limits_by_its_numbers(version: str, limits: str, holds: bool) -> None:
    assert carried.meets(version, limits) is holds


def test_needs_are_those_of_the_machine_that_is_packed_for() -> None:
    needs = ["a>=1", "b; python_version < '3.11'", "c[x]~=2.0; platform_system == 'Windows'",
             "d<3,>=2; python_version >= '3.12'", "e; extra == 'more'"]  # fmt: skip
    assert pack.there(needs, "3.12") == ["a>=1", "d<3,>=2"]
    assert pack.there(needs, "3.10") == ["a>=1", "b"]


def put(folder: Path, name: str, version: str, *needs: str) -> dict[str, object]:
    """A carried package whose module says that it is."""
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{name}/__init__.py", "version = 'carried'\n")
        about = "".join(f"Requires-Dist: {need}\n" for need in needs)
        file.writestr(f"{name}-{version}.dist-info/METADATA", f"Version: {version}\n{about}")
    return pack.entry(wheel, carried.PYTHON)


def test_carried_packages_are_used_where_they_are_lacking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "LARGE_BYTES", 0)  # packed anew, as large ones are
    index = {"made-up": put(tmp_path, "made_up", "2.0", "beneath>=1; python_version > '3'"),
             "beneath": put(tmp_path, "beneath", "1.5"), "numpy": put(tmp_path, "numpy", "9.9"),
             "old": put(tmp_path, "old", "1.0")}  # fmt: skip
    (tmp_path / carried.INDEX).write_text(json.dumps(index))
    found = carried.read_index(tmp_path)
    names, lacking = carried.choose(["made-up~=2.0", "numpy>=1.26", "old>=2", "torch>=99"], found)
    assert names == ["made-up", "beneath"]
    ours = importlib.metadata.version("torch")
    assert [line.partition(";")[0] for line in lacking] == [
        "lacking: old>=2 (none is here)", f"lacking: torch>=99 ({ours} is here)"
    ]  # fmt: skip
    for name in names:
        carried.unpack(found[name].path, tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert importlib.import_module("beneath").version == "carried"
    assert {p.suffix for p in tmp_path.iterdir() if p.is_file()} == {".xz", ".json"}


def test_wheel_of_other_sources_is_not_taken_for_the_tree(tmp_path: Path) -> None:
    wheel = tmp_path / "haiprof-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("haiprof-0.1.0.dist-info/RECORD", "haiprof/__init__.py,sha256=abc,1\n")
    assert not carried.is_of_tree(wheel)


def test_call_of_the_device_tool_keeps_its_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, "one", "1.0")
    assert pack.report(tmp_path) == 0
    assert "outside the tree: what is carried must be inside" in capsys.readouterr().out
    assert len(pack.COMMAND) < 2000  # characters; and 600 s are its limit
    minutes = float(pack.COMMAND.partition("--minutes ")[2].split()[0])
    assert 540 <= minutes * 60 <= 570
