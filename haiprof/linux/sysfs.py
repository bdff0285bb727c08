"""Small files and folders of /sys and /proc; None, or no names, where they do not exist."""

from __future__ import annotations

import os
from pathlib import Path


def read_text(path: Path) -> str | None:
    """A file's text without the white space around it."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def list_names(folder: Path) -> list[str]:
    """Names in a folder, in any order."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def link_name(path: Path) -> str | None:
    """The last part of what a link leads to, such as the name of a driver."""
    try:
        return os.path.basename(os.readlink(path))
    except OSError:
        return None


def inode(path: Path | str) -> int | None:
    """The inode: another one shows that a folder was removed and made again."""
    try:
        return os.stat(path).st_ino
    except OSError:
        return None
