"""What goes over the wire: JSON objects, each behind its length; and the token that opens it."""

from __future__ import annotations

import hmac
import json
import os
import secrets
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from haiprof.errors import UsageError
from haiprof.rundir.control import MESSAGE_LIMIT_BYTES

LENGTH = struct.Struct("!I")
HELLO_LIMIT_BYTES = 4096
"""What somebody who has not shown the token yet may send."""
FRAME_LIMIT_BYTES = 2 * MESSAGE_LIMIT_BYTES
TOKEN_BYTES = 32
_TOKEN_FILE_LIMIT_BYTES = 4096


def frame(message: Mapping[str, Any]) -> bytes:
    """One message as it is sent."""
    data = json.dumps(message).encode()
    return LENGTH.pack(len(data)) + data


def content(data: bytes) -> dict[str, Any] | None:
    """The JSON object of one message; null if it is none."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


def same_token(shown: object, token: str) -> bool:
    """Whether somebody showed the token, in a time that does not depend on where it differs."""
    return isinstance(shown, str) and hmac.compare_digest(shown.encode(), token.encode())


def make_token(path: Path) -> str:
    """The token of a file that only its owner may read; written where there is none.

    Raises:
        UsageError: The file is open to others, or cannot be written or read.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return read_token(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot write the token: {error.strerror}") from None
    token = secrets.token_urlsafe(TOKEN_BYTES)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(token + "\n")
    return token


def read_token(path: Path) -> str:
    """The token of a file.

    Raises:
        UsageError: It cannot be read, is open to others, or holds no token.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_TOKEN_FILE_LIMIT_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise UsageError(f"{path}: cannot read the token: {error.strerror}") from None
    if mode & 0o077:
        raise UsageError(f"{path}: others may read this token", hint=f"chmod 600 {path}")
    if len(text) < TOKEN_BYTES:
        raise UsageError(f"{path}: holds no token", hint="remove it: haiprof writes a new one")
    return text


def parse_address(text: str) -> tuple[str, int]:
    """`HOST:PORT`, `[V6]:PORT`, or `PORT` on the loopback interface.

    Raises:
        ValueError: Something else.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isdigit() or not 0 < int(port) < 65_536 or any(c.isspace() for c in host):
        raise ValueError("expected HOST:PORT")
    return host, int(port)
