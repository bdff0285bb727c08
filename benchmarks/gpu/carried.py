"""Packages carried to a machine without network: wheels beside the tree, and the packed tree.

pip installs them into a folder of their own, first on the path and removed afterwards.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

try:
    from packaging.requirements import Requirement
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename
except ImportError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
    from pip._vendor.packaging.tags import sys_tags  # type: ignore[assignment]
    from pip._vendor.packaging.utils import parse_wheel_filename  # type: ignore[assignment]

REPOSITORY = Path(__file__).parents[2]
WHEELS = REPOSITORY / ".whl"
XZ = ".xz"
PYTHON = "3.12"  # of the machine that is lent now and then
OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
TORCH = "torch>=2.5"  # too large to be carried: it is the machine's own
# No item draws a figure or submits a job.
NOT_NEEDED = frozenset(("plotly", "pyyaml"))


class LackingError(Exception):
    """Packages that are neither this Python's own nor carried: a line for each."""


def use_wheels(wheels: Path, folder: Path) -> str:
    """Puts carried packages on the path where this Python lacks them; says what is used."""
    carried, site = unpack(wheels, folder / "wheels"), folder / "site"
    wanted = [need for need in [*core_dependencies(), TORCH] if not _is_met(need)]
    lacking = [need for need in wanted if Requirement(need).name not in carried]
    if lacking:
        raise LackingError("\n".join(map(_line, lacking)))
    told = []
    if wanted:
        _install(site, "--find-links", str(folder / "wheels"), *wanted)
        told.append(f"from {wheels.name}/, with what they need: {', '.join(wanted)}")
    own = carried.get("haiprof")
    if own is not None and not _importable("haiprof.trace_format.kineto._native"):
        if is_of_tree(own):
            _install(site, "--no-deps", str(own))
            told.append("haiprof's wheel")
        else:
            told.append("haiprof's tree: its wheel is of other sources")
    if site.is_dir():
        _put_first(site)
    return "; ".join(told) or "all packages of this Python's own"


def unpack(wheels: Path, folder: Path) -> dict[str, Path]:
    """What is carried for this Python and machine, by name, as wheels in a folder."""
    folder.mkdir()
    found, tags = {}, frozenset(sys_tags())
    for path in wheels.glob("*.whl*"):
        wheel = folder / path.name.removesuffix(XZ)
        name, _, _, fits = parse_wheel_filename(wheel.name)
        if not fits & tags:
            continue
        content = path.read_bytes()
        if path.suffix == XZ:
            import lzma  # some Pythons are built without it

            content = lzma.decompress(content)
        wheel.write_bytes(content)
        found[str(name)] = wheel
    return found


def core_dependencies(python: str = OWN_PYTHON) -> list[str]:
    """What haiprof itself needs under a Python, less what no item uses."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None, "pyproject.toml lists the dependencies"
    needs = [Requirement(need) for need in re.findall(r'"([^"]+)"', block[1])]
    there = {"python_version": python}
    needs = [need for need in needs if need.marker is None or need.marker.evaluate(there)]
    return [f"{n.name}{n.specifier}" for n in needs if n.name not in NOT_NEEDED]


def _is_met(need: str) -> bool:
    here = _own_version(Requirement(need).name)
    return here is not None and Requirement(need).specifier.contains(here, prereleases=True)


def _line(need: str) -> str:
    here = _own_version(Requirement(need).name)
    remedy = f"install it, or carry it: scripts/gpu-check --pack --python {OWN_PYTHON}"
    if need == TORCH:
        remedy = "install it: torch is never carried"
    return f"lacking: {need} ({f'{here} is here' if here else 'none is here'}); {remedy}"


def _own_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _install(site: Path, *words: str) -> None:
    """By pip, from files alone."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    pip += ["--no-index", "--no-compile", "--upgrade", "--target", str(site)]
    done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise LackingError(f"lacking: {done.stderr.strip()}")


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


def is_of_tree(wheel: Path) -> bool:
    """Whether every source file in haiprof's wheel is the one of this tree."""
    with zipfile.ZipFile(wheel) as file:
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


PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "manylinux1_x86_64")  # fmt: skip
TRAVELS_BYTES = 64 << 20  # the tree and what is carried beside it, all in all
LARGE_BYTES = 4 << 20  # from here on a wheel is packed anew: polars takes 38 MiB in place of 51
PACKING = ({"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 1})
RUN = """\
One call of the device tool (the second and later ones with --only, or --minutes for what is left):
  command:   {command}
  carry:     {carry}
  timeout_s: 600"""
COMMAND = "scripts/gpu-check --minutes 9.3 --out $OUT"


def collect(folder: Path, python: str = PYTHON) -> int:
    """Downloads all that haiprof needs there, builds haiprof's wheel; prints how to run there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--only-binary=:all:", "--implementation",
               "cp", "--python-version", python, "-d", str(folder), "-c",
               str(REPOSITORY / "constraints.txt"), *core_dependencies(python)]  # fmt: skip
    for each in PLATFORMS:
        command += ["--platform", each]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(build_wheel(folder))
    for wheel in folder.iterdir():
        if wheel.stat().st_size > LARGE_BYTES:
            pack_anew(wheel)
    return report(folder)


def report(folder: Path) -> int:
    """Says what is in the folder, whether it may travel, and how to run there."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}")
    tree = tree_bytes()
    print(f"{size / 2**20:6.1f} MiB in {folder}, {tree / 2**20:.1f} MiB in the tree")
    if size + tree > TRAVELS_BYTES:
        print(f"too large: {TRAVELS_BYTES >> 20} MiB may travel in all", file=sys.stderr)
        return 1
    folder = folder.resolve()
    if not folder.is_relative_to(REPOSITORY):
        print(f"{folder} is outside the tree: what is carried must be inside, as .whl/ is")
        return 0
    name = str(folder.relative_to(REPOSITORY))
    more = "" if folder == WHEELS.resolve() else f" --wheels {name}"
    print(RUN.format(command=COMMAND + more, carry=json.dumps([name])))
    return 0


def tree_bytes() -> int:
    """Of the files that travel without being carried: tracked, or untracked and not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True)
    paths = [REPOSITORY / name.decode() for name in set(done.stdout.split(b"\0")) if name]
    return sum(path.lstat().st_size for path in paths if path.exists())


def pack_anew(wheel: Path) -> None:
    """The same content in a smaller file, whose name has a further suffix."""
    stored = io.BytesIO()
    with zipfile.ZipFile(wheel) as file, zipfile.ZipFile(stored, "w") as copy:
        for each in file.infolist():
            copy.writestr(each, file.read(each), zipfile.ZIP_STORED)
    packed = lzma.compress(stored.getvalue(), filters=list(PACKING))
    wheel.with_name(wheel.name + XZ).write_bytes(packed)
    wheel.unlink()


def build_wheel(folder: Path) -> str:
    """Haiprof's own wheel with its compiled parts, for every Python; what became of it.

    It is built from a copy, so that the tree stays as it is.
    """
    with tempfile.TemporaryDirectory() as copy:
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "haiprof"):
            source = REPOSITORY / name
            skip = shutil.ignore_patterns("__pycache__", "*.so")
            (shutil.copytree(source, Path(copy) / name, ignore=skip) if source.is_dir()
             else shutil.copyfile(source, Path(copy) / name))  # fmt: skip
        command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(folder), copy]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"haiprof's wheel could not be built: {done.stderr.strip()[-400:]}"
    return "haiprof's wheel is built"
