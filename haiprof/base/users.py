"""Users of this machine by name, and who may look at the jobs of others."""

from __future__ import annotations

import functools
import grp
import os
import pwd
from pathlib import Path


@functools.cache
def user_name(uid: int) -> str:
    """`alice`; `uid 1234` for one without a name here."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def other_uid(path: Path) -> int | None:
    """Whose a file is, where it is another user's; None for one's own, or where it is gone."""
    try:
        uid = path.stat().st_uid
    except OSError:
        return None
    return None if uid == os.getuid() else uid


def group_id(name: str) -> int | None:
    """The number of a group of this machine, by name or number; None where there is none."""
    if name.isascii() and name.isdigit() and len(name) < 10:
        return int(name)
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def is_administrator(group: str) -> bool:
    """Whether this process is root's, or in the group of administrators; empty is none."""
    if os.geteuid() == 0:
        return True
    gid = group_id(group) if group else None
    return gid is not None and gid in (os.getegid(), *os.getgroups())
