"""Numbers by name from files of one `name value` line each, such as meminfo, vmstat, cpu.stat."""

from __future__ import annotations

from collections.abc import Sequence


class NamedNumbers:
    """Finds lines by their beginning; remembers the position of each, as their order is stable."""

    def __init__(self, heads: Sequence[str]) -> None:
        self._heads = [head.encode() for head in heads]
        self._places: list[int | None] = []
        self._line_count = -1

    def __call__(self, content: bytes) -> list[int | None]:
        """One number per head, None where there is no such line."""
        lines = content.split(b"\n")
        if not self._fits(lines):
            self._line_count = len(lines)
            self._places = [_find_line(lines, head) for head in self._heads]
        return [
            None if at is None else int(lines[at][len(head) :].split(None, 1)[0])
            for head, at in zip(self._heads, self._places, strict=True)
        ]

    def _fits(self, lines: Sequence[bytes]) -> bool:
        return len(lines) == self._line_count and all(
            at is None or lines[at].startswith(head)
            for head, at in zip(self._heads, self._places, strict=True)
        )


def _find_line(lines: Sequence[bytes], head: bytes) -> int | None:
    return next((at for at, line in enumerate(lines) if line.startswith(head)), None)
