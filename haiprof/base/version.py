"""Which haiprof this is, and where its package lies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__version__ = "0.3.0"
PACKAGE = Path(__file__).resolve().parents[1]
"""The folder `haiprof`; its parent goes on the path of processes that haiprof starts."""


def read_data(name: str) -> Any:  # noqa: ANN401 - any JSON
    """The content of a JSON file of the package: `agent/nsys_words.json`."""
    return json.loads((PACKAGE / name).read_bytes())
