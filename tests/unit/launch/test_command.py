"""The command line: what haiprof takes, and what it leaves to the script."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from haiprof.base.errors import UsageError
from haiprof.base.options import (
    Options,
    merge_options,
    options_from_environment,
    options_from_files,
    options_from_pyproject,
)
from haiprof.launch.command import parse_command_line


@pytest.mark.parametrize(
    ("words", "command", "options"),
    [
        ("train.py", "PY train.py", {}),
        ("train.py --time 120", "PY train.py", {"time_s": 120.0}),
        ("--time 120 train.py --lr 0.1", "PY train.py --lr 0.1", {"time_s": 120.0}),
        ("-m pkg.train --time=5 x", "PY -m pkg.train x", {"time_s": 5.0}),
        ("torchrun --nproc-per-node 2 train.py", "TORCHRUN --nproc-per-node 2 train.py", {}),
        ("python -u train.py", "python -u train.py", {}),
        ("-- any --time 5", "any --time 5", {}),
        ("--time 1 -- -m x", "PY -m x", {"time_s": 1.0}),
        ("train.py --time 1 -- --time 7", "PY train.py --time 7", {"time_s": 1.0}),
        *((f"train.py {option} 7", f"PY train.py {option} 7", {})
          for option in ("--quiet", "--tensorboard", "--run-id", "--model", "-n")),
        ("train.py --options lr=3 --options profile.time=4", "PY train.py --options lr=3",
         {"time_s": 4.0}),
        ("--options profile.name=a=b=c train.py", "PY train.py", {"name": "a=b=c"}),
        ("echo --name x", "echo --name x", {}),  # a program whose text is not known
        ("-m json.tool --name x", "PY -m json.tool --name x", {}),
        ("torchrun absent.py --name x", "TORCHRUN absent.py --name x", {}),
    ],
)  # fmt: skip
def test_command_line_is_split_as_documented(
    words: str, command: str, options: dict[str, object]
) -> None:
    line = parse_command_line(words.split())
    beside = Path(sys.executable).parent / "torchrun"
    torchrun = str(beside) if beside.exists() and not shutil.which("torchrun") else "torchrun"
    places = {"PY": sys.executable, "TORCHRUN": torchrun}
    assert line.command == [places.get(word, word) for word in command.split()]
    assert line.options == options


def test_words_of_a_shell_are_left_and_taken_ones_are_reported() -> None:
    shell = ["bash", "-c", "python t.py --time 3"]
    assert parse_command_line(shell).command == shell
    line = parse_command_line(["--warmup=3", "train.py", "--lr", "1", "--time", "9"])
    assert line.taken == ["--warmup=3", "--time", "9"]


def test_published_order_is_refused_with_the_right_line() -> None:
    words = ["train.py", "--", "--nodes", "8", "--options", "profile.time=120"]
    with pytest.raises(UsageError) as caught:
        parse_command_line(words)
    assert "submit train.py --nodes 8" in caught.value.hint
    assert "--options profile.time=120" in caught.value.hint
    assert parse_command_line(["--", *words]).command[1:] == words


@pytest.mark.parametrize(
    ("words", "part", "hint"),
    [
        ("", "no command", "haiprof train.py"),
        ("--time", "needs a value", ""),
        ("--nonsense train.py", "--nonsense", "--help lists the options"),
        ("-c print(1)", "no option '-c'", "haiprof python -c"),
        ("train.py --time fast", "'fast'", "put -- before the script's arguments"),
        ("--options profile.nothing=1 train.py", "nothing", ""),
        ("--interval.gpux 1 train.py", "gpux", ""),
        ("-m", "module", ""),
        ("--local-dir s3://bucket/runs train.py", "an address, where a folder", ""),
        ("--time -1 train.py", "time", ""),
        ("--time nan train.py", "time", ""),
    ],
)
def test_bad_command_line_is_one_clear_error(words: str, part: str, hint: str) -> None:
    with pytest.raises(UsageError, match=part) as caught:
        merge_options(parse_command_line(words.split()).options)
    assert hint in caught.value.hint


def test_run_for_an_address_is_recorded_into_a_folder_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    site = {"log_dir": Path("/logs")}
    words = parse_command_line(["--log-dir", "s3://bucket/runs", "train.py"]).options
    remote = merge_options(site, words)
    assert (remote.address, remote.log_dir) == ("s3://bucket/runs", Path("/state/haiprof/runs"))
    chosen = merge_options(words, {"local_dir": Path("/scratch")})
    assert (chosen.address, chosen.log_dir) == ("s3://bucket/runs", Path("/scratch"))
    local = merge_options(words, site, {"local_dir": Path("/scratch")})
    assert (local.address, local.log_dir) == ("", Path("/logs"))


def script(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "train.py").write_text(text)
    monkeypatch.chdir(folder)


@pytest.mark.parametrize(
    "words", [["train.py"], ["torchrun", "train.py"], ["-m", "train"], ["python", "-m", "train"]]
)
def test_time_that_the_script_has_too_is_refused_with_both_spellings(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path, "parser.add_argument('--time')", monkeypatch)
    with pytest.raises(UsageError) as caught:
        parse_command_line([*words, "--time", "3"])
    assert "haiprof --time 3 " in str(caught.value)
    assert "haiprof -- " in str(caught.value)
    line = parse_command_line(["--time", "3", *words, "--time", "9"])
    assert (line.options, line.command[-2:]) == ({"time_s": 3.0}, ["--time", "9"])
    assert parse_command_line(["--", *words, "--time", "9"]).command[-2:] == ["--time", "9"]


@pytest.mark.parametrize(
    ("text", "words", "options", "left", "warnings"),
    [
        ("parser.add_argument('--time-limit')", "--time 3", {"time_s": 3.0}, "", []),
        ("p.add_argument('--log-dir')", "--log-dir other", {}, "--log-dir other", []),
        ("@dataclass\nclass A:\n    log_dir: str = 'x'\n", "--log-dir other", {},
         "--log-dir other", []),
        ("import torch", "--warmup 5 --trace", {"warmup_s": 5.0, "trace": True}, "",
         ["haiprof --warmup 5 train.py", "haiprof -- train.py --trace"]),
    ],
)  # fmt: skip
def test_text_of_the_script_tells_whose_an_option_is(
    text: str, words: str, options: dict[str, object], left: str, warnings: list[str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    script(tmp_path, text, monkeypatch)
    line = parse_command_line(["train.py", *words.split()])
    assert (line.options, line.command[2:]) == (options, left.split())
    assert [part in said for part, said in zip(warnings, line.warnings, strict=True)] == (
        [True] * len(warnings)
    )


@pytest.mark.parametrize("program", [[], ["--nproc-per-node", "2"]])
def test_options_of_a_script_stay_its_own_below_a_program_with_a_path(
    program: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of /venv/bin/torchrun says nothing of the options of what it starts."""
    script(tmp_path, "parser.add_argument('--warmup')", monkeypatch)
    (tmp_path / "torchrun").write_text("#!/usr/bin/python\nfrom torch.distributed import run\n")
    words = [str(tmp_path / "torchrun"), *program, "train.py", "--warmup", "5"]
    assert parse_command_line(words).command == words
    script(tmp_path, "import options", monkeypatch)
    line = parse_command_line(words)
    assert line.options == {"warmup_s": 5.0}
    (said,) = line.warnings
    begun = f"haiprof --warmup 5 torchrun {'... ' * bool(program)}train.py"
    assert begun in said


