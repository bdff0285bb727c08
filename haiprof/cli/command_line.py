"""Options of commands, declared as the defaults of their functions: reading them, their help."""

from __future__ import annotations

import difflib
import inspect
import itertools
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

from haiprof.base.errors import UsageError
from haiprof.cli.names import WRITE_NO_FILE, nearest, second_words

HELP = ("--help", "-h")
_KINDS = {str: "a text", Path: "a path", int: "a whole number", float: "a number"}


class ExitStatus(Exception):  # noqa: N818 - no error: the command did its work
    """Ends a command with an exit status that is not 0."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(frozen=True, slots=True)
class Opt:
    """An option: `-o --output FILE`, a switch `--json`, or `--traces/--no-traces`."""

    spelling: str
    help: str
    default: Any = None
    low: float | None = field(default=None, kw_only=True)
    high: float | None = field(default=None, kw_only=True)
    env: str = field(default="", kw_only=True)
    """The environment variable that gives it where the command line does not."""
    callback: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    old: tuple[str, ...] = field(default=(), kw_only=True)
    """Names of the last release, which this release still takes."""
    group: str = field(default="Options", kw_only=True)

    @property
    def own_flags(self) -> list[str]:
        """Its names in this release, without the one that switches it off."""
        words = self.spelling.partition("/--no-")[0].split()
        return [word for word in words if word.startswith("-")]

    @property
    def flags(self) -> list[str]:
        """These, and those of the last release."""
        return [*self.own_flags, *self.old]

    @property
    def off(self) -> str:
        """The name that switches it off; empty for others."""
        _, mark, name = self.spelling.partition("/--no-")
        return f"--no-{name}" if mark else ""


@dataclass(frozen=True, slots=True)
class Arg:
    """An argument that has no name: what the help calls it, and what it means."""

    spelling: str
    help: str
    default: Any = None
    factory: Callable[[], Any] | None = field(default=None, kw_only=True)
    callback: Callable[[Any], Any] | None = field(default=None, kw_only=True)
    is_command: bool = field(default=False, kw_only=True)
    """Whether it is another command line: what follows its first word is that command's own."""


option: Callable[..., Any] = Opt
argument: Callable[..., Any] = Arg
"""As a parameter's default, which a type checker takes for any value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a command's function."""

    name: str
    declared: Opt | Arg
    kind: Any  # Type of one value
    several: bool
    is_required: bool

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return _is_switch(self.kind)

    def read(self, texts: Sequence[str], command: str) -> Any:  # noqa: ANN401 - of any type
        """What the function gets for these words."""
        declared = self.declared
        if not texts and isinstance(declared, Opt) and os.environ.get(declared.env):
            texts = [os.environ[declared.env]]
        if texts:
            values = [self._value(text) for text in texts]
            found = values if self.several else values[-1]
        elif isinstance(declared, Arg) and declared.factory is not None:
            found = declared.factory()
        elif self.is_required:
            raise UsageError(
                f"{command}: {declared.spelling} is missing", hint=f"haiprof {command} --help"
            )
        else:
            found = False if self.is_switch and declared.default is None else declared.default
        return found if declared.callback is None else declared.callback(found)

    def _value(self, text: str) -> Any:  # noqa: ANN401
        declared = self.declared
        name = declared.own_flags[-1] if isinstance(declared, Opt) else declared.spelling
        if self.is_switch:
            return text != getattr(declared, "off", "")
        choices = get_args(self.kind)  # of a Literal
        try:
            if "\0" in text or (choices and text not in choices):
                raise ValueError
            value: Any = text if choices else self.kind(text)
        except ValueError:
            expected = ", ".join(choices) or _KINDS[self.kind]
            near = difflib.get_close_matches(text, choices, n=1)
            hint = f"did you mean {near[0]}?" if near else ""
            raise UsageError(f"{name}: expected {expected}, got {text!r}", hint=hint) from None
        if isinstance(declared, Arg):
            return value
        low, high = declared.low, declared.high
        if (low is not None and value < low) or (high is not None and value > high):
            limits = f"{low:g} or more" if high is None else f"{low or 0:g} to {high:g}"
            raise UsageError(f"{name} {text}: expected {limits}")
        return value


