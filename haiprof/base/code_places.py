"""Whose code a frame is: the user's own, or a library's; how its place is written."""

from __future__ import annotations

import re
from collections.abc import Sequence

from haiprof.base.units import visible

_LIBRARY = re.compile(
    r"[/\\](?:(?:site|dist)-packages|torchinductor[^/\\]*|lib(?:64)?[/\\]python\d[^/\\]*)[/\\]"
)
_TYPED = ("<string>", "<stdin>")
"""Code of `python -c` and of a prompt is the user's; dataclasses write dunder methods there."""
_INSTALLED = re.compile(
    r".*[/\\](?:(?:site|dist)-packages|lib(?:64)?[/\\]python\d[^/\\]*)[/\\](.*)", re.DOTALL
)
_PLACE_LIMIT = 200


def place_text(file: str, line: int | None, function: str) -> str:
    """`train.py:88 load_image`; the names are whatever the run directory or trace holds."""
    name = file.rpartition("/")[2]
    text = f"{name} {function}" if line is None else f"{name}:{line} {function}"
    return visible(" ".join(text[:_PLACE_LIMIT].split()))


def is_library(file: str, function: str = "", *, libraries: Sequence[str] = ()) -> bool:
    """Whether code is of an installed package, of Python itself or made by a library."""
    if file.startswith("<"):
        return file not in _TYPED or function.rpartition(".")[2].startswith("__")
    return bool(_LIBRARY.search(file)) or any(file.startswith(f"{x}/") for x in libraries if x)


def code_name(file: str, function: str) -> str:
    """A library's function as people import it: `PIL.Image.open`, `json.dumps`."""
    match = _INSTALLED.match(file)
    if match is None:
        return f"{file.rpartition('/')[2].removesuffix('.py')}.{function}"
    parts = match[1].removesuffix(".py").replace("\\", "/").split("/")
    parts = [part for part in parts if part != "__init__"]
    return ".".join((*parts, function))
