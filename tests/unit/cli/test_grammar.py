"""One grammar: every command takes nothing, a log directory, a run or traces."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from haiprof.__main__ import is_mistyped
from haiprof.__main__ import main as haiprof
from haiprof.base.options import OPTIONS
from haiprof.cli import main
from haiprof.cli.app import command_function
from haiprof.cli.launch_help import SHELLS, completion_script
from haiprof.cli.names import COMMANDS, GROUPS, OTHER_NAMES
from tests.commands import Run
from tests.unit.cli.test_kept_answers import STEPS, ended_run

TRACE = {
    "schemaVersion": 1,
    "distributedInfo": {"rank": 0, "world_size": 1},
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 5.0}
    ],
}


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log directory with a run that has a trace; the working directory is beside it."""
    run = ended_run(tmp_path / "logs" / "job-1")
    run.traces.mkdir()
    (run.traces / "rank0.json").write_text(json.dumps(TRACE))
    monkeypatch.chdir(tmp_path)
    return run.root.parent


@pytest.mark.parametrize("command", ["trace-report", "trace-check", "query"])
@pytest.mark.parametrize("way", ["default", "log_dir", "named", "run"])
def test_trace_commands_take_what_all_commands_take(
    logs: Path,
    command: str,
    way: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if way == "default":
        monkeypatch.setenv("HAIPROF_LOG_DIR", str(logs))
    words = {"log_dir": ["--log-dir", str(logs)], "named": [str(logs)], "run": [f"{logs}/job-1"]}
    sql = ["select count(*) as n from steps"] if command == "query" else []
    main([command, *words.get(way, []), *sql, "--json"])
    output = capsys.readouterr()
    assert "error" not in output.err
    assert isinstance(json.loads(output.out), dict)


@pytest.mark.parametrize(
    "words", [["0", "{}"], ["{}", "0"], ["{}", "--rank", "0"], ["--log-dir", "{}"], ["{}"]]
)
def test_rank_takes_run_and_rank_in_either_order(logs: Path, words: list[str], run: Run) -> None:
    assert run("rank", *(word.format(logs) for word in words), "--json").data["step_count"] == STEPS


def test_list_takes_log_dir(logs: Path, run: Run) -> None:
    assert len(run("list", "--log-dir", logs, "--json").data["runs"]) == 1


def test_run_without_traces_says_how_to_record_some(logs: Path, run: Run) -> None:
    shutil.rmtree(logs / "job-1" / "traces")
    ran = run("trace-report", logs, status=4)
    assert "haiprof --trace" in ran.err


def test_every_command_is_in_one_group_and_has_two_examples() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted((*grouped, *OTHER_NAMES)) == sorted(COMMANDS)
    for name in COMMANDS:
        text = command_function(name).__doc__ or ""
        assert text.count("haiprof ") >= 2, name


SHOWS_NO_DATA = {
    "report", "view", "tensorboard", "perfetto", "export", "kineto-agent", "mcp", "skill",
    "wandb", "mlflow",
}  # fmt: skip
"""Commands that write files or serve pages: nothing that could be JSON."""
READS_TRACES = set(GROUPS["Read traces of torch.profiler"]) - {
    "trace-now", "kineto-agent", "dyno", "flight-recorder",
} | {
    "perfetto", "merge", "link", "chakra",
}  # fmt: skip
ASKS_ONE_RANK = {"rank", "lines", "trace-report", "memory-timeline", "critical-path", "perfetto",
                 "link", "chakra"}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_names_the_common_options(
    name: str, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = run(name, "--help").out.split()
    assert "--log-dir" in words
    assert ("--json" in words) is (name not in SHOWS_NO_DATA)
    assert ("--window" in words) is (name in READS_TRACES)
    assert ("--rank" in words) is (name in ASKS_ONE_RANK)


def test_help_fits_on_a_screen_and_the_rest_is_one_word_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert haiprof(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 36
    assert "haiprof --help-all" in text
    assert haiprof(["--help-all"]) == 0
    whole = capsys.readouterr().out
    shown = COMMANDS.keys() - set(OTHER_NAMES)
    assert all(f"  {COMMANDS[name].words}" in whole for name in shown)
    assert all(f"--{option.name}" in whole for option in OPTIONS)


def test_trace_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert haiprof(["trace"]) == 0
    assert "critical-path" in capsys.readouterr().out
    assert haiprof(["trace", "reprot"]) == 127
    assert "did you mean: haiprof trace report" in capsys.readouterr().err


def test_old_name_and_new_name_say_the_same(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for old, new in (["rank"], ["verdict", "rank"]), (["list"], ["ls"]):
        assert haiprof([*old, "--log-dir", str(logs), "--json"]) == 0
        first = capsys.readouterr().out
        assert haiprof([*new, "--log-dir", str(logs), "--json"]) == 0
        assert capsys.readouterr().out == first


def test_help_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert haiprof(["help", "verdict", "rank"]) == 0
    assert "haiprof verdict rank" in capsys.readouterr().out
    assert haiprof(["help"]) == 0
    assert "Record: put haiprof in front" in capsys.readouterr().out
    assert haiprof([]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 10
    assert haiprof(["help", "foo"]) == 127
    assert capsys.readouterr().err.splitlines()[0].endswith("unknown command 'foo'")
    assert haiprof(["foo"]) == 127
    assert "(and no such program or file)" in capsys.readouterr().err
    assert haiprof(["completion", "tcsh"]) == 2
    assert "bash, zsh, fish" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "meant"), [
    (["verdct"], "haiprof verdict"),
    (["overvew", "logs"], "haiprof verdict overview"),
    (["logs"], "haiprof verdict logs"),
    (["--tiem", "5", "train.py"], "--time"),
    (["verdict", "--jsn"], "--json"),
    (["trian.py"], "haiprof train.py"),
    (["torchrn"], "haiprof torchrun"),
])  # fmt: skip
def test_mistyped_word_is_told_and_starts_nothing(
    logs: Path, words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (logs.parent / "train.py").write_text("")
    assert haiprof(words) in (2, 127)
    assert meant in capsys.readouterr().err
    assert not (logs.parent / "haiprof-logs").exists()


def test_program_of_an_environment_that_is_not_activated_is_no_mistyped_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `/env/bin/haiprof torchrun`: the program stands beside Python, and not on PATH."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", "")
    assert is_mistyped("torchrun")
    (tmp_path / "torchrun").write_text("")
    assert not is_mistyped("torchrun")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fits_the_terminal(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for words in (["--help"], ["verdict", "--help"], ["submit", "--help"], ["copy", "--help"]):
        assert haiprof(words) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= width
        assert "<bool>" not in text
        assert "haiprof" in text


@pytest.mark.parametrize("shell", SHELLS)
def test_completion_names_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert haiprof(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(w in script for c in COMMANDS.values() for w in c.words.split() if w[0] != "-")
    assert script == completion_script(shell)


def test_only_a_file_that_is_really_near_is_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "j9_thread.py").touch()
    for word in ("trian.py", "trian"):
        assert haiprof([word]) != 0
        assert "thread" not in capsys.readouterr().err
    (tmp_path / "train.py").touch()
    for word in ("trian.py", "trian"):
        assert haiprof([word]) != 0
        assert "haiprof train.py" in capsys.readouterr().err
    assert haiprof(["verdcit"]) == 127
    assert "did you mean: haiprof verdict" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "hint"), [
    ("--log-dir logs verdict", "haiprof verdict --log-dir logs"),
    ("--log-dir=logs verdict rank 0", "haiprof verdict rank 0 --log-dir=logs"),
    ("--log-dir logs --quiet verdict", "haiprof verdict --help"),
    ("--log-dir logs no-such-program", ""),
])  # fmt: skip
def test_a_command_behind_options_is_told_where_it_stands(
    line: str, hint: str, logs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert haiprof(line.split()) == 127
    *_, last = capsys.readouterr().err.splitlines()
    assert last.endswith(f"a command comes before its options: {hint}") is bool(hint)
    if "--log-dir" in hint:
        assert haiprof(hint.split()[1:]) == 0