def _is_switch(kind: Any) -> bool:  # noqa: ANN401
    return kind not in _KINDS and not get_args(kind)


def parameters_of(function: Callable[..., Any]) -> list[Parameter]:
    """What a command declares; what has neither a default nor room for None must be given."""
    found = []
    for each in inspect.signature(function, eval_str=True).parameters.values():
        kind, declared = each.annotation, each.default
        is_optional = type(None) in get_args(kind)
        if is_optional:
            kind = next(part for part in get_args(kind) if part is not type(None))
        several = get_origin(kind) is list
        kind = get_args(kind)[0] if several else kind
        is_given = is_optional or _is_switch(kind) or declared.default is not None
        found.append(Parameter(name=each.name, declared=declared, kind=kind, several=several,
                               is_required=not is_given))  # fmt: skip
    return found


def read_arguments(
    command: str, parameters: Sequence[Parameter], words: Sequence[str]
) -> dict[str, Any]:
    """The arguments of a command's function; options with a callback are read before the others."""
    given = _words_by_name(command, parameters, words)
    first = sorted(parameters, key=lambda p: getattr(p.declared, "callback", None) is None
                   or isinstance(p.declared, Arg))  # fmt: skip
    return {each.name: each.read(given.get(each.name, ()), command) for each in first}


def _words_by_name(
    command: str, parameters: Sequence[Parameter], words: Sequence[str]
) -> dict[str, list[str]]:
    flags = _options(parameters)
    found: dict[str, list[str]] = {}
    own = own_words(parameters, words)
    arguments: list[str] = []
    rest = list(own)
    after = list(words[len(own) :])
    if after[:1] == ["--"]:
        del after[0]
    while rest:
        word = rest.pop(0)
        if not word.startswith("-") or word == "-":
            arguments.append(word)
            continue
        name, equals, value = word.partition("=")
        if name not in flags and not name.startswith("--") and name[:2] in flags:
            name, equals, value = word[:2], "=", word[2:]  # -oFILE
        option = flags.get(name)
        if option is None:
            raise _no_option(command, name, [f for f in flags if f.startswith("--")])
        if option.is_switch:
            if equals:
                raise UsageError(f"{command}: {name} takes no value")
            value = name
        elif not equals:
            if not rest:
                raise UsageError(f"{command}: {name} needs a value")
            value = rest.pop(0)
        found.setdefault(option.name, []).append(value)
    arguments += after
    first = arguments[0] if arguments else ""
    for each in (each for each in parameters if isinstance(each.declared, Arg)):
        count = len(arguments) if each.several else 1
        found[each.name], arguments = arguments[:count], arguments[count:]
    if arguments:
        near = nearest(first, second_words(command))
        raise UsageError(
            f"{command}: unexpected argument {arguments[0]!r}",
            hint=f"did you mean haiprof {command} {near}?" if near else f"haiprof {command} --help",
        )
    return found


