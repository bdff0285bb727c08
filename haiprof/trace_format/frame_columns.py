"""Columns of a frame, declared once: the type and the meaning of each."""

from __future__ import annotations

from collections.abc import Mapping

import polars as pl

Type = pl.DataType | type[pl.DataType]
Columns = Mapping[str, tuple[Type, str]]
"""By name, with the unit: the type and the meaning, which SQL shows."""


def types_of(columns: Columns) -> dict[str, Type]:
    """The types of columns, as polars takes a schema."""
    return {name: dtype for name, (dtype, _) in columns.items()}
