"""`haiprof compare` as a person and as a continuous integration job see it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from haiprof.base.errors import UsageError
from haiprof.cli.compare import parse_runs
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.manifest import Manifest, read_manifest, write_manifest
from tests.commands import Run
from tests.unit.analysis.recorded import write_run
from tests.unit.analysis.test_compare import write

SLOWER, UNDECIDED = 10, 5


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HAIPROF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return write(tmp_path, "before", seed=1, second=1)


def test_slower_run_fails_the_build_and_says_why(tmp_path: Path, before: Path, run: Run) -> None:
    after = write(tmp_path, "after", seed=2, data_ms=7.0, second=2)
    _, out, err = run("compare", before, after, "--fail-if-slower", "5%", status=SLOWER)
    first = out.splitlines()[0]
    assert "% more time (" in first
    assert re.search(r"input \(\+(2.99|3.0\d) ms", first)
    assert "slower than 5.0 %: exit status 10" in err
    assert "if that is meant" not in err  # a baseline that was named is taken again
    run("compare", before, after)
    run("compare", before, after, "--fail-if-slower", "50%")


def test_equal_runs_pass(tmp_path: Path, before: Path, run: Run) -> None:
    after = write(tmp_path, "after", seed=3)
    out = run("compare", before, after, "--fail-if-slower", "5%").out
    assert out.startswith("no difference above")
    err = run("compare", before, after, "--fail-if-slower", "0.1%", status=UNDECIDED).err
    assert "beyond the limit" in err


def test_too_few_steps_cannot_be_judged(tmp_path: Path, before: Path, run: Run) -> None:
    after = write(tmp_path, "after", seed=3, step_count=15)
    _, out, err = run("compare", before, after, "--fail-if-slower", "5%", status=UNDECIDED)
    assert out.startswith("cannot be evaluated")
    assert "steps after warm-up" in err
    assert "a longer --time" in err


def test_json_is_all_that_stdout_gets_and_holds_the_verdict(
    tmp_path: Path, before: Path, run: Run
) -> None:
    after = write(tmp_path, "after", seed=2, data_ms=7.0)
    out = run("compare", before, after, "--json", "--fail-if-slower", "5%", status=SLOWER).out
    found = json.loads(out)
    assert found["verdict"]["state"] == "slower"
    assert found["step_time"]["low_ratio"] > 1.05
    assert found["version"] == 2
    assert found["positions"][0]["name"] == "input"
    assert (found["accounts"], found["promise"]) == ([], None)
    assert "no stacks" in found["no_accounts"]
    assert found["kernels"] is None
    assert "--trace" in found["no_kernels"]


def test_slower_run_is_not_the_next_ones_baseline(tmp_path: Path, before: Path, run: Run) -> None:
    slow = write(tmp_path, "slow", seed=2, data_ms=7.0, second=2)
    words = ("--baseline", "last-good", "--fail-if-slower", "5%")
    err = run("compare", slow, *words, status=SLOWER).err
    assert f"remove {slow}/report/compare.json" in err
    again = write(tmp_path, "again", seed=4, data_ms=7.0, second=3)
    out = run("compare", again, *words, status=SLOWER).out
    assert str(before) in out.replace("\n", "")
    assert "slow was itself found slower" in " ".join(out.split())


def test_code_and_surroundings_that_differ_are_shown(
    tmp_path: Path, before: Path, run: Run
) -> None:
    after = write(
        tmp_path, "after", seed=2, command=["python", "train.py", "--workers", "0"],
        environment={"git": {"root": "/x", "commit": "b" * 40, "branch": "\x1b[2Jmain"}},
    )  # fmt: skip
    manifest = read_manifest(RunPaths(before))
    known = {"git": {"root": "/x", "commit": "a" * 40, "branch": "main"}}
    write_manifest(RunPaths(before), Manifest(**{**vars(manifest), "environment": known}))
    out = run("compare", before, after).out
    assert "--workers 0" in out
    assert "a" * 12 in out
    assert "b" * 12 in out
    assert "\x1b[2J" not in out  # a branch's name cannot steer the terminal


def test_run_without_steps_and_missing_runs_are_one_line(
    tmp_path: Path, before: Path, run: Run
) -> None:
    empty = write_run(tmp_path / "empty").root
    out = run("compare", before, empty).out
    assert out.startswith("cannot be evaluated")
    run("compare", before, empty, "--fail-if-slower", "5%", status=UNDECIDED)
    err = run("compare", before, tmp_path / "nowhere", status=3).err
    assert "nowhere" in err
    err = run("compare", tmp_path / "neither", tmp_path / "nor", status=3).err
    assert all(f"{name}: no such run" in err for name in ("neither", "nor"))


@pytest.mark.parametrize("words", [([], None), (["a"], None), (["a", "b"], "c"), (["a"] * 3, None)])
def test_runs_that_do_not_pair_are_refused(words: tuple[list[str], str | None]) -> None:
    with pytest.raises(UsageError, match="name a baseline"):
        parse_runs([Path(word) for word in words[0]], words[1])


def test_run_left_out_is_the_newest_of_the_log_directory(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_dir = tmp_path / "haiprof-logs"
    for number in (1, 2):
        write(log_dir, f"run-{number}", seed=number, second=number)
    monkeypatch.chdir(tmp_path)
    out = run("compare", "--baseline", "last-good", "--fail-if-slower", "5%").out
    assert "run-1" in out
    assert "run-2" in out


def test_run_against_itself_and_limits_that_look_like_ratios_are_refused(
    before: Path, run: Run, tmp_path: Path
) -> None:
    err = run("compare", before, before, status=2).err
    assert "compared with itself" in err
    err = run("compare", before, before, "--fail-if-slower", "0.05", status=2).err
    assert "hint: --fail-if-slower 5%" in err
    err = run("compare", before, "--baseline", "last-good", status=UNDECIDED).err
    assert "the first run has none" in err
    err = run("compare", before, "--baseline", "last-bad", status=3).err
    assert "last-good" in err
