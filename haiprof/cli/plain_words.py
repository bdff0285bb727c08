"""Plain command lines as arguments of a function, without the parser: its import takes 0.1 s."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

_READ: Mapping[object, Callable[[str], object]] = {str: str, Path: Path, int: int, float: float}


class _NotPlainError(Exception):
    """The parser must see this command line: to read it, or to say what is wrong with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """One parameter of a command, as its annotation for typer describes it."""

    name: str
    info: ParameterInfo
    kind: object
    """Type of one value."""
    several: bool
    default: object

    def value(self, texts: Sequence[str]) -> object:
        """What the function gets for these words of the command line."""
        found = self._read(texts) if texts else self.default
        if not texts and self.info.default_factory is not None:
            found = self.info.default_factory()
        if found is inspect.Parameter.empty:
            raise _NotPlainError
        return found if self.info.callback is None else self.info.callback(found)

    def _read(self, texts: Sequence[str]) -> object:
        if self.kind is bool:
            return True
        if self.kind not in _READ:
            raise _NotPlainError
        values = [_READ[self.kind](text) for text in texts]
        if not all(self._is_in_range(value) for value in values):
            raise _NotPlainError
        return values if self.several else values[0]

    def _is_in_range(self, value: object) -> bool:
        low, high = self.info.min, self.info.max
        if not isinstance(value, (int, float)):
            return True
        return (low is None or value >= low) and (high is None or value <= high)


def plain_arguments(function: Callable[..., None], words: Sequence[str]) -> dict[str, Any] | None:
    """What typer would pass to a command; None where only typer can tell, errors included.

    Understood are switches, `--option VALUE`, and arguments; text, paths and numbers.

    Args:
        function: The command, its parameters annotated for typer.
        words: Its command line, without the command's name.
    """
    try:
        signature = inspect.signature(function, eval_str=True)
        parameters = [_parameter(each) for each in signature.parameters.values()]
        given = _words_by_parameter(words, parameters)
        first = sorted(parameters, key=lambda each: not each.info.is_eager)
        return {each.name: each.value(given.get(each.name, ())) for each in first}
    except (_NotPlainError, ValueError):
        return None


def _parameter(parameter: inspect.Parameter) -> _Parameter:
    kind, *rest = get_args(parameter.annotation) or (None,)
    infos = [info for info in rest if isinstance(info, ParameterInfo)]
    if len(infos) != 1:
        raise _NotPlainError
    if type(None) in get_args(kind):
        kind = next(part for part in get_args(kind) if part is not type(None))
    several = get_origin(kind) is list
    return _Parameter(
        name=parameter.name,
        info=infos[0],
        kind=get_args(kind)[0] if several else kind,
        several=several,
        default=parameter.default,
    )


def _words_by_parameter(
    words: Sequence[str], parameters: Sequence[_Parameter]
) -> dict[str, list[str]]:
    """The words of each parameter."""
    options = {
        name: each
        for each in parameters
        if isinstance(each.info, OptionInfo)
        for name in (each.info.default, *(each.info.param_decls or ()))  # typer's first is either
    }
    found: dict[str, list[str]] = {}
    arguments = []
    if any("\0" in word for word in words):  # no path: the parser says so
        raise _NotPlainError
    rest = iter(words)
    for word in rest:
        if not word.startswith("-") or word == "-":
            arguments.append(word)
            continue
        option = options.get(word)
        value = word if option and option.kind is bool else next(rest, None)
        # An error, --help, --option=value, one of `--yes/--no`, or twice the same
        if option is None or value is None or (option.name in found and not option.several):
            raise _NotPlainError
        found.setdefault(option.name, []).append(value)
    for each in (each for each in parameters if isinstance(each.info, ArgumentInfo)):
        count = len(arguments) if each.several else 1
        found[each.name], arguments = arguments[:count], arguments[count:]
    if arguments:
        raise _NotPlainError
    return found
