"""A command of haiprof's that serves pages, as a process of its own, ended as Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_URL = re.compile(r"http://\S+")
_WAIT_S = 60.0


@dataclass
class Served:
    """What runs, and where."""

    process: subprocess.Popen[str]
    url: str = ""
    said: list[str] = field(default_factory=list)
    """Lines of stderr."""


@contextlib.contextmanager
def served(*arguments: str | Path, env: dict[str, str] | None = None) -> Iterator[Served]:
    """Starts `haiprof ARGUMENTS`, waits for the address that it prints, and interrupts it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "haiprof", *map(str, arguments)],
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "DISPLAY": "", "WAYLAND_DISPLAY": "", **(env or {})},
    )  # fmt: skip
    found = Served(process)
    ready = threading.Event()

    def listen() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            found.said.append(line)
            address = _URL.search(line)
            if address and "Ctrl-C" in line:
                found.url = address[0]
                ready.set()
        ready.set()

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        assert ready.wait(_WAIT_S), found.said
        assert found.url, found.said
        yield found
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=_WAIT_S) == 0, found.said
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        listener.join()
        assert process.stderr is not None
        process.stderr.close()
