"""Pickles of numbers, text, tuples, lists and dictionaries, read without making anything else."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

from haiprof.base.errors import TraceFormatError

_ALLOWED = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "NONE", "NEWTRUE", "NEWFALSE",
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES",
    "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM", "SETITEMS",
    "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
    "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET",
)  # fmt: skip
"""What pickle writes for such values, protocol 2 and later. Whatever names, calls or builds an
object is not among them, nor what allocates more than the file holds."""


class _Reader(pickle._Unpickler):
    """Python's own reader, which keeps its memo in a dictionary: a huge place in it costs nothing.

    The compiled one allocates an array up to that place.
    """

    dispatch: ClassVar[dict[int, Callable[[pickle.Unpickler], None]]] = {
        ord(getattr(pickle, name)): pickle._Unpickler.dispatch[ord(getattr(pickle, name))]
        for name in _ALLOWED
    }


def read_plain_pickle(content: bytes) -> Any:  # noqa: ANN401 - whatever the file holds
    """The value that a pickle holds. The same list may stand in it many times, and in itself.

    Raises:
        TraceFormatError: It is damaged, or holds anything but plain values.
    """
    try:
        return _Reader(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001  damaged pickles raise errors of any type
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyError) and isinstance(error.args[0], int):
            why = f"opcode {error.args[0]:#04x} is not one of plain values"
        raise TraceFormatError(f"no pickle of plain values ({why})") from None
