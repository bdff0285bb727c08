"""Keys of `haiprof ls --live`: none is lost, and none is taken for another."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from haiprof.cli.running_jobs import Keys
from haiprof.show.views.jobs import BACK, DOWN, ENTER, QUIT, UP


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)


def test_keys_pressed_at_once_are_answered_one_by_one(pipe: tuple[int, int]) -> None:
    keys = Keys(pipe[0])
    os.write(pipe[1], b"\x1b[B\x1b[Bjk\r\x1b[Aq")
    assert [keys.wait(1) for _ in range(7)] == [DOWN, DOWN, DOWN, UP, ENTER, UP, BACK]
    assert keys.wait(0) is None
    os.close(pipe[1])
    assert keys.wait(1) == QUIT


def test_sequence_in_two_pieces_is_one_key(pipe: tuple[int, int]) -> None:
    keys = Keys(pipe[0])
    os.write(pipe[1], b"j\x1b")
    assert keys.wait(1) == DOWN
    os.write(pipe[1], b"[A")
    assert keys.wait(1) == UP
    os.close(pipe[1])


@pytest.mark.parametrize("unknown", [b"\x1b[6~", b"\x1b[1;5C", b"\x1bOP", b"x"])
def test_unknown_key_does_nothing_and_hides_no_other(pipe: tuple[int, int], unknown: bytes) -> None:
    keys = Keys(pipe[0])
    os.write(pipe[1], unknown + b"\x1b[B")
    assert [keys.wait(1), keys.wait(1)] == [None, DOWN]
    os.close(pipe[1])


def test_escape_alone_goes_back(pipe: tuple[int, int]) -> None:
    keys = Keys(pipe[0])
    os.write(pipe[1], b"\x1b")
    assert keys.wait(1) == BACK
    os.close(pipe[1])
