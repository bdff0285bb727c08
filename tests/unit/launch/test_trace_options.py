"""Which steps are traced: the options as users write them, and what cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.errors import UsageError
from haiprof.base.options import Options, merge_options, options_from_environment
from haiprof.cli.launch_help import full_help_text
from haiprof.launch.command import parse_command_line
from haiprof.launch.run_directories import create_run


def window(*words: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    """What the hook is told for a command line."""
    given = parse_command_line([*words, "t.py"]).options
    trace: Any = merge_options(options_from_environment(environ or {}), given).boot_json()["trace"]
    return trace or {}


def test_hook_is_told_nothing_without_tracing(tmp_path: Path) -> None:
    run, _, _ = create_run(Options(log_dir=tmp_path), command=["t"], name="t", environ={})
    assert json.loads(run.boot_config.read_text())["trace"] is None
    assert not run.traces.exists()


def test_hook_finds_the_whole_window_in_its_config(tmp_path: Path) -> None:
    options = Options(log_dir=tmp_path, steps=(100, 105), trace_stacks=True)
    run, manifest, _ = create_run(options, command=["t"], name="t", environ={})
    assert json.loads(run.boot_config.read_text())["trace"] == {
        "steps": [100, 105], "count": 5, "time_s": 0.0, "warmup_s": 0.0, "stacks": True,
        "shapes": False, "memory": False, "flops": False, "modules": False, "sync": False,
        "lines": False, "execution_trace": False, "repeat": 1, "repeat_every": 50,
        "keep_slow": False, "slow_ratio": 1.5, "slow_cost": 0.05, "limit_bytes": 1_000_000_000,
    }  # fmt: skip
    assert run.trace_parts.is_dir()
    assert manifest.options["steps"] == "100:105"
    assert manifest.options["trace"] is True
    assert manifest.options["trace_stacks"] is True


def test_explain_is_two_steps_with_the_lines_of_their_operators(tmp_path: Path) -> None:
    options = Options(log_dir=tmp_path, explain=True, time_s=60.0)
    run, manifest, _ = create_run(options, command=["t"], name="t", environ={})
    window = json.loads(run.boot_config.read_text())["trace"]
    assert (window["lines"], window["count"], window["time_s"]) == (True, 2, 0.0)
    assert manifest.options["explain"] is True


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--trace"], {"steps": None, "count": 5, "time_s": 0.0}),
        (["--steps", "100:105"], {"steps": [100, 105], "count": 5}),
        (["--steps", ":3"], {"steps": [0, 3], "count": 3}),
        (["--trace", "--trace-steps", "7"], {"steps": None, "count": 7, "repeat_every": 70}),
        (
            ["--trace", "--warmup", "120", "--time", "15"],
            {"time_s": 15.0, "warmup_s": 120.0, "repeat_every": None},
        ),
        (["--trace", "--time", "600", "--trace-steps", "5"], {"time_s": 0.0, "count": 5}),
        (["--execution-trace"], {"execution_trace": True, "count": 5}),
        (["--keep-slow", "--slow-ratio", "3"], {"keep_slow": True, "slow_ratio": 3.0}),
        (["--keep-slow", "--time", "600"], {"time_s": 0.0}),
        (["--trace", "--repeat", "3", "--repeat-every", "9"], {"repeat": 3, "repeat_every": 9}),
        (["--trace", "--trace-limit", "20"], {"limit_bytes": 20_000_000}),
        (["--options", "profile.trace=1"], {"count": 5}),
        (["--options", "profile.trace=0"], {}),
    ],
)
def test_words_become_the_window_that_is_documented(
    words: list[str], expected: dict[str, Any]
) -> None:
    found = window(*words)
    assert bool(found) == bool(expected)
    assert {key: found[key] for key in expected} == expected


def test_published_names_of_tracing_keep_their_meaning() -> None:
    environ = {"HAIPROF_TRACE": "1", "HAIPROF_WARMUP": "120", "HAIPROF_TIME": "15"}
    dotted = [f"profile.{name}" for name in ("trace=1", "warmup=120", "time=15")]
    words = [word for text in dotted for word in ("--options", text)]
    expected = window("--trace", "--warmup", "120", "--time", "15")
    assert window(environ=environ) == expected
    assert window(*words) == expected


def test_script_keeps_its_own_steps_option() -> None:
    line = parse_command_line(["--trace", "train.py", "--steps", "100", "--repeat", "3"])
    assert line.command == [sys.executable, "train.py", "--steps", "100", "--repeat", "3"]
    assert line.options == {"trace": True}


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--steps", "5"], "100:105"),
        (["--steps", "5:5"], "no step"),
        (["--steps", "9:5"], "no step"),
        (["--steps", "-3:5"], "100:105"),
        (["--steps", "5:"], "100:105"),
        (["--steps", "1:2:3"], "100:105"),
        (["--steps", "0:10001"], "10001 steps"),
        (["--trace", "--trace-steps", "0"], "0 steps"),
        (["--trace", "--trace-steps", "10001"], "10000"),
        (["--steps", "1:5", "--time", "3"], "--time"),
        (["--steps", "1:5", "--warmup", "3"], "--warmup"),
        (["--steps", "1:5", "--trace-steps", "3"], "--trace-steps"),
        (["--steps", "1:5", "--keep-slow"], "--keep-slow"),
        (["--steps", "1:5", "--repeat-every", "3"], "shorter"),
        (["--repeat", "3"], "--repeat says"),
        (["--repeat-every", "30"], "--repeat-every says"),
        (["--repeat", "4"], "--repeat says"),
        (["--trace", "--repeat", "0"], "repeat must"),
        (["--trace", "--repeat-every", "0"], "repeat-every must"),
        (["--keep-slow", "--slow-ratio", "1"], "slow-ratio"),
        (["--keep-slow", "--slow-ratio", "nan"], "slow-ratio"),
        (["--keep-slow", "--slow-cost", "0"], "slow-cost"),
        (["--trace", "--trace-limit", "0"], "trace-limit"),
        (["--trace", "--recorder", "host"], "phases"),
    ],
)
def test_windows_that_cannot_be_are_refused(words: list[str], part: str) -> None:
    with pytest.raises(UsageError, match=part):
        window(*words)


@pytest.mark.parametrize("react", ["trace", "both"])
def test_what_a_reaction_is_to_trace_can_be_said_without_a_window(react: str) -> None:
    words = ["--react", react, "--trace-stacks", "--trace-shapes", "--trace-steps", "3"]
    assert window(*words) == {}
    options = parse_command_line([*words, "t.py"]).options
    merged = merge_options({}, options)
    assert merged.trace_now_words() == ["--stacks", "--shapes"]


@pytest.mark.parametrize("react", ["snapshot", "off", "both --react-times 0"])
def test_options_that_say_how_to_trace_imply_a_window(react: str) -> None:
    found = window("--react", *react.split(), "--trace-stacks", "--trace-steps", "3")
    assert (found["stacks"], found["count"]) == (True, 3)


def test_windows_of_no_trace_are_refused() -> None:
    with pytest.raises(UsageError, match="says how to trace"):
        window("--react", "both", "--repeat", "3")


def test_help_explains_tracing_in_a_section_of_its_own() -> None:
    text = full_help_text()
    before, _, tracing = text.partition("Tracing:")
    assert "--steps A:B" in tracing
    assert "--execution-trace" in tracing
    assert "--trace-limit" not in before
    assert "--time SECONDS" in before
