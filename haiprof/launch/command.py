"""Splits a command line into haiprof's options and the job's command."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from haiprof.base.errors import UsageError
from haiprof.base.options import (
    OPTIONS,
    is_option,
    option_spec,
    parse_dotted,
    parse_value,
    safe_name,
)
from haiprof.base.trace_options import OptionSpec
from haiprof.run_format.secrets import mask_command

AFTER_SCRIPT = ("time",)  # options that may also stand after the script, as in the published tool
_FORMERLY_AFTER = ("warmup", "trace", "recorder", "log-dir", "name")
"""They were taken after the script until version 0.1; for one release with a warning."""
_SCRIPT_BYTES = 1 << 20
_NEAR = 0.7  # how alike names must be: two letters exchanged in a name of five are 0.8
_OWN_HINT = "if this is the script's own option, put -- before the script's arguments"


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A parsed command line."""

    command: list[str]  # the job's command, ready to be executed
    options: dict[str, object]  # haiprof's options by field name
    taken: list[str]  # the words that haiprof took for itself, to show them
    warnings: list[str]  # what the user must know about words after the script, even with `--quiet`
    name: str  # the default name of the job


def parse_command_line(words: Sequence[str]) -> CommandLine:
    """Takes haiprof's options out of a command line."""
    # Options stand before the script; after it only `--time` and `--options profile.NAME=VALUE` are
    # haiprof's, as in the published tool. From `--` on everything is the script's, untouched.
    taker = _OptionParser(list(words))
    taker.leading()
    if not taker.left:
        raise UsageError("no command to run", hint="haiprof train.py, or haiprof --help")
    program = taker.take_program()
    arguments = taker.trailing(program)
    return CommandLine(
        command=_executable(program) + arguments, options=taker.options, taken=taker.taken,
        warnings=taker.warnings, name=_job_name([*program, *arguments]),
    )  # fmt: skip


def _near_option(word: str) -> str:
    import difflib

    if word == "-c":
        return "haiprof python -c CODE"
    name = word.lstrip("-").partition("=")[0]
    near = difflib.get_close_matches(name, [spec.name for spec in OPTIONS], n=1)
    return f"did you mean --{near[0]}?" if near else "haiprof --help lists the options"


@dataclass
class _OptionParser:
    """Walks over the words once, from the left."""

    left: list[str]
    options: dict[str, object] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    ended: bool = False

    def leading(self) -> None:
        while self.left and self.left[0].startswith("-") and self.left[0] != "-m":
            if self.left[0] == "--":
                self.left.pop(0)
                self.ended = True
                return
            if not self._take():
                raise UsageError(f"no option {self.left[0]!r}", hint=_near_option(self.left[0]))

    def take_program(self) -> list[str]:
        count = 2 if self.left[0] == "-m" else 1
        if len(self.left) < count:
            raise UsageError("-m needs a module name")
        program, self.left = self.left[:count], self.left[count:]
        return program

    def trailing(self, program: Sequence[str]) -> list[str]:
        script, text = _script([*program, *self.left])
        before = set(self.options)
        arguments: list[str] = []
        while self.left and not self.ended:
            if self.left[0] == "--":
                self.left.pop(0)
                self.ended = True
                _check_published_order(program, self.left)
            elif not self._is_ours(before, script, text) or not self._take(hint=_OWN_HINT):
                arguments.append(self.left.pop(0))
        return arguments + self.left

    def _is_ours(self, before: set[str], script: str, text: str | None) -> bool:
        """Whether the word at the front is haiprof's: after a script, whose text may be known."""
        # `before` has the fields that options before the script have set.
        name, equals, value = self.left[0][2:].partition("=")
        if not self.left[0].startswith("--"):
            return False
        if name == "options":
            following = self.left[1] if len(self.left) > 1 else ""
            return (value if equals else following).startswith("profile.")
        spec = option_spec(name)
        if spec is None or spec.field in before:
            return False
        has_value = not equals and (spec.metavar or self.left[1:2] in (["0"], ["1"]))
        words = shlex.join(mask_command(self.left[: 2 if has_value else 1]))
        first, own = f"haiprof {words} {script}", f"{script} {words}"
        if spec.name in AFTER_SCRIPT:
            if text is not None and re.search(rf"--{name}(?![\w-])", text):
                raise UsageError(
                    f"--{name} is an option of haiprof and of {script}: write {first} if it is "
                    f"for haiprof, haiprof -- {own} if it is for the script"
                )
            if text is None:
                gone = f"haiprof took {words}, and {script} does not get it"
                self.warnings.append(f"{gone}; haiprof -- {own} passes it on")
            return True
        if spec.name not in _FORMERLY_AFTER or text is None or _defines(text, spec.name):
            return False
        self.warnings.append(
            f"warning: haiprof took {words}, and the script does not get it; the next "
            f"release leaves it to the script: write {first}, or haiprof -- {own} for the script"
        )
        return True

    def _take(self, hint: str = "") -> bool:
        word = self.left[0]
        name, equals, value = word[2:].partition("=")
        if not word.startswith("--") or not (name == "options" or is_option(name)):
            return False
        count = 1
        if not equals:
            count, value = self._value(word, option_spec(name), hint)
        try:
            key, parsed = (
                parse_dotted(value) if name == "options"
                else parse_value(name, value, origin=f"--{name}")
            )  # fmt: skip
        except UsageError as error:
            raise UsageError(str(error), hint=error.hint or hint) from None
        self.options[key] = parsed
        self.taken += self.left[:count]
        self.left = self.left[count:]
        return True

    def _value(self, word: str, spec: OptionSpec | None, hint: str) -> tuple[int, str]:
        """The value in the next word; a switch has none (but `--trace 1` is understood)."""
        following = self.left[1] if len(self.left) > 1 else None
        if spec is not None and not spec.metavar:
            return (2, following) if following in ("0", "1") else (1, "1")
        if following is None:
            raise UsageError(f"{word} needs a value", hint=hint)
        return 2, following


