"""Folders and files that somebody else has prepared: nothing behind a link is touched or believed.

The attacker either has packed what the victim reads, or is a second user of the machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from haiprof.agent.trace_finisher import finish_parts, remove_torn
from haiprof.base.errors import HaiprofError
from haiprof.base.safe_files import (
    MadeFolder,
    make_folder,
    named_file,
    open_to_append,
    output_file,
    remove_file,
    rename,
    write_file,
)
from haiprof.cli.app import run_command
from haiprof.compat.tensorboard import open_layout
from haiprof.run_format import schema
from haiprof.run_format.control import new_request, post_request
from haiprof.run_format.kept_answers import keep_answer, read_answer
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.schema import ClockAnchor
from haiprof.run_format.writer import LineWriter, RecordWriter, write_json
from haiprof.show.scalars import write_scalars
from haiprof.trace_analysis.report_cache import cached_answers
from haiprof.trace_format.kineto import cache as user_cache
from haiprof.trace_format.kineto.cache import content_key, open_columns
from tests.security.second_user import as_second_user
from tests.unit.analysis.trace.shared import rank_file, step
from tests.unit.launch.parts import HOST, new_run, part_of, put_down
from tests.unit.rundir.small_run import write_small_run
from tests.unit.traces.texts import op, pretty

ATTACKER = 65534
LONG_AGO = time.time() - 400 * 24 * 3600
with_second_user = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can act as a second user"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The victim's cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of the victim's with what nobody may touch, old enough to be tidied away."""
    folder = tmp_path / "victim"
    (folder / "thesis" / "figures").mkdir(parents=True)
    (folder / "traces" / "window0").mkdir(parents=True)
    (folder / "thesis" / "text.tex").write_text("years of work")
    (folder / "notes").write_text("mine")
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (LONG_AGO, LONG_AGO))
    return folder


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all users may write to, as some log directories are."""
    folder = Path(tempfile.mkdtemp(prefix="haiprof-shared-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def content(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Everything in a folder: mode, time of change, text."""
    found = {}
    for path in (*folder.rglob("*"), folder):
        status = path.lstat()
        text = path.read_text() if stat.S_ISREG(status.st_mode) else ""
        found[str(path)] = (status.st_mode, status.st_mtime_ns, text)
    return found


@pytest.fixture
def untouched(victim: Path) -> Iterator[Path]:
    """The victim's folder; at the end it must be as it was."""
    before = content(victim)
    yield victim
    assert content(victim) == before


def a_trace(folder: Path, name: str = "op") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rank0.json"
    path.write_text(pretty([op(name)]))
    return path


def names(path: Path) -> list[str]:
    return open_columns(path).table("ops")["name"].cast(pl.String).to_list()


def entry_of(path: Path) -> Path:
    return user_cache.trace_folder() / f"{content_key(path)}.columns"


