"""A Python that has torch and nothing else, a copy of the tree, and a shell without network."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# A new network has not even a loopback, which every machine has.
_ALONE = """
import fcntl, os, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    fcntl.ioctl(one, 0x8914, struct.pack("16sh", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
os.execvp(sys.argv[1], sys.argv[1:])
"""
OFFLINE = ["unshare", "--map-root-user", "--net", sys.executable, "-S", "-c", _ALONE]


def make_python(folder: Path) -> Path:
    """A virtual environment that has pip, and links to torch and to what torch needs."""
    venv.create(folder, symlinks=True, with_pip=True)
    [site] = folder.glob("lib/python*/site-packages")
    for name in sorted(_with_needs("torch")):
        _link(importlib.metadata.distribution(name), site)
    return folder / "bin" / "python3"


def _with_needs(name: str) -> set[str]:
    found, waiting = set[str](), [name]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            needs = [Requirement(need) for need in importlib.metadata.requires(name) or ()]
            waiting += [n.name for n in needs if n.marker is None or n.marker.evaluate()]
    return found


def _link(package: importlib.metadata.Distribution, site: Path) -> None:
    """Links what a package has put into site-packages."""
    names = {path.parts[0] for path in package.files or ()} - {"..", "__pycache__"}
    for name in names:
        if not (site / name).exists():
            (site / name).symlink_to(Path(str(package.locate_file(name))).resolve())


def copy_tree(folder: Path) -> Path:
    """The files of the tree that git knows, and no compiled part."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
            (folder / name).chmod((ROOT / name).stat().st_mode)
    return folder


def run_offline(python: Path, tree: Path, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """A command in a tree, with an environment of its own and without network."""
    home = tree.with_name("home")
    home.mkdir(exist_ok=True)
    path = os.pathsep.join((str(python.parent), "/usr/bin", "/bin"))
    return subprocess.run(
        [*OFFLINE, *words], cwd=tree, env={"PATH": path, "HOME": str(home), "LANG": "C.UTF-8"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
