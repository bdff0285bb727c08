"""The specification of a submitted job, the same for every engine, checked once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from haiprof.base.errors import UsageError

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
