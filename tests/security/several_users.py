"""Several users of this machine, in a mount namespace of its own: /etc outside stays as it is.

Needs root, and file systems that can be laid over each other; without them tests skip and say so.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.process.jobs import REPOSITORY, environment

_SETUP = """
set -e
mkdir {base}/upper {base}/work
mount -t tmpfs tmpfs {base}/upper
mkdir {base}/upper/upper {base}/upper/work
mount -t overlay overlay -o lowerdir=/etc,upperdir={base}/upper/upper,workdir={base}/upper/work /etc
{opening}
{users}
mkdir /etc/haiprof
echo held
exec cat
"""
_EACH = """
import contextlib, io, json, sys
from haiprof.__main__ import main
answers = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    answers.append((status, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
"""


@dataclass(frozen=True)
class Machine:
    """One with users of its own."""

    base: Path
    """Below /tmp: pytest's own folders let nobody else in."""
    pid: int
    """Of the process that holds it."""

    @property
    def shared(self) -> Path:
        """Where everybody may create, and nobody may rename or remove what is another's."""
        return self.base / "shared"

    def home(self, user: str) -> Path:
        return self.base / user

    def words(self, user: str, *command: str) -> list[str]:
        """A command as it is run by a user, in its home."""
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups"]
        there = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.home(user))]
        enter = ["nsenter", f"--target={self.pid}", "--mount"]
        return [*enter, *([] if user == "root" else become), *there, *command]

    def start(self, user: str, *command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(user, *command), env=self._environment(user),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, user: str, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(user, *command), env=self._environment(user), capture_output=True,
            text=True, timeout=120, check=False,
        )  # fmt: skip

    def haiprof(self, user: str, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run(user, sys.executable, "-m", "haiprof", *words)

    def haiprof_each(
        self, user: str, *commands: Sequence[str]
    ) -> list[subprocess.CompletedProcess[str]]:
        """Each of these commands in turn, in one process, which reads haiprof's modules once."""
        done = self.run(user, sys.executable, "-c", _EACH, json.dumps(commands))
        assert done.returncode == 0, done.stderr
        answers = zip(commands, json.loads(done.stdout), strict=True)
        return [subprocess.CompletedProcess(words, *answer) for words, answer in answers]

    def configure(self, text: str) -> None:
        """What the administrator writes into /etc/haiprof/config.toml."""
        write = f"printf %s {shlex.quote(text)} > /etc/haiprof/config.toml"
        assert self.run("root", "sh", "-c", write).returncode == 0

    def _environment(self, user: str) -> Mapping[str, str]:
        return environment({"HOME": str(self.home(user)), "USER": user, "TMPDIR": "/tmp"})


@contextmanager
def several_users(groups_of: Mapping[str, Sequence[str]]) -> Iterator[Machine]:
    """A machine with these users, each in its own group and those named."""
    if os.geteuid() != 0:
        pytest.skip("only root can become other users")
    with tempfile.TemporaryDirectory(prefix="several-users-", dir="/tmp") as name:
        base = Path(name)
        base.chmod(0o755)
        (base / "shared").mkdir()
        (base / "shared").chmod(0o1777)
        (base / "root").mkdir()
        groups = sorted({group for own in groups_of.values() for group in own})
        users = [f"groupadd {group}" for group in groups]
        for user, own in groups_of.items():
            more = f"-G {','.join(own)}" if own else ""
            users.append(f"useradd -U -m -d {base / user} {more} {user} >/dev/null 2>&1")
        script = _SETUP.format(base=base, opening=_opening(base), users="\n".join(users))
        holder = subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
        )  # fmt: skip
        try:
            assert holder.stdout is not None
            said = holder.stdout.readline().strip()
            if said != "held":
                pytest.skip(f"no users of their own: {said or holder.wait()}")
            yield Machine(base, holder.pid)
        finally:
            holder.communicate(timeout=20)  # closes its input


def _opening(base: Path) -> str:
    """Commands that let all users reach this Python and this repository, wherever they lie."""
    needed = {Path(sys.base_prefix), Path(sys.prefix), REPOSITORY}
    closed = {top for path in needed if (top := _closed_folder(path)) is not None}
    lines: list[str] = []
    for top in sorted(closed):
        inside = [str(path) for path in sorted(needed) if top in path.parents]
        kept = [f"{base}/kept{top}/{at}".replace("//", "/") for at in range(len(inside))]
        for path, aside in zip(inside, kept, strict=True):
            lines += [f"mkdir -p {aside}", f"mount --bind {path} {aside}"]
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {top}")
        for path, aside in zip(inside, kept, strict=True):
            lines += [f"mkdir -p {path}", f"mount --bind {aside} {path}"]
    return "\n".join(lines)


def _closed_folder(path: Path) -> Path | None:
    """The outermost folder on the way to a path that others may not enter."""
    for folder in reversed((path, *path.parents)):
        if not stat.S_IMODE(folder.stat().st_mode) & 0o001:
            return folder
    return None