# -- caches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["trace-report", "functions"])
def test_reading_a_trace_leaves_what_a_cache_link_leads_to(
    command: str, tmp_path: Path, untouched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "unpacked"
    folder.mkdir()
    path = rank_file(folder, 0, [step(1, 0, 100), step(2, 100, 100)])
    (folder / f".{path.name}.haiprof").symlink_to(untouched)
    run_command([command, str(folder)])
    assert capsys.readouterr().out


def test_a_cache_that_came_with_a_trace_is_not_believed(tmp_path: Path) -> None:
    path, other = a_trace(tmp_path / "a"), a_trace(tmp_path / "b", "forged")
    open_columns(other)
    beside = path.parent / f".{path.name}.haiprof" / content_key(path)
    beside.parent.mkdir()
    shutil.copy(entry_of(other), beside)
    assert names(path) == ["op"]


@pytest.mark.parametrize("which", ["haiprof", "haiprof/trace_format/kineto"])
def test_a_link_in_place_of_the_cache_folder_is_not_followed(
    which: str, tmp_path: Path, home: Path, untouched: Path
) -> None:
    link = home / which
    link.parent.mkdir(parents=True)
    link.parent.chmod(0o700)
    link.symlink_to(untouched)
    path = a_trace(tmp_path / "a")
    assert names(path) == names(path) == ["op"]


def test_a_cache_folder_that_others_may_write_to_is_not_used(tmp_path: Path) -> None:
    path = a_trace(tmp_path / "a")
    folder = user_cache.trace_folder()
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    assert names(path) == ["op"]
    assert list(folder.iterdir()) == []


@with_second_user
@pytest.mark.parametrize("which", ["home", "haiprof", "traces"])
def test_a_cache_folder_of_another_user_is_not_used(which: str, tmp_path: Path, home: Path) -> None:
    path = a_trace(tmp_path / "a")
    folder = user_cache.trace_folder()
    folder.mkdir(parents=True, mode=0o700)
    chosen = {"home": home, "haiprof": folder.parent, "traces": folder}[which]
    folder.parent.chmod(0o700)
    folder.chmod(0o700)
    os.chown(chosen, ATTACKER, ATTACKER)
    assert names(path) == ["op"]
    assert list(folder.iterdir()) == []


@with_second_user
def test_columns_that_another_user_wrote_are_not_believed(tmp_path: Path) -> None:
    path, other = a_trace(tmp_path / "a"), a_trace(tmp_path / "b", "forged")
    open_columns(other)
    shutil.copy(entry_of(other), entry_of(path))
    assert names(path) == ["forged"]  # as our own it would be believed
    os.chown(entry_of(path), ATTACKER, ATTACKER)
    assert names(path) == ["op"]


@pytest.mark.parametrize("how", ["others may write", "link", "another's"])
def test_answers_that_others_may_have_written_are_not_believed(how: str, tmp_path: Path) -> None:
    trace = a_trace(tmp_path / "a")
    asked: list[Path] = []

    def compute(paths: Sequence[Path]) -> list[dict[str, Any]]:
        asked.extend(paths)
        return [{"a": pl.DataFrame({"x": [1]})} for _ in paths]

    cached_answers([trace], "question", {}, ["a"], compute)
    (entry,) = user_cache.trace_folder().iterdir()
    cached_answers([trace], "question", {}, ["a"], compute)
    assert asked == [trace]
    if how == "link":
        entry.rename(tmp_path / "moved")
        entry.symlink_to(tmp_path / "moved")
    elif how == "others may write":
        entry.chmod(0o666)
    elif os.geteuid() == 0:
        os.chown(entry, ATTACKER, ATTACKER)
    else:
        pytest.skip("only root can act as a second user")
    cached_answers([trace], "question", {}, ["a"], compute)
    assert asked == [trace, trace]


@pytest.mark.parametrize("how", ["file", "folder", "report folder", "link", "another's"])
def test_kept_answers_that_others_may_have_written_are_not_believed(
    how: str, tmp_path: Path
) -> None:
    run = write_small_run(tmp_path / "run")
    keep_answer(run, "verdict", {"stdout": "all is well"}, valid_for="stamp")
    assert read_answer(run, "verdict", valid_for="stamp") is not None
    kept = run.answer("verdict")
    if how == "link":
        kept.rename(tmp_path / "moved")
        kept.symlink_to(tmp_path / "moved")
    elif how == "another's":
        if os.geteuid() != 0:
            pytest.skip("only root can act as a second user")
        os.chown(run.answers, ATTACKER, ATTACKER)
    else:
        which = {"file": kept, "folder": run.answers, "report folder": run.report}[how]
        which.chmod(0o666 if how == "file" else 0o777)
    assert read_answer(run, "verdict", valid_for="stamp") is None


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_no_answer_is_kept_or_removed_where_others_may_write(mode: int, tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run")
    run.answers.mkdir(parents=True)
    for number in range(60):
        (run.answers / f"{number}.json").touch()
    run.answers.chmod(mode)
    keep_answer(run, "verdict", {"stdout": ""}, valid_for="stamp")
    assert len(list(run.answers.iterdir())) == 60


@with_second_user
def test_kept_answers_of_a_shared_run_are_its_owners_alone() -> None:
    """With `--share all` others read the run, and work its answers out anew; its owner does not."""
    with tempfile.TemporaryDirectory(prefix="haiprof-shared-") as shared:
        os.chmod(shared, 0o755)
        run = write_small_run(Path(shared) / "run")
        for path in (run.root, *run.root.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        shutil.rmtree(run.report, ignore_errors=True)
        keep_answer(run, "verdict", {"stdout": "mine"}, valid_for="stamp")
        assert stat.S_IMODE(run.answers.stat().st_mode) == 0o755
        kept = read_answer(run, "verdict", valid_for="stamp")
        assert kept == {"stdout": "mine"}
        theirs = as_second_user(lambda: read_answer(run, "verdict", valid_for="stamp"))
        assert theirs is None


# -- TensorBoard -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["tensorboard", "tensorboard/traces"])
def test_tensorboard_neither_empties_nor_fills_what_a_link_leads_to(
    which: str, tmp_path: Path, untouched: Path
) -> None:
    run = write_small_run(tmp_path / "run")
    (run.root / "traces").mkdir()
    rank_file(run.root / "traces", 0, [step(1, 0, 100)])
    link = run.root / which
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(untouched)
    with open_layout(run, run.root / "traces") as layout:
        assert layout.is_temporary
        assert layout.link_windows(whole_only=False) == 1
        folder = layout.folder
    assert not folder.exists()
    assert link.is_symlink()


def test_tensorboard_removes_its_own_links_and_nothing_else(
    tmp_path: Path, untouched: Path
) -> None:
    run = write_small_run(tmp_path / "run")
    (run.root / "traces").mkdir()
    rank_file(run.root / "traces", 0, [step(1, 0, 100)])
    traces = run.tensorboard / "traces"
    (traces / "window7").mkdir(parents=True)
    (traces / "window7" / "rank0_host.pt.trace.json").symlink_to("/nowhere")  # of a killed one
    (traces / "mine").mkdir()
    (traces / "mine" / "rank0_host.pt.trace.json").write_text("kept by hand")
    (traces / "window8").symlink_to(untouched)
    with open_layout(run, run.root / "traces") as layout:
        assert not layout.is_temporary
        assert layout.link_windows(whole_only=False) == 1
        assert (traces / "window0").is_dir()
        assert not (traces / "window7").exists()
    assert sorted(path.name for path in traces.iterdir()) == ["mine", "window8"]
    assert (traces / "mine" / "rank0_host.pt.trace.json").read_text() == "kept by hand"


@with_second_user
def test_tensorboard_on_the_run_of_another_user_writes_elsewhere(tmp_path: Path) -> None:
    run = write_small_run(tmp_path / "run")
    run.tensorboard.mkdir()
    os.chown(run.tensorboard, ATTACKER, ATTACKER)
    with open_layout(run, run.root) as layout:
        assert layout.is_temporary
    assert list(run.tensorboard.iterdir()) == []


@pytest.mark.parametrize("which", ["tensorboard", "tensorboard/rank0"])
def test_scalars_are_not_written_where_a_link_leads(
    which: str, tmp_path: Path, untouched: Path
) -> None:
    pytest.importorskip("tensorboard", reason="pip install 'haiprof[tensorboard]'")
    run = write_small_run(tmp_path / "run")
    link = run.root / which
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(untouched)
    with pytest.raises(HaiprofError, match="symbolic link"):
        write_scalars(run, follow=False, every_s=1.0)


# -- what is written into a run ----------------------------------------------------------------


def test_a_verdict_does_not_go_where_a_link_leads(
    tmp_path: Path, untouched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_small_run(tmp_path / "run")
    shutil.rmtree(run.report, ignore_errors=True)
    run.report.symlink_to(untouched)
    for words in (["verdict", "--save"], ["report"], ["diagnose"]):
        assert run_command([*words, str(run.root)]) in (1, 2)
        said = capsys.readouterr().err
        assert "symbolic link" in said
        assert str(run.report) in said


@pytest.mark.parametrize("how", ["symlink_to", "hardlink_to"])
def test_a_verdict_is_not_written_through_a_file_that_stands_there(
    how: str, tmp_path: Path, untouched: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_small_run(tmp_path / "run")
    run.report.mkdir(exist_ok=True)
    for path in (run.verdict_text, run.verdict_json, run.report_html):
        path.unlink(missing_ok=True)
        getattr(path, how)(untouched / "notes")
    assert run_command(["verdict", "--save", str(run.root)]) == 0
    assert run_command(["report", str(run.root)]) == 0
    capsys.readouterr()
    for path in (run.verdict_text, run.verdict_json, run.report_html):
        assert not path.is_symlink()
        assert path.stat().st_nlink == 1


def _json(path: Path) -> None:
    write_json(path, {"a": 1}, below=path.parent)


def _exported(path: Path) -> None:
    with output_file(path, force=True) as file:
        file.write(b"table")


@pytest.mark.parametrize("write", [_json, _exported])
def test_a_link_under_the_name_of_an_unfinished_file_is_not_written_through(
    write: Callable[[Path], None], tmp_path: Path, untouched: Path
) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    pid = os.getpid()
    for name in (f".x.json.{pid}", f".x.json.{pid}.part", f"x.json.{pid}", "x.tmp"):
        (folder / name).symlink_to(untouched / "notes")
    write(folder / "x.json")
    assert (folder / "x.json").is_file()
    assert not (folder / "x.json").is_symlink()


def test_unfinished_files_have_names_that_nobody_can_know(tmp_path: Path) -> None:
    seen: set[str] = set()
    for _ in range(3):
        with output_file(tmp_path / "x", force=True):
            seen |= {path.name for path in tmp_path.iterdir()} - {"x"}
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("how", "said"), [("symlink_to", "symbolic link"), ("hardlink_to", "second name")]
)
def test_lines_and_records_are_not_added_to_the_file_that_a_link_leads_to(
    how: str, said: str, tmp_path: Path, untouched: Path
) -> None:
    node = RunPaths(tmp_path / "run").node("node0")
    node.root.mkdir(parents=True)
    getattr(node.events, how)(untouched / "notes")
    getattr(node.records("host"), how)(untouched / "notes")
    node.records("gpu").symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match=said):
        LineWriter(node.events)
    for name in ("host", "gpu"):
        with pytest.raises(FileExistsError):
            RecordWriter(node.records(name), schema.PHASES, clock=ClockAnchor.now(), extra={})
    assert not (tmp_path / "nowhere").exists()


def test_a_pipe_in_place_of_a_file_of_lines_does_not_block(tmp_path: Path) -> None:
    node = RunPaths(tmp_path / "run").node("node0")
    node.root.mkdir(parents=True)
    os.mkfifo(node.events)
    with pytest.raises(OSError, match=r"No such device .*events"):
        LineWriter(node.events)


def test_a_request_does_not_close_the_folder_that_a_link_leads_to(
    tmp_path: Path, untouched: Path
) -> None:
    untouched.chmod(0o755)
    run = RunPaths(tmp_path / "run")
    run.root.mkdir()
    run.control.symlink_to(untouched)
    with pytest.raises(OSError, match="symbolic link"):
        post_request(run, new_request("stacks", valid_s=1.0))


# -- finishing traces --------------------------------------------------------------------------


def test_traces_are_not_finished_into_the_folder_that_a_link_leads_to(
    tmp_path: Path, victim: Path
) -> None:
    run = new_run(tmp_path)
    part = put_down(part_of(run))
    left = victim / f".{part.trace.name}.4711"
    left.write_text("looks as if a finisher had left it")
    run.traces.rename(victim / "moved")
    run.traces.symlink_to(victim / "moved")
    shutil.copy(left, victim / "moved" / left.name)
    before = content(victim)
    lines: list[dict[str, object]] = []
    assert finish_parts(run, lambda line: lines.append(dict(line)), host=HOST) == []
    remove_torn(run, lambda line: lines.append(dict(line)), host=HOST)
    assert content(victim) == before


@pytest.mark.parametrize("how", ["symlink_to", "hardlink_to"])
def test_a_finished_trace_replaces_a_link_and_not_what_it_leads_to(
    how: str, tmp_path: Path, untouched: Path
) -> None:
    run = new_run(tmp_path)
    part = put_down(part_of(run))
    getattr(part.trace, how)(untouched / "notes")
    (run.traces / f".{part.trace.name}.{os.getpid()}").symlink_to(untouched / "notes")
    assert finish_parts(run, lambda _: None, host=HOST) == [part.trace]
    assert part.trace.stat().st_nlink == 1
    assert not part.trace.is_symlink()


# -- a second user beside us -------------------------------------------------------------------

_FLIP = """
import os, sys, time
os.setgroups([]); os.setgid(65534); os.setuid(65534)
folder, target = sys.argv[1:]
print("ready", flush=True)
while True:
    os.rename(folder, folder + ".aside")
    os.symlink(target, folder)
    time.sleep(0.0002)
    os.unlink(folder)
    os.rename(folder + ".aside", folder)
    time.sleep(0.0002)
"""


@with_second_user
def test_a_folder_that_becomes_a_link_meanwhile_is_not_followed(
    shared: Path, untouched: Path
) -> None:
    report = shared / "report"
    report.mkdir()
    os.chown(report, ATTACKER, ATTACKER)
    attacker = subprocess.Popen(
        [sys.executable, "-c", _FLIP, str(report), str(untouched)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    written = refused = 0
    try:
        assert attacker.stdout is not None
        attacker.stdout.readline()
        limit = time.monotonic() + 30
        while (written < 20 or refused < 20) and time.monotonic() < limit:
            try:
                write_file(report / "verdict.json", b"{}", below=shared)
                written += 1
            except OSError as error:
                refused += error.errno == errno.ELOOP
            with contextlib.suppress(OSError):
                remove_file(report / "notes", below=shared)
    finally:
        attacker.kill()
        attacker.communicate()
    assert written >= 20
    assert refused >= 20


def test_a_made_folder_that_was_exchanged_is_not_removed(tmp_path: Path, untouched: Path) -> None:
    made = MadeFolder.temporary("mine-", tmp_path)
    made.path.rename(tmp_path / "aside")
    untouched.rename(made.path)
    try:
        made.remove()
    finally:
        made.path.rename(untouched)
    made.path.symlink_to(untouched)
    made.remove()
    assert made.path.is_symlink()


def test_a_made_folder_goes_with_its_links_and_without_what_they_lead_to(
    tmp_path: Path, untouched: Path
) -> None:
    with MadeFolder.temporary("mine-", tmp_path) as folder:
        (folder / "deep" / "er").mkdir(parents=True)
        (folder / "deep" / "er" / "file").write_text("")
        (folder / "deep" / "link").symlink_to(untouched)
        (folder / "hard").hardlink_to(untouched / "notes")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


@pytest.mark.parametrize(
    "act",
    [
        lambda path, below: write_file(path, b"", below=below),
        lambda path, below: remove_file(path, below=below),
        lambda path, below: make_folder(path, below=below),
        lambda path, below: rename(path, path.with_name("b"), below=below),
        lambda path, below: open_to_append(path, below=below),
    ],
    ids=["write", "remove", "make", "rename", "append"],
)
def test_no_path_leads_out_of_the_boundary(
    act: Callable[[Path, Path], object], tmp_path: Path, untouched: Path
) -> None:
    below = tmp_path / "run"
    below.mkdir()
    (below / "link").symlink_to(untouched)
    for path in (below / "link" / "notes", below / "x" / ".." / ".." / "victim" / "notes"):
        with pytest.raises(OSError, match=r"link|leads out"):
            act(path, below)
    with pytest.raises(ValueError, match="subpath"):
        act(untouched / "notes", below)


# -- files that the user names -----------------------------------------------------------------


def test_a_named_file_may_be_a_link_of_the_users(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    with named_file(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    assert stat.S_IMODE(real.stat().st_mode) == 0o640


def test_a_named_device_is_written_to_and_stays() -> None:
    with named_file(Path("/dev/null")) as file:
        file.write(b"gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
