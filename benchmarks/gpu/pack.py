"""Wheels for a machine without network: collected here, unpacked there, nothing installed.

A wheel is a zip of what belongs into site-packages; it is unpacked into a folder of its own that
comes first on the path and is removed afterwards.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "manylinux1_x86_64")  # fmt: skip
PRESENT = frozenset(
    ("jinja2", "markupsafe", "nvidia-ml-py", "numpy", "psutil", "rich", "typer", "narwhals",
     "packaging", "click", "shellingham", "typing-extensions", "markdown-it-py", "pygments")
)  # fmt: skip
"""What the machine's image has already (its package list; see docs/gpu-check.md)."""
# No item draws a figure or submits a job; Python 3.12 has tomllib.
NOT_NEEDED = frozenset(("plotly", "pyyaml", "tomli"))
LIMIT_BYTES = 58 << 20  # 64 MiB travel in all, and the tree has 5
MODULES = {"jinja2": "jinja2", "msgspec": "msgspec", "nvidia-ml-py": "pynvml", "numpy": "numpy",
           "polars": "polars", "rich": "rich", "typer": "typer"}  # fmt: skip
RUN = """\
One call of the device tool (the second and later ones with --only, or --minutes for what is left):
  command:   scripts/gpu-check --minutes 9.3 --out $OUT
  carry:     ["{folder}"]
  timeout_s: 600"""


# -- there -----------------------------------------------------------------------------------------


def use_wheels(wheels: Path, site: Path) -> str:
    """Puts carried packages on the path where this Python lacks them; says what is used.

    Args:
        wheels: The folder that was carried; it need not exist.
        site: Where they are unpacked to.
    """
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    words = []
    lacking = [name for name, module in MODULES.items() if not _importable(module)]
    carried = [path for path in found if fits(path.name)]
    own = [path for path in carried if path.name.startswith("haiprof-")]
    others = [path for path in carried if path not in own]
    if lacking and others:
        for path in others:
            unpack(path, site)
        words.append(f"{len(others)} packages from {wheels.name}/")
    if own and not _importable("haiprof.trace_format.kineto._native"):
        if is_of_tree(own[0]):
            unpack(own[0], site)
            words.append("haiprof's wheel")
        else:
            words.append("haiprof's tree: its wheel is of other sources")
    if site.is_dir():
        sys.path.insert(0, str(site))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), before)))
        importlib.invalidate_caches()
        for name in [n for n in sys.modules if n.partition(".")[0] == "haiprof"]:
            del sys.modules[name]
    still = [name for name in lacking if not _importable(MODULES[name])]
    if still:
        words.append(f"lacking {', '.join(still)}: what needs them fails (--pack collects them)")
    return "; ".join(words) or "all packages of this Python's own"


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def fits(name: str) -> bool:
    """Whether a wheel is for this Python and machine, by its name."""
    python, abi, machine = name.removesuffix(".whl").split("-")[-3:]
    own = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if machine != "any" and platform.machine() not in machine:
        return False
    for tag in python.split("."):
        if tag in ("py3", own) or (abi == "abi3" and _minor(tag) <= sys.version_info.minor):
            return True
    return False


def _minor(tag: str) -> int:
    found = re.fullmatch(r"cp3(\d+)", tag)
    return int(found[1]) if found else 1 << 30


def unpack(wheel: Path, site: Path) -> None:
    """Puts a wheel's content into a folder."""
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)


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


# -- here ------------------------------------------------------------------------------------------


def collect(folder: Path, python: str = PYTHON) -> int:
    """Downloads what the machine lacks, builds haiprof's wheel; prints how to run there.

    Args:
        folder: Where the wheels go; what was in it is gone.
        python: The version of the machine's Python.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    wanted, known = core_dependencies(), set(PRESENT | NOT_NEEDED)
    while wanted:
        name = wanted.pop()
        if name not in known:
            known.add(name)
            wanted |= download(name, folder, python)
    print(build_wheel(folder, python))
    size = sum(path.stat().st_size for path in folder.iterdir())
    for path in sorted(folder.iterdir()):
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path.name}")
    print(f"{size / 2**20:6.1f} MiB in {folder}")
    if size > LIMIT_BYTES:
        print(f"too large: {LIMIT_BYTES >> 20} MiB may travel beside the tree", file=sys.stderr)
        return 1
    inside = folder.resolve().is_relative_to(REPOSITORY)
    print(RUN.format(folder=folder.resolve().relative_to(REPOSITORY) if inside else folder))
    return 0


def core_dependencies() -> set[str]:
    """Names of what haiprof itself needs, from pyproject.toml."""
    text = (REPOSITORY / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert block is not None, "pyproject.toml lists the dependencies"
    return {plain_name(line) for line in re.findall(r'"([^"]+)"', block[1])}


def plain_name(requirement: str) -> str:
    """The name in a requirement, as indexes spell it."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def download(name: str, folder: Path, python: str) -> set[str]:
    """One wheel, in the version of constraints.txt; the names of what it needs itself."""
    before = set(folder.iterdir())
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--python-version", python, "--implementation", "cp", "-d", str(folder), "-c",
               str(REPOSITORY / "constraints.txt")]  # fmt: skip
    for each in PLATFORMS:
        command += ["--platform", each]
    subprocess.run([*command, name], check=True, stdout=subprocess.DEVNULL)
    [wheel] = set(folder.iterdir()) - before
    with zipfile.ZipFile(wheel) as file:
        [about] = [n for n in file.namelist() if n.endswith(".dist-info/METADATA")]
        lines = file.read(about).decode().splitlines()
    needs = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    return {plain_name(need) for need in needs if "extra ==" not in need}


def build_wheel(folder: Path, version: str) -> str:
    """Haiprof's own wheel with its compiled part, where that Python is here; else why not.

    It is built from a copy, so that the tree stays as it is.
    """
    python = find_python(version)
    if python is None:
        return f"no Python {version} here: the tree is used as it is, traces load slower"
    with tempfile.TemporaryDirectory() as copy:
        for name in ("pyproject.toml", "setup.py", "README.md", "haiprof"):
            source = REPOSITORY / name
            skip = shutil.ignore_patterns("__pycache__", "*.so")
            (shutil.copytree(source, Path(copy) / name, ignore=skip) if source.is_dir()
             else shutil.copyfile(source, Path(copy) / name))  # fmt: skip
        command = [python, "-m", "pip", "wheel", "--no-deps", "-w", str(folder), copy]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"haiprof's wheel could not be built: {done.stderr.strip()[-400:]}"
    return f"haiprof's wheel built by {python}"


def find_python(version: str) -> str | None:
    """An interpreter of a version: on PATH, or pyenv's."""
    places = [shutil.which(f"python{version}")]
    places += [str(p) for p in Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}")]
    for place in filter(None, places):
        done = subprocess.run([place, "-c", "import sys"], capture_output=True, check=False)
        if done.returncode == 0:
            return place
    return None
