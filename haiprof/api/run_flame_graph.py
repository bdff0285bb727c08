"""The flame graph as Python code gets it: drawn in a notebook, or written as a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from haiprof.run_analysis.flame_graph import FlameGraph
from haiprof.show.flame import RunFlames
from haiprof.show.run_header import RunHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFlameGraph:
    """Lines of user code and what they call, by their time per step."""

    flames: RunFlames
    header: RunHeader

    @property
    def graph(self) -> FlameGraph:
        """The tree of frames, with the time of each rank."""
        return self.flames.graph

    def write(self, path: str | Path) -> Path:
        """Writes it as a self-contained page; returns its path.

        Raises:
            UsageError: The file cannot be written.
        """
        from haiprof.show.figures.style import write_text

        return write_text(Path(path), self._page())

    def __repr__(self) -> str:
        """What it rests on."""
        return f"<flame graph of {self.flames.run}: {self.flames.missing or self.flames.basis}>"

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for a notebook."""
        from haiprof.show.show import page_frame

        return page_frame(self._page(), "Flame graph")

    def _page(self) -> str:
        from haiprof.show.page.render import lines_html

        return lines_html(self.flames, self.header)
