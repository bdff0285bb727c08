"""Log directories that are addresses (s3://bucket/runs), and where runs are recorded first."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path

from haiprof.base.errors import MissingExtraError, UsageError

_FETCHED: dict[Path, str] = {}
_PROTOCOL = r"[A-Za-z][A-Za-z0-9+.\-]*"
_ADDRESS = re.compile(rf"(?:{_PROTOCOL}::)*{_PROTOCOL}://.*", re.DOTALL)


def is_address(text: str) -> bool:
    """Whether a text is `PROTOCOL://...`, also a chain of them: `simplecache::s3://...`."""
    return _ADDRESS.fullmatch(text) is not None


def run_address(address: str, name: str) -> str:
    """Where the run of that name is, of the address of a log directory."""
    return f"{address.rstrip('/')}/{name}"


def note_fetched(folder: Path, address: str) -> None:
    """Remembers which address a run was fetched from into a folder that will be removed."""
    _FETCHED[folder] = address


def shown_path(run: Path) -> str:
    """A run directory as users name it: by its address, where it was fetched for a command."""
    return _FETCHED.get(run, str(run))


def recording_folder(environ: Mapping[str, str]) -> Path:
    """Where runs are recorded before they are put at an address: the user's state folder.

    That is $XDG_STATE_HOME, else ~/.local/state (XDG Base Directory Specification): what should
    stay over a restart, and is not a configuration.
    """
    named = environ.get("XDG_STATE_HOME", "")
    state = Path(named) if os.path.isabs(named) else Path("~/.local/state").expanduser()
    return state / "haiprof" / "runs"


def check_packages(address: str) -> None:
    """Checks that what reads and writes at an address is installed."""
    protocol = re.split("::|://", address)[0]
    if importlib.util.find_spec("fsspec") is None:
        raise MissingExtraError(
            f"{protocol}:// needs the package fsspec", hint="pip install 'haiprof[remote]'"
        )
    from fsspec.registry import known_implementations, registry

    if protocol not in known_implementations and protocol not in registry:
        raise UsageError(f"{protocol}://: no such protocol", hint="s3://BUCKET/FOLDER, for example")
    package = known_implementations.get(protocol, {"class": ""})["class"].partition(".")[0]
    if package and importlib.util.find_spec(package) is None:
        extra = "'haiprof[remote]'" if package == "s3fs" else package
        raise MissingExtraError(
            f"{protocol}:// needs the package {package}", hint=f"pip install {extra}"
        )
