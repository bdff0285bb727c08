"""The command of one node: `haiprof torchrun` once, whatever engine starts it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from string import Template

from haiprof.launch.submit.spec import JobSpec

STATIC_PORT = 29500
"""Of the first node's rendezvous, where every job has nodes of its own."""


class Expanded(str):
    """A word that the engine expands; all others are literal."""

    __slots__ = ()


def node_words(
    spec: JobSpec,
    *,
    rendezvous: Sequence[str],
    haiprof: Sequence[str] = ("haiprof",),
    torchrun: str = "torchrun",
    run_id: str | None = None,
) -> list[str]:
    """What each node runs."""
    words = [*haiprof, *haiprof_words(spec), *([] if run_id is None else [run_id])]
    meeting = list(rendezvous) if spec.nodes > 1 else ["--standalone"]
    return [*words, "--", torchrun, *rank_words(spec), *meeting, *script_words(spec)]


def rank_words(spec: JobSpec) -> list[str]:
    """How many processes there are, for torchrun."""
    return [f"--nnodes={spec.nodes}", f"--nproc-per-node={spec.ranks}"]


def script_words(spec: JobSpec) -> list[str]:
    """What torchrun starts: after -- its parser looks at no word, or `--n 5` were its own."""
    words = [_not_a_macro(word) for word in (spec.program, *spec.arguments)]
    return [*(["-m"] if spec.module else []), "--", *words]


def _not_a_macro(word: str) -> str:
    """Torchrun puts the rank's number for $local_rank, and $ for $$: words that hold neither stay.

    Source: torch.distributed.elastic.utils.api.macros.
    """
    altered = Template(word).safe_substitute(local_rank="") != word
    return word.replace("$", "$$") if altered else word


def haiprof_words(spec: JobSpec) -> list[str]:
    """`run` and haiprof's options, each once."""
    return ["run", *(f"--{name}={text}" for name, text in spec.options.items())]


def c10d(endpoint: str, identity: str) -> list[str]:
    """Options of torchrun for nodes that meet at the first one, whoever that is."""
    return [
        "--rdzv-backend=c10d",
        type(endpoint)(f"--rdzv-endpoint={endpoint}"),
        type(identity)(f"--rdzv-id={identity}"),
    ]


def static(address: str, node_rank: str) -> list[str]:
    """Options of torchrun for nodes that were given numbers."""
    return [
        type(node_rank)(f"--node-rank={node_rank}"),
        type(address)(f"--master-addr={address}"),
        f"--master-port={STATIC_PORT}",
    ]


def shell_line(words: Sequence[str]) -> str:
    """One command for a shell; an `Expanded` word goes between double quotes."""
    return " ".join(f'"{w}"' if isinstance(w, Expanded) else shlex.quote(w) for w in words)


def own_torchrun() -> str:
    """The command torchrun beside this interpreter, else whatever has that name."""
    installed = Path(sys.executable).parent / "torchrun"
    return str(installed) if installed.exists() else "torchrun"
