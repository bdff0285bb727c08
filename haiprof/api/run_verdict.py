"""The verdict as Python code gets it: a card in a notebook and in print(), a line in a shell."""

from __future__ import annotations

import html
from dataclasses import dataclass, fields

from haiprof.diagnosis.verdict import Verdict


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunVerdict(Verdict):
    """What was found in a run; its fields are those of `haiprof verdict --json`."""

    def __repr__(self) -> str:
        """One line: the run and its headline."""
        return f"<verdict on {self.name}: {self.headline}>"

    def __str__(self) -> str:
        """The card, as the terminal shows it."""
        from haiprof.show.card import verdict_text

        return verdict_text(self)

    def _repr_html_(self) -> str:
        """The card, for a notebook."""
        style = "line-height: 1.2; font-family: Menlo, Consolas, monospace; white-space: pre"
        return f'<pre style="{style}">{html.escape(str(self))}</pre>'


def as_run_verdict(verdict: Verdict) -> RunVerdict:
    """The same verdict, with its card."""
    return RunVerdict(**{field.name: getattr(verdict, field.name) for field in fields(verdict)})
