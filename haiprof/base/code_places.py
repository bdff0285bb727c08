"""Whose code a frame is: the user's own, or a library's."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LIBRARY = re.compile(
    r"[/\\](?:(?:site|dist)-packages|torchinductor[^/\\]*|lib(?:64)?[/\\]python\d[^/\\]*)[/\\]"
)
_TYPED = ("<string>", "<stdin>")
"""Code of `python -c` and of a prompt is the user's; dataclasses write dunder methods there."""
_INSTALLED = re.compile(
    r".*[/\\](?:(?:site|dist)-packages|lib(?:64)?[/\\]python\d[^/\\]*)[/\\](.*)", re.DOTALL
)


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
