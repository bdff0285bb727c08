"""Who may look at a rank's stack: the agent, where Yama lets only parents and named tracers."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from haiprof.in_job.commands import let_look

YAMA = int.from_bytes(b"Yama", "big")
"""PR_SET_PTRACER of linux/prctl.h."""


class FakeLibrary:
    """The C library of a kernel that has Yama: keeps what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def prctl(self, option: int, second: ctypes.c_ulong, *_: int) -> int:
        self.asked.append((option, second.value))
        return 0


@pytest.mark.parametrize(
    ("scope", "asked"), [("1\n", [(YAMA, 4321)]), ("0\n", []), ("2\n", []), ("3\n", []), (None, [])]
)
def test_agent_is_named_only_where_yama_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scope: str | None, asked: object
) -> None:
    library = FakeLibrary()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    path = tmp_path / "ptrace_scope"
    if scope is not None:
        path.write_text(scope)
    let_look(4321, scope=path)
    assert library.asked == asked


def test_kernel_that_knows_no_tracer_is_no_error_of_the_job(tmp_path: Path) -> None:
    (tmp_path / "ptrace_scope").write_text("1\n")
    let_look(1, scope=tmp_path / "ptrace_scope")  # the real prctl: EINVAL where Yama is absent
