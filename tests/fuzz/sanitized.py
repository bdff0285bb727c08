"""The compiled scanner with AddressSanitizer and UndefinedBehaviorSanitizer in it.

As a plugin of pytest (`-p tests.fuzz.sanitized`), or imported before
`haiprof.trace_format.kineto.native`, it puts that build in the place of the installed one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import haiprof.trace_format.kineto

NATIVE_ENV = "HAIPROF_FUZZ_NATIVE"
"""Path of the build to take; set by `environment`."""
_NAME = "haiprof.trace_format.kineto._native"
_SOURCE = Path(haiprof.trace_format.kineto.__file__).with_name("native.c")
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
    """Compiles the scanner into a folder.

    Raises:
        NoSanitizerError: That cannot be done here.
    """
    compiler = _compiler()
    _libraries(compiler)
    target = folder / "_native.so"
    include = f"-I{sysconfig.get_paths()['include']}"
    done = subprocess.run(
        [compiler, *_FLAGS, include, str(_SOURCE), str(_EDGES), "-o", str(target)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise NoSanitizerError(f"{compiler} cannot build it: {done.stderr.strip()[-400:]}")
    return target


def environment(library: Path) -> dict[str, str]:
    """Variables for a Python that loads it: objects are allocated where a stray read is seen."""
    return {
        **os.environ,
        NATIVE_ENV: str(library),
        "LD_PRELOAD": " ".join(_libraries(_compiler())),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:"
        "max_allocation_size_mb=8192",
        "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1:abort_on_error=1",
        "PYTHONMALLOC": "malloc",
    }


def edge_counter() -> Callable[[], int]:
    """Asks that build how many edges of its control flow ran for the first time since last asked.

    None ever do in the installed one.
    """
    path = os.environ.get(NATIVE_ENV)
    if not path:
        return int
    count: Callable[[], int] = ctypes.CDLL(path).fresh_edges
    return count


def install() -> bool:
    """Puts the build that the environment names in place; whether there is one."""
    path = os.environ.get(NATIVE_ENV)
    if not path or _NAME in sys.modules:
        return _NAME in sys.modules and bool(path)
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    spec.loader.exec_module(module)
    haiprof.trace_format.kineto._native = module
    return True


install()
