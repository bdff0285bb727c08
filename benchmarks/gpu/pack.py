"""Collects wheels for a machine without network: of haiprof, and of all it needs but torch."""

from __future__ import annotations

import io
import json
import lzma
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from benchmarks.gpu.carried import PYTHON, REPOSITORY, WHEELS, XZ, core_dependencies

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
