"""Frames as the public classes return them: polars', whose `to_pandas()` names what it needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import polars as pl

from haiprof.base.errors import MissingExtraError

C = TypeVar("C", bound="type[Any]")
P = ParamSpec("P")
R = TypeVar("R")


class Frame(pl.DataFrame):
    """A polars frame; without pandas or pyarrow, `to_pandas()` names the extra."""

    def to_pandas(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """As polars has it."""
        try:
            return super().to_pandas(*args, **kwargs)
        except ModuleNotFoundError as error:
            raise MissingExtraError(
                f"to_pandas(): {error}", hint="pip install 'haiprof[pandas]'"
            ) from error


def returning_frames(method: Callable[P, R]) -> Callable[P, R]:
    """A method whose polars frames are such frames."""

    @functools.wraps(method)
    def read(*args: P.args, **kwargs: P.kwargs) -> R:
        found: Any = method(*args, **kwargs)
        if type(found) is pl.DataFrame:
            found = Frame(found)
        return found  # type: ignore[no-any-return]

    return read


def with_frames(cls: C) -> C:
    """A public class all of whose methods return such frames."""
    for name in dir(cls):
        method = getattr(cls, name)
        answer = getattr(method, "__annotations__", {}).get("return")
        if answer == "pl.DataFrame" and not name.startswith("_"):
            setattr(cls, name, returning_frames(method))
    return cls
