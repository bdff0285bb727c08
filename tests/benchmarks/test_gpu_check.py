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
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import carried
from benchmarks.gpu.bench import ITEMS
from tests.process.live import within

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


# -- items that break ------------------------------------------------------------------------------


def test_items_that_break_are_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    ways = ("wrong", "raises", "crashes", "hangs", "exits", "ends_mid_line", "no.such:module")
    assert broken(out, *ways, "works").wait(240) == 0
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
    within(120, (out / "gpu-check.json").exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    found = results(out)
    assert found["works"]["rows"][0]["outcome"] == "pass"
    assert found["wrong"]["state"] == "not reached"
    with tarfile.open(out / "gpu-check-recordings.tar.gz") as archive:
        assert archive.getnames() == ["one.json"]


def test_items_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    assert broken(tmp_path / "out", "works", seconds=1).wait(120) == 0
    item = results(tmp_path / "out")["works"]
    assert (item["state"], item["reason"], item["rows"]) == ("not reached", "the time was up", [])


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- packages that are carried ---------------------------------------------------------------------


def put(folder: Path, name: str, version: str, *needs: str, tag: str = "py3-none-any") -> Path:
    """A carried package whose module says that it is."""
    wheel = folder / f"{name}-{version}-{tag}.whl"
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files = {
        f"{name}/__init__.py": "version = 'carried'\n",
        f"{name}-{version}.dist-info/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n",
        f"{name}-{version}.dist-info/METADATA": about
        + "".join(f"Requires-Dist: {need}\n" for need in needs),
    }
    record = f"{name}-{version}.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as file:
        for path, text in {**files, record: "".join(f"{path},,\n" for path in files)}.items():
            file.writestr(path, text)
    return wheel


@pytest.fixture
def wants(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what haiprof needs here; what is carried comes first on the path of this test."""
    monkeypatch.setattr(carried, "_put_first", lambda site: monkeypatch.syspath_prepend(site))
    return lambda *needs: monkeypatch.setattr(carried, "core_dependencies", lambda: list(needs))


def test_carried_packages_are_used_where_they_are_lacking(
    tmp_path: Path, wants: Callable[..., None]
) -> None:
    carried.pack_anew(put(tmp_path, "made_up", "2.0", "beneath>=1; python_version > '3'"))
    put(tmp_path, "beneath", "1.5")
    put(tmp_path, "numpy", "9.9")
    (tmp_path / "work").mkdir()
    wants("made-up~=2.0", "numpy>=1.26")
    assert "made-up~=2.0" in carried.use_wheels(tmp_path, tmp_path / "work")
    assert importlib.import_module("made_up").version == "carried"
    assert importlib.import_module("beneath").version == "carried"
    assert not (tmp_path / "work" / "site" / "numpy").exists(), "this Python's own will do"


def test_packages_that_are_not_there_are_a_line_each(
    tmp_path: Path, wants: Callable[..., None]
) -> None:
    put(tmp_path, "other", "1.0", tag="cp36-cp36m-linux_x86_64")
    (tmp_path / "work").mkdir()
    wants("other>=1", "numpy>=99")
    with pytest.raises(carried.LackingError) as raised:
        carried.use_wheels(tmp_path, tmp_path / "work")
    ours = importlib.metadata.version("numpy")
    assert [line.partition(";")[0] for line in str(raised.value).splitlines()] == [
        "lacking: other>=1 (none is here)", f"lacking: numpy>=99 ({ours} is here)"
    ]  # fmt: skip


def test_needs_are_those_of_the_python_that_is_packed_for() -> None:
    old, new = carried.core_dependencies("3.10"), carried.core_dependencies("3.12")
    assert [need for need in old if need not in new] == ["tomli>=2.0"]


def test_wheel_of_other_sources_is_not_taken_for_the_tree(tmp_path: Path) -> None:
    wheel = tmp_path / "haiprof-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("haiprof-0.1.0.dist-info/RECORD", "haiprof/__init__.py,sha256=abc,1\n")
    assert not carried.is_of_tree(wheel)


def test_call_of_the_device_tool_keeps_its_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, "one", "1.0")
    assert carried.report(tmp_path) == 0
    assert "outside the tree: what is carried must be inside" in capsys.readouterr().out
    assert len(carried.COMMAND) < 2000  # characters; and 600 s are its limit
    minutes = float(carried.COMMAND.partition("--minutes ")[2].split()[0])
    assert 540 <= minutes * 60 <= 570