def _options(parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    """Options by each of their names."""
    return {
        flag: each
        for each in parameters
        if isinstance(each.declared, Opt)
        for flag in (*each.declared.flags, each.declared.off)
        if flag
    }


def own_words(parameters: Sequence[Parameter], words: Sequence[str]) -> list[str]:
    """The words before `--`, or before another command line that the command takes."""
    end = words.index("--") if "--" in words else len(words)
    declared = [each.declared for each in parameters]
    if not any(isinstance(each, Arg) and each.is_command for each in declared):
        return list(words[:end])
    options, place = _options(parameters), 0
    while place < end and words[place].startswith("-"):
        option = options.get(words[place])
        place += 1 if option is None or option.is_switch else 2  # its value
    return list(words[: min(place, len(words))])


def _no_option(command: str, name: str, known: Sequence[str]) -> UsageError:
    others = (word for word in second_words(command.split()[0]) if word.startswith("-"))
    known = [*known, *others]  # `ls --live` is a command of its own
    bare = {word.lstrip("-"): word for word in known}  # all options are alike in their dashes
    near = difflib.get_close_matches(name.lstrip("-"), bare, n=1)
    hint = f"did you mean {bare[near[0]]}?" if near else f"haiprof {command} --help"
    if name in ("-o", "--output"):
        hint = WRITE_NO_FILE.get(command, hint)
    return UsageError(f"{command}: no option {name!r}", hint=hint)


_REMARK = re.compile(r"(?<=\S) {2,}")  # What stands between an example and its remark
_LEAST_ROOM = 30
"""Columns that an explanation needs beside what it explains; with fewer it goes below."""
_LEFT_LIMIT = 28


def help_page(command: str, docstring: str, parameters: Sequence[Parameter], width: int) -> str:
    """A command's help; paragraphs of its docstring that begin with two spaces are examples."""
    arguments = [each for each in parameters if isinstance(each.declared, Arg)]
    usage = " ".join([f"usage: haiprof {command} [OPTIONS]",
                      *(_usage(each) for each in arguments)])  # fmt: skip
    parts = [wrap(usage, width, indent=4).strip(), _paragraphs(docstring, width)]
    if arguments:
        rows = [(_usage(each), each.declared.help) for each in arguments]
        parts.append(f"Arguments:\n{table(rows, width)}".rstrip())
    groups: dict[str, list[tuple[str, str]]] = {}
    for each in parameters:
        if isinstance(each.declared, Opt):
            groups.setdefault(each.declared.group, []).append(_row(each))
    groups.setdefault("Options", []).append(("-h, --help", "Show this and exit."))
    parts += [f"{title}:\n{table(rows, width)}".rstrip() for title, rows in groups.items()]
    return "\n\n".join(parts) + "\n"


def _usage(each: Parameter) -> str:
    spelling = each.declared.spelling
    optional = not each.is_required or getattr(each.declared, "factory", None)
    return f"[{spelling}]" if optional and not spelling.startswith("[") else spelling


def _row(each: Parameter) -> tuple[str, str]:
    text, default = each.declared.help, each.declared.default
    if not each.is_switch and "efault" not in text and default not in (None, ""):
        shown = f"{default:g}" if isinstance(default, (int, float)) else default
        text += f" (default: {shown})"
    return re.sub(r" (?=-)", ", ", each.declared.spelling), text


def _paragraphs(docstring: str, width: int) -> str:
    """Lines of a paragraph are joined, examples stand below each other."""
    found: list[str] = []
    paragraphs = inspect.cleandoc(docstring).split("\n\n")
    for is_example, group in itertools.groupby(paragraphs, lambda text: text.startswith("  ")):
        if is_example:
            lines = (line for paragraph in group for line in paragraph.splitlines())
            found.append("\n".join(_example(line, width) for line in lines))
        else:
            found += [wrap(" ".join(paragraph.split()), width) for paragraph in group]
    return "\n\n".join(found)


def _example(line: str, width: int) -> str:
    """An example with its remark, which goes below it where it has no room."""
    if len(line) <= width:
        return line
    words, *remark = _REMARK.split(line.strip(), maxsplit=1)
    shown = textwrap.wrap(
        words, width - 2, initial_indent="  ", subsequent_indent="      ",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    shown = [*(f"{part} \\" for part in shown[:-1]), shown[-1]]  # a shell takes them as one
    return "\n".join([*shown, *(f"      {wrap(text, width - 6, indent=6)}" for text in remark)])


def wrap(text: str, width: int, *, indent: int = 0) -> str:
    """Text in lines, all but the first indented."""
    return textwrap.fill(text, width, break_on_hyphens=False, subsequent_indent=" " * indent)


def table(rows: Sequence[tuple[str, str]], width: int, left: int = 0) -> str:
    """Words and what they mean, side by side, or below each other where that is too narrow."""
    left = left or min(_LEFT_LIMIT, max(len(words) for words, _ in rows) + 2)
    lines, has_room = [], width - left >= _LEAST_ROOM
    indent = left + 2 if has_room else 6
    for words, meaning in rows:
        text = textwrap.indent(wrap(meaning, width - indent), " " * indent)
        beside = has_room and len(words) + 2 <= left
        lines.append(f"  {words:<{left}}{text.lstrip()}" if beside else f"  {words}\n{text}")
    return "".join(f"{line}\n" for line in lines)
