"""Packages for a machine without network: what this Python lacks comes from wheels beside the tree.

A wheel is a zip of what belongs into site-packages; it is unpacked into a folder of its own that
comes first on the path and is removed afterwards. Only the standard library is used here.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import itertools
import json
import os
import re
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
WHEELS = REPOSITORY / ".whl"
INDEX = "packages.json"
XZ = ".xz"
PYTHON = "3.12"  # of the machine that is lent now and then
TORCH = "torch>=2.5"  # too large to be carried: it is the machine's own
# No item draws a figure or submits a job.
NOT_NEEDED = frozenset(("plotly", "pyyaml"))


class LackingError(Exception):
    """Packages that are neither this Python's own nor carried: a line for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A carried package.

    Attributes:
        path: Its wheel, plain or packed with xz.
        version: Its version.
        needs: What it needs itself on that machine, as `name>=1,<2`.
    """

    path: Path
    version: str
    needs: tuple[str, ...]


def use_wheels(wheels: Path, site: Path) -> str:
    """Puts carried packages on the path where this Python lacks them; says what is used."""
    carried = read_index(wheels)
    own = carried.pop("haiprof", None)
    names, lacking = choose([*core_dependencies(), TORCH], carried)
    if lacking:
        raise LackingError("\n".join(lacking))
    for name in names:
        unpack(carried[name].path, site)
    words = [f"{len(names)} packages from {wheels.name}/: {', '.join(names)}"] if names else []
    if own and not _importable("haiprof.trace_format.kineto._native"):
        if is_of_tree(own.path):
            unpack(own.path, site)
            words.append("haiprof's wheel")
        else:
            words.append("haiprof's tree: its wheel is of other sources")
    if site.is_dir():
        _put_first(site)
    return "; ".join(words) or "all packages of this Python's own"


def read_index(wheels: Path) -> dict[str, Wheel]:
    """What is carried for this Python and machine, by name."""
    index = wheels / INDEX
    content: Mapping[str, Any] = json.loads(index.read_text()) if index.is_file() else {}
    return {
        name: Wheel(path=wheels / e["file"], version=e["version"], needs=tuple(e["needs"]))
        for name, e in content.items()
        if fits(e["file"]) and (wheels / e["file"]).is_file()
    }


def choose(wanted: Sequence[str], carried: Mapping[str, Wheel]) -> tuple[list[str], list[str]]:
    """The carried packages that are needed, and a line for each that is lacking.

    A package of this Python's own is taken where its version will do, and whoever installed it has
    installed what it needs.
    """
    names, lacking, waiting = list[str](), list[str](), list(wanted)
    while waiting:
        need = waiting.pop(0)
        name, limits = split(need)
        here = _own_version(name)
        if name in names or (here is not None and meets(here, limits)):
            continue
        wheel = carried.get(name)
        if wheel is not None and meets(wheel.version, limits):
            names.append(name)
            waiting += wheel.needs
        elif (line := _line(need, here)) not in lacking:
            lacking.append(line)
    return names, lacking


def _line(need: str, here: str | None) -> str:
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"install it, or carry it: scripts/gpu-check --pack --python {python}"
    if need == TORCH:
        remedy = "install it: torch is never carried"
    return f"lacking: {need} ({f'{here} is here' if here else 'none is here'}); {remedy}"


def _own_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def requirements() -> list[str]:
    """What haiprof itself needs, as pyproject.toml has it."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None, "pyproject.toml lists the dependencies"
    return re.findall(r'"([^"]+)"', block[1])


def core_dependencies() -> list[str]:
    """What haiprof itself needs under this Python, less what no item uses."""
    skip = NOT_NEEDED | ({"tomli"} if sys.version_info >= (3, 11) else set())
    found = [need.partition(";")[0].strip() for need in requirements()]
    return [need for need in found if split(need)[0] not in skip]


def split(need: str) -> tuple[str, str]:
    """Name, as indexes spell it, and limits of a need without marker: `name>=1,<2`."""
    found = re.match(r"[A-Za-z0-9._-]+", need)
    assert found is not None, need
    limits = re.sub(r"\[.*?\]", "", need[found.end() :])
    return re.sub(r"[-_.]+", "-", found[0]).lower(), limits.strip(" ()")


def meets(version: str, limits: str) -> bool:
    """Whether a release is within limits such as `>=3,!=3.1,<4`, by its numbers alone."""
    return all(_meets_one(_numbers(version), limit.strip()) for limit in limits.split(",") if limit)


def _meets_one(release: list[int], limit: str) -> bool:
    found = re.match(r"(~=|[=!<>]=|[<>])\s*", limit)
    assert found is not None, limit
    sign, number = found[1], limit[found.end() :]
    bound = _numbers(number)
    pairs = list(itertools.zip_longest(release, bound, fillvalue=0))
    if number.endswith(".*"):
        pairs = pairs[: len(bound)]
    mine, other = [a for a, _ in pairs], [b for _, b in pairs]
    if sign == "~=":
        return mine >= other and mine[: len(bound) - 1] == bound[:-1]
    return {"==": mine == other, "!=": mine != other, ">=": mine >= other, "<=": mine <= other,
            ">": mine > other, "<": mine < other}[sign]  # fmt: skip


def _numbers(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    assert found is not None, version
    return [int(word) for word in found[0].split(".")]


def _put_first(site: Path) -> None:
    """In this process and in those that it starts."""
    sys.path.insert(0, str(site))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), before)))
    importlib.invalidate_caches()
    for name in [n for n in sys.modules if n.partition(".")[0] == "haiprof"]:
        del sys.modules[name]


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def fits(name: str) -> bool:
    """Whether a wheel is for this Python and machine, by its name."""
    python, abi, machine = name.removesuffix(XZ).removesuffix(".whl").split("-")[-3:]
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if machine != "any" and os.uname().machine not in machine:
        return False
    for tag in python.split("."):
        if tag in ("py3", own) or (abi == "abi3" and _minor(tag) <= sys.version_info.minor):
            return True
    return False


def _minor(tag: str) -> int:
    found = re.fullmatch(r"cp3(\d+)", tag)
    return int(found[1]) if found else 1 << 30


def open_wheel(path: Path) -> zipfile.ZipFile:
    """A wheel, or one whose pieces are stored and that is packed as a whole."""
    if path.suffix != XZ:
        return zipfile.ZipFile(path)
    try:
        import lzma
    except ImportError as error:
        raise LackingError("lacking: this Python was built without lzma; use another") from error
    return zipfile.ZipFile(io.BytesIO(lzma.decompress(path.read_bytes())))


def unpack(wheel: Path, site: Path) -> None:
    """Puts a wheel's content into a folder."""
    with open_wheel(wheel) as file:
        file.extractall(site)


def is_of_tree(wheel: Path) -> bool:
    """Whether every source file in haiprof's wheel is the one of this tree."""
    with open_wheel(wheel) as file:
        [record] = [name for name in file.namelist() if name.endswith(".dist-info/RECORD")]
        lines = file.read(record).decode().splitlines()
    rows = [line.rsplit(",", 2) for line in lines]
    sources = {name: digest for name, digest, _ in rows if name.endswith(".py")}
    tree = {str(p.relative_to(REPOSITORY)) for p in (REPOSITORY / "haiprof").rglob("*.py")}
    return set(sources) == tree and all(
        digest == _digest(REPOSITORY / name) for name, digest in sources.items()
    )


def _digest(path: Path) -> str:
    raw = hashlib.sha256(path.read_bytes()).digest()
    return "sha256=" + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
