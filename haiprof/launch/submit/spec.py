"""The specification of a submitted job, its haiprof options, and the command of one node."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from haiprof.base.errors import UsageError
from haiprof.base.options import (
    OPTIONS,
    merge_options,
    option_spec,
    options_from_environment,
    options_from_files,
    parse_dotted,
    parse_value,
    safe_name,
)


def resolve_options(
    dotted: Sequence[str],
    given: Mapping[str, str | None],
    environ: Mapping[str, str],
    *,
    program: str,
    pyproject: Path = Path("pyproject.toml"),
) -> tuple[dict[str, str], Path]:
    """What the job's command line says, so that nothing has to travel beside it."""
    texts = {spec.name: environ[spec.env] for spec in OPTIONS if environ.get(spec.env)}
    parsed = options_from_environment(environ)
    texts |= {k: f"{v:g}" for k, v in parsed.items() if k.startswith("interval.")}
    for word in dotted:
        parse_dotted(word)
        name, _, text = word.removeprefix("profile.").partition("=")
        spec = option_spec(name)
        texts[name if spec is None else spec.name] = text
    texts |= {name: text for name, text in given.items() if text is not None}
    options = merge_options(
        options_from_files(pyproject),
        options_from_environment(environ),
        dict(parse_value(name, text, origin=f"--{name}") for name, text in texts.items()),
    )
    name = options.name or Path(program).name.removesuffix(".py")
    texts |= {"name": safe_name(name), "log-dir": options.address or str(options.log_dir)}
    return texts, options.log_dir


_MAX_NODES = 100_000
# What sbatch's own parser, which knows quotes, escapes and comments, reads as one plain word.
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:;@+*&|!/\[\]()=%-]*\Z")
_DIRECTIVE = re.compile(r"[a-z][a-z0-9-]+\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?\Z")
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d+)\Z")


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One job."""

    program: str
    """A Python file, the module where `module` says so, or any other program (here only)."""
    module: bool = False
    arguments: tuple[str, ...] = ()
    """The script's own, untouched."""
    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    """haiprof's options as text, by their names on its command line; each once."""
    nodes: int = 1
    ranks_per_node: int | None = None
    gpus_per_node: int | None = None
    gpu_type: str | None = None
    """What the engine calls the GPUs, such as H100."""
    cpus_per_node: int | None = None
    time_limit_s: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set for the job, beside what its engine passes on."""
    requeue: bool = False
    partition: str | None = None
    account: str | None = None
    directives: Mapping[str, str] = field(default_factory=dict)
    """Further options of sbatch, by name; empty text for a switch."""
    image: str | None = None
    """Container image."""
    claim: str | None = None
    """PersistentVolumeClaim that holds the log directory."""
    haiprof: tuple[str, ...] = ("haiprof",)
    """The command haiprof where nodes have the same file system as this one."""

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= _MAX_NODES:
            raise UsageError(f"--nodes {self.nodes}: 1 to {_MAX_NODES}")
        for flag, count in (
            ("--nproc-per-node", self.ranks_per_node),
            ("--gpus-per-node", self.gpus_per_node),
            ("--cpus-per-node", self.cpus_per_node),
        ):
            if count is not None and count < 1:
                raise UsageError(f"{flag} {count}: 1 or more")
        for flag, word in (
            ("--partition", self.partition),
            ("--account", self.account),
            ("--gpu-type", self.gpu_type),
        ):
            if word is not None and not _PLAIN.match(word):
                raise UsageError(f"{flag} {word!r}: no such name can be")
        for name, value in self.directives.items():
            if not _DIRECTIVE.match(name) or (value and not _PLAIN.match(value)):
                raise UsageError(f"--sbatch {name}={value}: not an option that sbatch reads")

    @property
    def is_python(self) -> bool:
        """Whether Python runs the program, so that torchrun can start it."""
        return self.module or self.program.endswith(".py")

    @property
    def ranks(self) -> int:
        """Processes on each node."""
        return self.ranks_per_node or self.gpus_per_node or 1

    @property
    def time_limit(self) -> str | None:
        """As Slurm writes it: days-hours:minutes:seconds."""
        if self.time_limit_s is None:
            return None
        minutes, seconds = divmod(self.time_limit_s, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours // 24}-{hours % 24:02}:{minutes:02}:{seconds:02}"


def parse_time_limit(text: str) -> int:
    """Seconds of a limit as Slurm takes it: MINUTES, [HOURS:]MINUTES:SECONDS, DAYS-HOURS[:...]."""
    days, clock = _DAYS.match(text), _CLOCK.match(text)
    if text.isascii() and text.isdecimal():
        seconds = int(text) * 60
    elif days is not None:
        d, hours, minutes, rest = (int(group or 0) for group in days.groups())
        seconds = ((d * 24 + hours) * 60 + minutes) * 60 + rest
    elif clock is not None:
        hours, minutes, rest = (int(group or 0) for group in clock.groups())
        seconds = (hours * 60 + minutes) * 60 + rest
    else:
        raise UsageError(
            f"--time-limit {text!r}: not a time", hint="minutes, HH:MM:SS, or DAYS-HH:MM:SS"
        )
    if not seconds:
        raise UsageError(f"--time-limit {text}: more than 0")
    return seconds


def parse_environment(words: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of `--env NAME=VALUE`; `--env NAME` takes the value that it has here."""
    found: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _VARIABLE.match(name):
            raise UsageError(f"--env {word!r}: expected NAME=VALUE, or NAME")
        if not equals and name not in environ:
            raise UsageError(f"--env {name}: not set here", hint=f"--env {name}=VALUE")
        found[name] = value if equals else environ[name]
    return found


def parse_directives(words: Iterable[str]) -> dict[str, str]:
    """Options of `--sbatch NAME=VALUE`, or `--sbatch NAME` for a switch."""
    pairs = (word.removeprefix("--").partition("=") for word in words)
    return {name: value for name, _, value in pairs}


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
    """Options of haiprof, each once."""
    return [f"--{name}={text}" for name, text in spec.options.items()]


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
