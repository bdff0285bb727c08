"""The file with the token of `--reach`: its owner, mode and format."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
from pathlib import Path

from haiprof.base.errors import UsageError
from haiprof.base.safe_files import create_file

KEY_BYTES = 32
PREFIX = "haiprof-reach-1:"
_TOKEN = re.compile(rf"{PREFIX}([0-9a-f]{{{2 * KEY_BYTES}}})\s*\Z", re.ASCII)
_LIMIT_BYTES = 256
# Not blocking: a pipe in the file's place must not block the launcher.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make_token(path: Path) -> bytes:
    """The key in a token file; the file is written where there is none."""
    try:
        descriptor = create_file(path, below=path.parent, mode=0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot write the token: {error.strerror}") from None
    key = secrets.token_bytes(KEY_BYTES)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(f"{PREFIX}{key.hex()}\n")
    return key


def read_token(path: Path) -> bytes:
    """The key in a token file of this user's (or root's) that nobody else may read or write."""
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        reason = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise UsageError(f"{path}: cannot read the token: {reason}") from None
    try:
        _check_owner(path, os.fstat(descriptor))
        text = os.read(descriptor, _LIMIT_BYTES + 1).decode("ascii", "replace")
    finally:
        os.close(descriptor)
    token = _TOKEN.match(text)
    if token is None or len(text) > _LIMIT_BYTES:
        raise UsageError(
            f"{path}: holds no token of haiprof's ({PREFIX} and {2 * KEY_BYTES} hex digits)",
            hint="remove it or name another file: the node that listens writes a new one",
        )
    return bytes.fromhex(token[1])


def _check_owner(path: Path, state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise UsageError(f"{path}: cannot read the token: not a regular file")
    if state.st_uid not in (0, os.geteuid()):
        raise UsageError(
            f"{path}: this token belongs to another user (uid {state.st_uid})",
            hint="name a file of your own: --reach-token FILE",
        )
    if state.st_mode & 0o077:
        raise UsageError(f"{path}: others may read or write this token", hint=f"chmod 600 {path}")
