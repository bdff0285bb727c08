from collections.abc import Mapping

VERSION: int
Column = tuple[int, int, tuple[bytes, ...]]

class Scanner:
    def __init__(
        self,
        tables: tuple[tuple[str, bool, tuple[Column, ...]], ...],
        categories: tuple[tuple[bytes, int], ...],
        names: Mapping[object, int | None],
    ) -> None: ...
    def scan(self, piece: bytes, first: int) -> tuple[tuple[int, ...], bool] | None: ...
    def rows(self, table: int) -> int: ...
    def take(self, table: int) -> tuple[bytes, bytes, bytes, bytes, list[tuple[bytes, bytes]]]: ...
