"""The compiled parts with AddressSanitizer and UndefinedBehaviorSanitizer in them.

As a plugin of pytest (`-p tests.fuzz.sanitized`), or imported before what uses them, it puts those
builds in the place of the installed ones.
"""

from __future__ import annotations

import ast
import ctypes
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import haiprof

NATIVE_ENV = "HAIPROF_FUZZ_NATIVE"
"""Folder of the builds to take; set by `environment`."""
_PACKAGE = Path(haiprof.__file__).parent


def _parts() -> dict[str, tuple[Path, ...]]:
    """Sources of each part in C by its module, as setup.py builds them; that in C++ is not here."""
    for statement in ast.parse((_PACKAGE.parent / "setup.py").read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "_PARTS":
            return {
                f"haiprof.{name}": tuple(_PACKAGE / source for source in sources)
                for name, sources in ast.literal_eval(statement.value).items()
                if all(source.endswith(".c") for source in sources)
            }
    raise AssertionError("setup.py names no parts")


_SOURCES = _parts()
_FLAGS = (
    "-shared", "-fPIC", "-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined", "-fsanitize-coverage=trace-pc",
)  # fmt: skip
_EDGES = Path(__file__).with_name("edges.c")
_LIBRARIES = ("libasan.so", "libubsan.so")


class NoSanitizerError(Exception):
    """No compiler here that can build with sanitizers; the message says what is missing."""


def _compiler() -> str:
    name = os.environ.get("CC", "gcc")
    if shutil.which(name) is None:
        raise NoSanitizerError(f"no compiler ({name})")
    return name


def _libraries(compiler: str) -> list[str]:
    found = []
    for name in _LIBRARIES:
        done = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False
        )
        path = done.stdout.strip()
        if not os.path.isabs(path) or not os.path.exists(path):
            raise NoSanitizerError(f"{compiler} has no {name}")
        found.append(path)
    return found


def build(folder: Path) -> Path:
    """Compiles them into a folder, and returns it."""
    compiler = _compiler()
    _libraries(compiler)
    include = f"-I{sysconfig.get_paths()['include']}"
    for name, sources in _SOURCES.items():
        target = str(_library(folder, name))
        done = subprocess.run(
            [compiler, *_FLAGS, include, *map(str, sources), str(_EDGES), "-o", target],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise NoSanitizerError(f"{compiler} cannot build it: {done.stderr.strip()[-400:]}")
    return folder


def _library(folder: Path, name: str) -> Path:
    return folder / f"{name.rpartition('.')[2]}.so"


def environment(folder: Path) -> dict[str, str]:
    """Variables for a Python that loads them: objects are allocated where a stray read is seen."""
    return {
        **os.environ,
        NATIVE_ENV: str(folder),
        "LD_PRELOAD": " ".join(_libraries(_compiler())),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:"
        "max_allocation_size_mb=8192",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:abort_on_error=1",
        "PYTHONMALLOC": "malloc",
    }


def edge_counter() -> Callable[[], int]:
    """Asks those builds how many edges of their control flow ran for the first time since then.

    None ever do in the installed ones.
    """
    folder = os.environ.get(NATIVE_ENV)
    if not folder:
        return int
    counts = [ctypes.CDLL(str(_library(Path(folder), name))).fresh_edges for name in _SOURCES]
    return lambda: sum(count() for count in counts)


def install() -> bool:
    """Puts the builds that the environment names in place; whether there are any."""
    folder = os.environ.get(NATIVE_ENV)
    if not folder:
        return False
    for name in _SOURCES:
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, _library(Path(folder), name))
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
            package, _, attribute = name.rpartition(".")
            setattr(importlib.import_module(package), attribute, module)
    return True


install()
