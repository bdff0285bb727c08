"""Commands on runs that have ended: what they print is kept in the run, and printed again."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from haiprof.base.errors import HaiprofError
from haiprof.base.units import SPACES, visible
from haiprof.cli.shared import working_folder

if TYPE_CHECKING:
    from haiprof.run_format.layout import RunPaths

_SAVES = "--save"
"""The launcher's verdict at the end of the job: it is made anew, and answers `verdict` later on."""
KEPT_COMMANDS = ("verdict", "overview", "rank", "lines")
_SWITCHES = ("--json", "--all", _SAVES)
_LOOKS = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM", "COLORTERM", "TZ", "LANG", "LC_ALL",
          "PYTHONIOENCODING", "PYTHONUTF8", "TTY_COMPATIBLE", "TTY_INTERACTIVE")  # fmt: skip
"""Environment on which the look of an output depends."""
_STYLE_END = "m"
_KEEP = f"{SPACES}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One command line on a run that has ended."""

    run: RunPaths
    name: str  # Of the kept answer: everything that the output depends on but the run
    fingerprint: str
    saves: bool  # Whether the command does more than print

    def load(self) -> dict[str, Any] | None:
        """The output of the same command before, by stream; None where it must be made."""
        from haiprof.run_format.kept_answers import read_answer

        if self.saves:
            return None
        found = read_answer(self.run, self.name, valid_for=self.fingerprint)
        whole = found and all(isinstance(found.get(name), str) for name in ("stdout", "stderr"))
        return found if whole else None

    def keep(self, **streams: str) -> None:
        """Keeps what the command printed."""
        from haiprof.run_format.kept_answers import keep_answer

        keep_answer(self.run, self.name, streams, valid_for=self.fingerprint)


def ask(words: Sequence[str], log_dir: Path) -> Question | None:
    """The question of a command line; None where its answer is not kept."""
    if not words or words[0] not in KEPT_COMMANDS:
        return None
    rest = list(words[1:])
    if "--log-dir" in rest[:-1]:
        place = rest.index("--log-dir")
        log_dir = Path(rest[place + 1])
        del rest[place : place + 2]
    switches = {word for word in rest if word in _SWITCHES}
    targets = [word for word in rest if word not in switches]
    numbers = [word for word in targets if word.isdecimal()] if words[0] == "rank" else []
    targets = [word for word in targets if word not in numbers]
    if len(targets) > 1 or any(word.startswith("-") for word in targets):
        return None
    from haiprof.run_format.kept_answers import fingerprint
    from haiprof.run_format.layout import RunPaths
    from haiprof.run_format.manifest import newest_run, read_manifest

    try:
        run = RunPaths(newest_run(Path(targets[0]) if targets else log_dir))
        manifest = read_manifest(run)
        to_ask = manifest.scheduler_may_know and not os.path.lexists(run.scheduler)
        if manifest.end_wall_ns is None or to_ask:
            return None
    except (HaiprofError, OSError):
        return None  # the command itself says what is wrong
    saves = _SAVES in switches
    if saves and not _has_small_traces(run):
        return None  # it leaves them alone, and `verdict` does not
    found = fingerprint(run)
    if found is None:
        return None
    look = [os.environ.get(name) for name in _LOOKS]
    terminals = [_is_terminal(stream) for stream in (sys.stdout, sys.stderr)]
    is_card = words[0] == "verdict" and "--json" not in switches  # which shortens the run's path
    where = (os.path.abspath(run.root) if is_card else str(run.root), working_folder())
    asked = (words[0], *numbers, *sorted(switches - {_SAVES}))
    parts = [asked, where, look, shutil.get_terminal_size(), terminals]
    name = hashlib.blake2b(repr(parts).encode("utf-8", "surrogateescape"), digest_size=12)
    return Question(run=run, name=f"{words[0]}-{name.hexdigest()}", fingerprint=found, saves=saves)


def _has_small_traces(run: RunPaths) -> bool:
    """Whether the launcher's verdict reads the run's traces, too."""
    if not run.traces.is_dir():
        return True
    from haiprof.trace_analysis.pool import SMALL_BYTES

    try:
        return sum(path.stat().st_size for path in run.traces.iterdir()) <= SMALL_BYTES
    except OSError:
        return False


def print_stored(answer: dict[str, Any]) -> None:
    """Prints a kept output: text and colours, and nothing else that a terminal obeys."""
    for stream, text in ((sys.stdout, answer["stdout"]), (sys.stderr, answer["stderr"])):
        stream.write(_safe(text))
        stream.flush()


class Recording:
    """Records what is printed while it is printed."""

    def __enter__(self) -> Recording:
        """Begins."""
        self._before = sys.stdout, sys.stderr
        self._copies = [_Copy(stream) for stream in self._before]
        sys.stdout, sys.stderr = self._copies
        return self

    def __exit__(self, *error: object) -> None:
        """Ends."""
        sys.stdout, sys.stderr = self._before

    def streams(self) -> dict[str, str]:
        """What was printed."""
        out, err = ("".join(copy.parts) for copy in self._copies)
        return {"stdout": out, "stderr": err}


class _Copy:
    """A stream that also remembers what is written to it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.parts: list[str] = []

    def write(self, text: str) -> int:
        """Writes, and remembers."""
        count = self._stream.write(text)
        self.parts.append(text)
        return count

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the stream has
        return getattr(self._stream, name)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except (AttributeError, ValueError):
        return False


def _safe(text: str) -> str:
    """Keeps colours (`ESC [ numbers m`); any other control character becomes visible."""
    first, *rest = text.split("\x1b")
    parts = [visible(first, keep=_KEEP)]
    for part in rest:
        numbers, end, after = part.partition(_STYLE_END)
        is_style = end and numbers[:1] == "[" and not numbers[1:].strip("0123456789;")
        parts.append(f"\x1b{numbers}m{visible(after, keep=_KEEP)}" if is_style
                     else visible(f"\x1b{part}", keep=_KEEP))  # fmt: skip
    return "".join(parts)
