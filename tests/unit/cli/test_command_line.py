"""Command lines: what a command's function gets, errors, and the spellings of two releases."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from haiprof.base.errors import UsageError
from haiprof.cli.app import command_parameters
from haiprof.cli.command_line import argument, option, own_words, parameters_of, read_arguments
from haiprof.cli.names import COMMANDS, resolve
from tests.commands import Run


def example(
    traces: Path = argument("TRACES", "Traces."),
    sql: str | None = argument("SQL", "A question."),
    rank: int | None = option("--rank R", "One.", low=0),
    output: Path | None = option("-o --output FILE", "Where."),
    env: list[str] | None = option("--env NAME", "Several."),
    peak: str | None = option("--peak TEXT", "From outside.", env="A_PEAK"),
    steps: int = option("--trace-steps N", "Renamed.", 5, old=("--steps",)),
    pictures: bool = option("--pictures/--no-pictures", "A pair.", True),
    as_json: bool = option("--json", "A switch."),
) -> None:
    """An example."""


def read(line: str) -> dict[str, Any]:
    return read_arguments("example", parameters_of(example), shlex.split(line))


@pytest.mark.parametrize(("line", "expected"), [
    ("a", {}),
    ("a 'select 1'", {"sql": "select 1"}),
    ("--rank 3 a", {"rank": 3}),
    ("a --rank=3", {"rank": 3}),
    ("a -o f", {"output": Path("f")}),
    ("a -of", {"output": Path("f")}),
    ("a --env A --env B=1", {"env": ["A", "B=1"]}),
    ("a --steps 7", {"steps": 7}),
    ("a --trace-steps 7", {"steps": 7}),
    ("a --no-pictures --json", {"pictures": False, "as_json": True}),
    ("a -- --json", {"sql": "--json"}),
    ("a -", {"sql": "-"}),
])  # fmt: skip
def test_command_line_is_read(line: str, expected: dict[str, Any]) -> None:
    defaults = {"sql": None, "rank": None, "output": None, "env": None, "peak": None, "steps": 5,
                "pictures": True, "as_json": False}  # fmt: skip
    assert read(line) == {"traces": Path("a"), **defaults, **expected}


def takes_a_command(
    words: list[str] = argument("COMMAND", "A job.", is_command=True),
    steps: int = option("--steps N", "Of it.", 5),
    as_json: bool = option("--json", "A switch."),
) -> None:
    """An example."""


@pytest.mark.parametrize(("line", "words", "own"), [
    ("train.py --json --steps 3", "train.py --json --steps 3", []),
    ("--steps 7 --json train.py --help", "train.py --help", ["--steps", "7", "--json"]),
    ("--steps=7 train.py -- --lr 1", "train.py -- --lr 1", ["--steps=7"]),
    ("--json -- -m pkg.train", "-m pkg.train", ["--json"]),
])  # fmt: skip
def test_what_follows_first_word_of_job_is_the_jobs(line: str, words: str, own: list[str]) -> None:
    parameters = parameters_of(takes_a_command)
    found = read_arguments("example", parameters, line.split())
    assert found["words"] == words.split()
    assert (found["steps"] == 7) is any("7" in word for word in own)
    assert found["as_json"] is ("--json" in own)
    assert own_words(parameters, line.split()) == own


def test_option_is_taken_from_its_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_PEAK", "bf16=1")
    assert read("a")["peak"] == "bf16=1"
    assert read("a --peak x")["peak"] == "x"


@pytest.mark.parametrize(("line", "said", "hint"), [
    ("", "example: TRACES is missing", "example --help"),
    ("a b c", "unexpected argument 'c'", "--help"),
    ("a --jsn", "no option '--jsn'", "did you mean --json?"),
    ("a --nope", "no option '--nope'", "example --help"),
    ("a --json=1", "--json takes no value", ""),
    ("a --rank", "--rank needs a value", ""),
    ("a --rank x", "--rank: expected a whole number, got 'x'", ""),
    ("a --rank -1", "--rank -1: expected 0 or more", ""),
])  # fmt: skip
def test_command_line_that_does_not_fit_is_one_clear_error(line: str, said: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        read(line)
    assert said in str(caught.value)
    assert hint in caught.value.hint


def test_a_mistyped_second_word_is_no_argument(run: Run) -> None:
    refused = run("verdict", "line", "a-run", status=2)
    assert "did you mean haiprof verdict lines?" in refused.err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_found_by_both_names(name: str) -> None:
    assert resolve([name, "x"]) is not None
    words = COMMANDS[name].words.split()
    others = {"diagnose": "verdict", "fetch": "put"}
    assert resolve([*words, "x"]) == (others.get(name, name), ["x"])
    assert all(each.name.isidentifier() for each in command_parameters(name))


@pytest.mark.parametrize(("line", "name", "rest"), [
    ("verdict RUN --all", "verdict", "RUN --all"),
    ("verdict rank RUN 3", "rank", "RUN 3"),
    ("report RUN --serve --port 1", "view", "RUN --port 1"),
    ("ls --live train.py", "top", "train.py"),
    ("ls --running", "ps", ""),
    ("ls --live --once", "top", "--once"),
    ("compare a b --traces", "trace-diff", "a b"),
    ("export RUN --to csv -o f", "export", "--to csv RUN -o f"),
    ("export --to=chakra RUN", "chakra", "RUN"),
    ("export RUN --format csv", "export", "RUN --format csv"),
    ("copy RUN s3://b/runs", "put", "RUN s3://b/runs"),
    ("copy s3://b/runs", "put", "s3://b/runs"),
    ("copy s3://b/runs DIR", "fetch", "s3://b/runs -o DIR"),
    ("copy s3://b/runs -o DIR", "fetch", "s3://b/runs -o DIR"),
    ("trace memory x.json", "memory-timeline", "x.json"),
])  # fmt: skip
def test_new_spelling_means_the_command(line: str, name: str, rest: str) -> None:
    assert resolve(line.split()) == (name, rest.split())


@pytest.mark.parametrize(
    "line", ["trace", "trace train.py", "train.py", "run x", "trace --steps 3"]
)
def test_other_words_are_no_command(line: str) -> None:
    assert resolve(line.split()) is None


def test_help_texts_are_as_recorded() -> None:
    """docs/help.txt has every help text: `scripts/generate-docs` writes it."""
    root = Path(__file__).parents[3]
    script = root / "scripts" / "generate-docs"
    found: dict[str, Any] = {"__file__": str(script), "__name__": "generate_docs"}
    exec(compile(script.read_text(), str(script), "exec"), found)
    for path, text in found["help_documents"]().items():
        assert path.read_text() == text, f"scripts/generate-docs writes {os.path.relpath(path)}"


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("linse", "lines?"),
        ("overveiw", "overview?"),
        ("rnak", "rank?"),
        ("cifar-of-may", "ls --live"),
    ],
)
def test_a_mistyped_second_word_alone_is_no_name_of_a_job(
    word: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    refused = run("verdict", word, status=3)
    assert hint in refused.err
    assert ("did you mean haiprof verdict" in refused.err) is hint.endswith("?")