def _check_published_order(program: Sequence[str], words: list[str]) -> None:
    """Refuses hai-platform's order: what follows `--` is the platform's there, not the script's."""
    settings = [value for word, value in itertools.pairwise(words)
                if word == "--options" and value.startswith("profile.")]  # fmt: skip
    settings += [w.partition("=")[2] for w in words if w.startswith("--options=profile.")]
    if not settings:
        return
    nodes = next((b for a, b in itertools.pairwise(words) if a in ("--nodes", "-n")), "")
    own = " ".join(f"--options {setting}" for setting in settings)
    job = shlex.join(program)
    command = f"submit {job} --nodes {nodes} --on slurm {own}" if nodes else f"{own} {job}"
    raise UsageError(
        f"{own} stands after --, and everything from there on is the script's own",
        hint=f"haiprof {command}; if they are the script's own: haiprof -- {job} ...",
    )


_SCRIPT_ENDS = (".py", ".sh")


def _script(words: Sequence[str]) -> tuple[str, str | None]:
    """The job's script, as it is named, and its text; None where no script is found or readable."""
    places = list(range(len(words)))
    is_program = words[0] != "-m" and not words[0].endswith(_SCRIPT_ENDS)
    if is_program:  # /usr/bin/python: a script itself only where it starts none
        places = [*places[1:], 0]
    for place in places:
        word = words[place]
        paths, name = [Path(word)], word
        if word == "-m" and place + 1 < len(words):
            module = Path(*words[place + 1].split("."))
            paths, name = [module / "__main__.py", module.with_suffix(".py")], f"-m {module.name}"
        elif place and not word.endswith(_SCRIPT_ENDS):
            continue
        if is_program and place:
            name = f"{Path(words[0]).name} {'... ' * (place > 1)}{name}"
        for path in paths:
            if path.is_file():
                try:
                    with path.open(encoding="utf-8", errors="replace") as file:
                        return name, file.read(_SCRIPT_BYTES)
                except OSError:
                    return name, None
    return words[0], None


def _defines(text: str, name: str) -> bool:
    """Whether a script has an option of that name, or a field that its parser takes for one."""
    word = name.replace("-", "[-_]")
    return re.search(rf"--{word}(?![\w-])|^\s+{word}\s*:", text, re.MULTILINE) is not None


def _executable(program: list[str]) -> list[str]:
    """A Python file or module is run with Python, everything else as it is."""
    # By this interpreter if it has torch; else by the one that `python` means here.
    if program[0] != "-m" and not program[0].endswith(".py"):
        return [find_program(program[0]), *program[1:]]
    here = importlib.util.find_spec("torch") and sys.executable
    return [here or shutil.which("python") or shutil.which("python3") or sys.executable, *program]


def find_program(name: str) -> str:
    """A program that is not on PATH is looked for beside this interpreter."""
    # So `haiprof torchrun` works in a virtual environment that is not activated.
    installed = Path(sys.executable).parent / name
    is_beside = "/" not in name and shutil.which(name) is None and installed.exists()
    return str(installed) if is_beside else name


def nearest_file(missing: str, ending: str = "") -> str | None:
    """The file beside one that does not exist which was most likely meant, if one is near."""
    # Names are compared without what follows their last dot, which all scripts share.
    import difflib

    folder, name = os.path.split(missing)
    try:
        names = sorted(each for each in os.listdir(folder or ".") if each.endswith(ending))
    except OSError:
        return None
    by_stem = {os.path.splitext(each)[0]: each for each in names}
    stem = os.path.splitext(name)[0]
    near = difflib.get_close_matches(stem, by_stem, n=1, cutoff=_NEAR)
    return os.path.join(folder, by_stem[near[0]]) if near else None


def _job_name(words: list[str]) -> str:
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else words[0]
    scripts = (Path(word).stem for word in words if word.endswith(".py"))
    return safe_name(next(scripts, module))
