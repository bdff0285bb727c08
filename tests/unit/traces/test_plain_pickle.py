"""Pickles of plain values: both readers give what pickle gives, or both refuse."""

from __future__ import annotations

import pickle
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from haiprof.base.errors import TraceFormatError
from haiprof.trace_format import memory_snapshot as plain_pickle
from haiprof.trace_format.memory_snapshot import read_plain_pickle

KEYS = st.one_of(st.text(max_size=5), st.integers(), st.booleans(), st.none())
VALUES = st.recursive(
    st.one_of(KEYS, st.floats(allow_nan=False), st.binary(max_size=300)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5), st.tuples(inner, inner), st.dictionaries(KEYS, inner)
    ),
    max_leaves=30,
)
READERS = [
    "Python",
    pytest.param(
        "compiled",
        marks=pytest.mark.skipif(plain_pickle._compiled is None, reason="not compiled here"),
    ),
]


@pytest.fixture(params=READERS)
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(plain_pickle, "_compiled", None)
    return str(request.param)


def compiled_takes(content: bytes) -> bool:
    assert plain_pickle._compiled is not None
    return bool(plain_pickle._compiled.is_plain(content))


def outcome(content: bytes) -> Any:
    try:
        return repr(read_plain_pickle(content))
    except TraceFormatError:
        return "refused"


@pytest.mark.skipif(plain_pickle._compiled is None, reason="not compiled here")
@given(VALUES, st.sampled_from([3, 4, 5]))
def test_what_pickle_writes_the_compiled_reader_takes(value: object, protocol: int) -> None:
    content = pickle.dumps([value, value], protocol)
    assert compiled_takes(content)
    assert repr(read_plain_pickle(content)) == repr([value, value])


@pytest.mark.skipif(plain_pickle._compiled is None, reason="not compiled here")
@given(VALUES, st.sampled_from([3, 4]), st.randoms(use_true_random=False))
def test_damaged_ones_are_read_alike_or_by_python_alone(
    value: object, protocol: int, chance: random.Random
) -> None:
    content = bytearray(pickle.dumps([value, value], protocol))
    for _ in range(chance.randint(1, 3)):
        content[chance.randrange(len(content))] = chance.randrange(256)
    if not compiled_takes(bytes(content)):
        return
    native = outcome(bytes(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain_pickle, "_compiled", None)
        assert outcome(bytes(content)) == native


@pytest.mark.parametrize("depth", [1, 500_000])
def test_tuples_as_keys_are_refused_and_never_overflow_the_stack(reader: str, depth: int) -> None:
    nested = b"\x80\x02})" + b"\x85" * depth + b"K\x01s."
    in_one = b"\x80\x02}()" + b"\x85" * depth + b"K\x01u."
    for content in (nested, in_one):
        with pytest.raises(TraceFormatError, match="a tuple is the key"):
            read_plain_pickle(content)


def test_a_place_of_the_memo_out_of_order_takes_no_memory(reader: str) -> None:
    assert read_plain_pickle(b"\x80\x02]r\xff\xff\xff\x7fj\xff\xff\xff\x7f0.") == []
