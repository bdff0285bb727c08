"""Pickles of numbers, text, tuples, lists and dictionaries, read without making anything else."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from haiprof.base.collector import pause_collector
from haiprof.base.errors import TraceFormatError

_VERSION = 1
"""Version of plain_pickle.c; one that was built from an older text is not used."""

_compiled: ModuleType | None
try:
    from haiprof.trace_format import _plain_pickle

    _compiled = _plain_pickle if getattr(_plain_pickle, "VERSION", 0) == _VERSION else None
except ImportError:  # haiprof was installed without a compiler
    _compiled = None

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

    The compiled one allocates an array up to that place, and trusts what it is told to call.
    """

    dispatch: ClassVar[dict[int, Callable[..., None]]] = {
        ord(getattr(pickle, name)): pickle._Unpickler.dispatch[ord(getattr(pickle, name))]
        for name in _ALLOWED
    }


def _with_checked_keys(load: Callable[[Any], None], keys: slice) -> Callable[[Any], None]:
    def check_keys(reader: Any) -> None:  # noqa: ANN401 - Python's own reader, which has no types
        if any(isinstance(key, tuple) for key in reader.stack[keys]):
            raise TypeError("a tuple is the key of a dictionary")
        load(reader)

    return check_keys


# Tuples in tuples overflow the stack where they are hashed, and no dump has them as keys.
for _opcode, _keys in (
    (ord(pickle.SETITEM), slice(-2, -1)),
    (ord(pickle.SETITEMS), slice(0, None, 2)),
):
    _Reader.dispatch[_opcode] = _with_checked_keys(_Reader.dispatch[_opcode], _keys)


def read_plain_pickle(content: bytes) -> Any:  # noqa: ANN401 - whatever the file holds
    """The value that a pickle holds. The same list may stand in it many times, and in itself.

    What plain_pickle.c has followed to its end Python's compiled reader may read.
    """
    try:
        if _compiled is not None and _compiled.is_plain(content):
            with pause_collector():
                return pickle.loads(content)
        return _Reader(io.BytesIO(content)).load()
    except Exception as error:  # noqa: BLE001  damaged pickles raise errors of any type
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyError) and isinstance(error.args[0], int):
            why = f"opcode {error.args[0]:#04x} is not one of plain values"
        raise TraceFormatError(f"no pickle of plain values ({why})") from None
