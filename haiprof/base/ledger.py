"""The time ledger: one row per account of a step; with the residual they add up to the step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from haiprof.base.code_places import place_text

POSITIONS = (
    "input", "prepare", "forward", "loss", "backward", "gradients", "optimizer", "after_step",
    "evaluation", "checkpoint", "compile", "between_steps",
)  # fmt: skip
"""Where in a step time passes, by the order of its spans; on a device also `idle`."""
_POSITION_WORDS = {
    "prepare": "before forward", "gradients": "before optimizer", "after_step": "after optimizer",
}  # fmt: skip

PROBLEM_RATIO = 0.05
"""The one limit: an opportunity whose gain is, with 95 % certainty, at least this share of the step
is called a problem. What is below is a fact."""

_WHOLE_RATIO = 0.9  # of an account, an expression with so much of it stands for all
GROWING = "growing"  # when an account is paid that takes longer the longer the run lasts
EACH_STEP, NOT_KNOWN = "each step", "not known"
"""And where nothing tells it from steps that the machine made long, or nobody asked."""
_DOES = {
    "operators": "torch operators", "python": "Python",
    "wait: lock": "waiting for a lock or another thread", "wait: file": "waiting for a file",
    "wait: socket": "waiting for a network peer", "wait: pipe": "waiting for another process",
    "wait: process": "waiting for another process", "wait: sleep": "sleeping",
    "wait: device": "waiting for the device", "wait: other": "waiting",
    "wait: loader": "waiting for batches", "wait: peer": "waiting for other ranks",
    "wait: link": "exchanging data between ranks",
    "wait: interpreter lock": "waiting for the interpreter lock",
    "no core": "waiting for a CPU core", "page faults": "page faults",
    "garbage collection": "garbage collection", "unknown": "time that was not sampled",
}  # fmt: skip
"""Activities in words; native code is that of a package."""
TORCH_CALL = re.compile(
    r"\b(?:torch|torchvision|torchaudio|F|TF|nn)\.|"
    r"\.(?:backward|zero_grad|parameters|detach|cpu|cuda|unsqueeze|\w+_)\(|\.grad\b"
)
"""In an expression, what only torch is called by: `step` may be that of an environment."""
_CALL = re.compile(r"[\w\])]\(")
_OF_MODEL = ("forward", "backward")  # Here a method is a tensor's


def position_words(position: str) -> str:
    """`before optimizer` for `gradients`: a position as people read it."""
    return _POSITION_WORDS.get(position, position.replace("_", " "))


def activity_words(activity: str) -> str:
    """`waiting for a CPU core` for `no core`."""
    return _DOES.get(activity, activity)


def expression_text(expression: str | None) -> str:
    """An expression in one line; empty where it is a name alone, which tells nothing."""
    text = " ".join((expression or "").split())
    return "" if text.replace(".", "_").isidentifier() else text


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountPart:
    """What another line of the job's does of an account, where that is a considerable part."""

    file: str
    line: int
    function: str
    expression: str | None
    activity: str
    ratio: float  # its share of the account's time


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """One row: what one kind of work of one place in the code takes of the mean step."""

    ranks: tuple[int, ...]  # the ranks that have it, or the one that it is about; empty: all
    slowest_rank: int | None = None
    """Of several that have it, the one on which it clearly takes longest; None where none does."""
    position: str  # of POSITIONS: where most of it is
    activity: str
    """What the thread or the device did: `python`, `operators`, `native`, `wait: loader`, ..."""
    package: str | None = None
    """Whose code the innermost frame is: `job`, `torch`, `numpy`; None where no code is known."""
    file: str | None = None
    line: int | None = None
    function: str | None = None
    """The innermost line of the job's own code; None where none was sampled."""
    expression: str | None = None
    """The part of that line that ran, where it was recorded (Python 3.11 and newer)."""
    expression_ratio: float | None = None  # its share of the account's time
    also: AccountPart | None = None
    """The line that takes most of what that one leaves; None where it takes less than a quarter."""
    callees: tuple[str, ...] = ()
    """Functions of libraries below that line in which most of the time passes, outermost first."""
    callers: tuple[str, ...] = ()
    """The job's lines through which it came there, nearest first: `train.py:307 main`."""
    ns_per_step: float  # mean over all judged steps of the ranks
    low_ns: float
    high_ns: float  # where that lies with 95 % certainty
    needed: bool = False
    """Whether it is the model's own work, which no change of the code around it removes."""
    gain_ns: float = 0.0  # what the mean step of the job becomes shorter by without it
    gain_low_ns: float = 0.0
    gain_high_ns: float = 0.0
    when: str = EACH_STEP
    """When it is paid: `each step`, `every 20th step`, `since step 512`, `growing`, `not known`."""
    explanation: str | None = None  # key of the explanation that speaks of it; None where none does
    elsewhere: tuple[str, ...] = ()  # other positions that hold a tenth of it or more

    @property
    def where(self) -> str:
        """`backward`, or `backward and others`, as people see it."""
        return position_words(self.position) + (" and others" if self.elsewhere else "")

    @property
    def in_words(self) -> str:
        """`waiting for a file in backward`, `Python between steps`: what is done, and where."""
        is_beside = self.where.startswith(("between ", "before ", "after "))
        return f"{self.does} {self.where}" if is_beside else f"{self.does} in {self.where}"

    @property
    def code(self) -> str:
        """Its expression in one line, with how much of the account it is.

        Empty where it is unknown, or a name alone, which tells nothing: `batch` of a loop over it.
        """
        text = expression_text(self.expression)
        ratio = 1.0 if self.expression_ratio is None else self.expression_ratio
        if not text or ratio >= _WHOLE_RATIO:
            return text
        return f"{'mostly' if ratio > 0.5 else 'among others'} {text}"

    @property
    def does(self) -> str:
        """What the thread did, in words: `Python`, `waiting for a file`, `numpy`."""
        package = None if self.package in (None, "job", "python") else self.package
        code = self.expression or ""
        by_name = TORCH_CALL.search(code) or self.position in _OF_MODEL
        is_torchs = by_name and ".tobytes(" not in code  # bytes are of an array
        calls_torch = package or self.needed or is_torchs
        if self.activity == "operators" and not calls_torch:
            # Of a tensor's method or an array's nothing tells which.
            text = expression_text(self.expression)
            is_call = not text or _CALL.search(text)
            return "native code" if is_call else "arithmetic on tensors or arrays"
        if self.activity == "wait: lock" and package:
            return f"waiting for a lock or for threads of {package}"
        return _DOES.get(self.activity, package or "native code")

    @property
    def paid(self) -> str:
        """`paid every 20th step, 131 ms`."""
        words = {GROWING: "longer and longer", NOT_KNOWN: "not in all steps alike"}
        return words.get(self.when, f"paid {self.when}")

    @property
    def paid_aside(self) -> str:
        """`, paid every 20th step, 131 ms`; empty where it is paid each step, or nobody knows."""
        return "" if self.when in (EACH_STEP, NOT_KNOWN) else f", {self.paid}"

    @property
    def code_place(self) -> str | None:
        """`train.py:88 load_image`; None where no code is known."""
        return place_text(self.file, self.line, self.function or "") if self.file else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The accounts of the mean step."""

    mean_ns: float
    """Time from the first judged step's begin to the last one's end, by their number: what is paid
    between steps, at every Nth step or at the start of an epoch counts in full."""
    median_ns: float  # the median step, without what lies between steps
    count: int  # judged steps of the rank that has most
    residual_ns: float  # what no account explains; with the accounts it adds up to `mean_ns`
    positions: Mapping[str, float]  # by position: time per step, exact; they add up to `mean_ns`
    accounts: tuple[Account, ...]
    """Opportunities first, the largest gain first; then the others, the largest first."""
    opportunities: tuple[int, ...] = ()
    """Rows of `accounts` that a change would remove, the largest gain first."""
    device_idle_ns: float | None = None
    """For how long the device had nothing to do per step: what the host does gains no more than
    that. None without a device, where it is not known, and in a ledger of the device's own time."""
    device_idle_is_bound: bool = False  # whether it is no more than a bound from above
    rests_on: str = ""  # what the numbers are made of, for people: `samples`, `a trace of 5 steps`
    missing: tuple[str, ...] = ()
    """Why columns of it are empty: of a run no code, of a trace what its device does not tell."""

    @property
    def sum_error_ns(self) -> float:
        """By how much the accounts and the residual miss the step: 0 but for rounding."""
        return sum(a.ns_per_step for a in self.accounts) + self.residual_ns - self.mean_ns

    @property
    def problem_count(self) -> int:
        """Opportunities that are problems."""
        return sum(self.is_problem(account) for account in self.largest())

    def is_problem(self, account: Account) -> bool:
        """Whether the gain of an account is above the one limit."""
        return account.gain_low_ns >= PROBLEM_RATIO * self.mean_ns

    def largest(self) -> Sequence[Account]:
        """The accounts that are opportunities, the largest gain first."""
        return [self.accounts[row] for row in self.opportunities]


STEP_FIELDS = ("mean_ns", "median_ns", "count", "residual_ns", "device_idle_ns",
               "device_idle_is_bound", "positions", "rests_on", "missing")  # fmt: skip


def ledger_document(ledger: Ledger | None) -> dict[str, Any]:
    """A ledger as `step`, `ledger` and `opportunities`."""
    if ledger is None:
        return {"step": None, "ledger": [], "opportunities": []}
    return {
        "step": {name: getattr(ledger, name) for name in STEP_FIELDS},
        "ledger": [asdict(each) | {"ranks": list(each.ranks)} for each in ledger.accounts],
        "opportunities": list(ledger.opportunities),
    }