def test_published_environment_keeps_its_meaning() -> None:
    values = options_from_environment({
        "HAIPROF_TIME": "120", "HAIPROF_WARMUP": "5", "HAIPROF_TRACE": "0",
        "HAIPROF_RECORDERS": "basic,gpu", "HAIPROF_GPU_INTERVAL": "2",
        "MARSV2_LOG_DIR": "/marsv2/log/7",
    })  # fmt: skip
    options = merge_options(values)
    assert options == Options(
        time_s=120,
        warmup_s=5,
        recorder=("phases", "host", "process", "gpu"),
        interval_s={"gpu": 2.0},
        log_dir=Path("/marsv2/log/7/haiprof"),
    )


def test_command_line_wins_over_environment_over_pyproject(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text(
        '[tool.haiprof]\ntime = 1\nwarmup = 1\nname = "p"\ninterval = {host = 3}\n'
        'recorder = ["host"]\n'
    )
    options = merge_options(
        options_from_pyproject(project),
        options_from_environment({"HAIPROF_TIME": "2", "HAIPROF_WARMUP": "2"}),
        parse_command_line(["--time", "3", "train.py"]).options,
    )
    assert (options.time_s, options.warmup_s, options.name) == (3.0, 2.0, "p")
    assert options.interval("host") == 3.0
    assert options.recorder == ("host",)


def test_pyproject_with_an_unknown_option_names_the_file(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text("[tool.haiprof]\ntiem = 1\n")
    with pytest.raises(UsageError, match=r"pyproject\.toml") as caught:
        options_from_pyproject(project)
    assert caught.value.hint == "did you mean time?"


def test_options_of_the_machine_stand_below_all_others(tmp_path: Path) -> None:
    site, project = tmp_path / "config.toml", tmp_path / "pyproject.toml"
    site.write_text('admin-group = "hpc"\ntime = 1\nlog-dir = "/shared"\n')
    project.write_text("[tool.haiprof]\ntime = 2\n")
    options = merge_options(options_from_files(project, site))
    assert (options.admin_group, options.time_s, options.log_dir) == ("hpc", 2.0, Path("/shared"))
    assert options_from_files(project, tmp_path / "none") == {"time_s": 2.0}


def test_options_of_the_machine_that_others_may_write_are_refused(tmp_path: Path) -> None:
    site = tmp_path / "config.toml"
    site.write_text('notify = "sh -c theirs"\n')
    site.chmod(0o666)
    with pytest.raises(UsageError, match="others may write to it"):
        options_from_files(tmp_path / "pyproject.toml", site)
