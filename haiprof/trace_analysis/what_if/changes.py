"""Changes of a what-if: faster kernels, operators, launches, loader, network, or rank."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from haiprof.base.errors import UsageError

KERNEL, OPERATOR, LOADER, NETWORK, RANK = "kernel", "operator", "loader", "network", "rank"
LAUNCHES, COLLECTIVE, TOGETHER = "launches", "collective", "together"
LOADER_NAME = r"^enumerate\(DataLoader\)"
"""The annotation that PyTorch puts around a loader's `next`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing made faster; made by the functions below."""

    kind: str
    """`kernel`, `operator`, `launches`, `loader`, `network`, `collective` or `rank`."""
    name: str = ""
    """Regular expression that names of kernels, operators or collectives must contain."""
    speedup: float = math.inf
    """How many times as fast; infinite: it takes no time."""
    rank: int | None = None
    """Which rank becomes as fast as the others; None with kind `rank` evens out all of them."""
    shown: str = ""
    """Shown in place of the expression."""
    parts: tuple[Change, ...] = ()
    """Of kind `together`: all of them at once."""

    def __post_init__(self) -> None:
        """Checks what was asked for."""
        if not self.speedup > 0:  # NaN too
            raise UsageError(f"what-if: {self.speedup} times as fast is no speed-up")
        try:
            re.compile(self.name)
        except re.error as error:
            raise UsageError(f"what-if: {self.name!r} is no regular expression: {error}") from error

    def __str__(self) -> str:
        """Such as `kernel gemm 2x`."""
        if self.kind == TOGETHER:
            return " and ".join(map(str, self.parts))
        if self.kind == RANK:
            return "all ranks alike" if self.rank is None else f"rank {self.rank} as the others"
        times = "takes no time" if math.isinf(self.speedup) else f"{self.speedup:g}x"
        name = self.shown or ("" if self.kind == LOADER else self.name)
        return " ".join(part for part in (self.kind, name, times) if part)


def faster_kernel(name: str, speedup: float = math.inf) -> Change:
    """Kernels whose names contain an expression; of collectives the transfer, not the waiting."""
    return Change(kind=KERNEL, name=name, speedup=speedup)


def faster_operator(name: str, speedup: float = math.inf) -> Change:
    """Operators: their time on the CPU, operators inside included, and the kernels they launch."""
    return Change(kind=OPERATOR, name=name, speedup=speedup)


def faster_launches(speedup: float = math.inf) -> Change:
    """Calls that put work on a GPU: their time on the CPU, not what they launch."""
    return Change(kind=LAUNCHES, speedup=speedup)


def faster_loader(speedup: float = math.inf) -> Change:
    """What a PyTorch DataLoader does for a batch: the workers' work, or the main process's."""
    return Change(kind=LOADER, name=LOADER_NAME, speedup=speedup)


def faster_collective(name: str, speedup: float = math.inf) -> Change:
    """The transfer of collectives whose kind (`all_reduce`) or name contains an expression."""
    return Change(kind=COLLECTIVE, name=name, speedup=speedup)


def together(*changes: Change) -> Change:
    """Several changes at once, such as half the batch: the loader and all operators."""
    if any(change.kind == RANK for change in changes):
        raise UsageError("what-if: a rank like the others goes with no other change")
    return Change(kind=TOGETHER, parts=changes)


def faster_network(speedup: float) -> Change:
    """The transfer of collectives: from when the last rank has arrived."""
    return Change(kind=NETWORK, speedup=speedup)


def rank_as_others(rank: int | None = None) -> Change:
    """One rank computes, on CPU and GPU, as fast as the middle of the others; None: all alike."""
    return Change(kind=RANK, rank=rank)
