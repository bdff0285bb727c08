"""Which haiprof this is, and where its package lies."""

from __future__ import annotations

from pathlib import Path

__version__ = "0.3.0"
PACKAGE = Path(__file__).resolve().parents[1]
"""The folder `haiprof`; its parent goes on the path of processes that haiprof starts."""
