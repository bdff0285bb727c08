"""What a verdict says of a job against the truth: the first account, its line, its promised gain.

The truth of a fault is its marked lines, where in a step they run and what they do there, and the
gain that measure.py found.

- **First**: the first opportunity is of a marked line (its own, a caller's, or of workers' code
  that its finding shows), or of the position and activity of the fault and its rank; where it is
  another account whose removal was tried and gains as much, it is right, too.
- **Line**: it is of a marked line. **Listed**: any opportunity is.
- **Promise**: the gain of the first opportunity that is the fault, as a share of the mean step, is
  within 3 points of the true one or a fifth of itself; a fault not listed was promised nothing.
- **Surroundings**: beside busy neighbours, ours or others', an account of time without a core is
  true and left out, unless it is the fault.
- **Healthy jobs**: each opportunity that counts as a problem is a false one, unless its removal can
  be tried and brings what was promised.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NEEDED = ("step", "ledger", "opportunities", "problem_count")
NO_LEDGER = "no ledger: this haiprof prints no step, ledger, opportunities, problem_count"
STRANGERS_CORES = 0.25
SMALL_GAIN = 0.03
"""A fault whose removal gains less is none on this machine: not counted."""
POINTS, PART = 0.03, 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The true account of a fault."""

    lines: tuple[tuple[str, int], ...] = ()
    """File name and line."""
    positions: tuple[str, ...] = ()
    activities: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    rank: int | None = None


def lacks(document: Mapping[str, Any]) -> list[str]:
    """The fields of the ledger that a verdict lacks."""
    return [name for name in NEEDED if document.get(name) is None]


def opportunities(
    document: Mapping[str, Any], *, alone: bool = True, problems: bool = False
) -> list[dict[str, Any]]:  # fmt: skip
    """Accounts that a change would remove, the largest gain first, each with its finding's code.

    Args:
        document: The verdict.
        alone: False leaves out time without a core: others had the cores, and that is true.
        problems: Only those that count as problems.
    """
    found = []
    findings = {f["account"]: f for f in document["findings"] if f.get("account") is not None}
    for row in document["opportunities"]:
        account, finding = document["ledger"][row], findings.get(row, {})
        is_problem = finding.get("severity", "info") != "info"
        if (problems and not is_problem) or (not alone and _is_of_others(account)):
            continue
        found.append({**account, "finding": finding})
    return found


def _is_of_others(account: Mapping[str, Any]) -> bool:
    return account["activity"].startswith("no core")


def promised(document: Mapping[str, Any], account: Mapping[str, Any]) -> float:
    """An account's gain as a share of the mean step."""
    return account["gain_ns"] / document["step"]["mean_ns"]


def places(account: Mapping[str, Any]) -> set[tuple[str, int]]:
    """Lines that an account names: its own, its callers', those of code beside it."""
    found = {(Path(account["file"]).name, account["line"])} if account.get("file") else set()
    code = account["finding"].get("code_lines", [])
    found |= {(Path(line["file"]).name, line["line"]) for line in code}
    callers = [*account.get("callers", []), *(c for line in code for c in line["callers"])]
    for caller in callers:
        name, _, line = caller.split(" ")[0].rpartition(":")
        if line.isdigit():
            found.add((Path(name).name, int(line)))
    return found


def is_line(truth: Truth, account: Mapping[str, Any]) -> bool:
    """Whether an account names a line at fault."""
    return bool(places(account) & set(truth.lines))


def is_fault(truth: Truth, account: Mapping[str, Any]) -> bool:
    """Whether an account is the fault's, its line aside."""
    if truth.rank is not None and list(account["ranks"]) != [truth.rank]:
        return False
    if is_line(truth, account) or account.get("explanation") in truth.said:
        return True
    fits = not truth.positions or account["position"] in truth.positions
    doing = account["activity"].startswith(truth.activities or "")
    return fits and doing and bool(truth.positions or truth.activities)


def judged(
    truth: Truth, document: Mapping[str, Any], offered: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:  # fmt: skip
    """What the verdict on a job with a fault says of it."""
    own = [a for a in offered if is_fault(truth, a)]
    said = {f["slug"] for f in document["findings"]} & set(truth.said)
    first = bool(own) and offered[0] is own[0]
    row = {
        "first": first or bool(said and not own and document["findings"][0]["slug"] in said),
        "line": is_line(truth, offered[0]) if truth.lines and offered else None,
        "listed": any(is_line(truth, a) for a in offered) if truth.lines else None,
        "promised": round(promised(document, own[0]), 4) if own else 0.0,
    }
    if truth.lines and not offered:
        row["line"] = False
    if truth.said and not truth.positions and not truth.activities:
        row = {"said": bool(said)}
    elif said and not own:
        row["promised"] = None  # what is said of the machine promises no gain
    return row


def is_kept(promise: float, gain: float) -> bool:
    """Whether a promised gain came true."""
    return abs(promise - gain) <= max(POINTS, PART * promise)


def described(account: Mapping[str, Any]) -> str:
    """`input python train.py:88 load`: an account in a few words."""
    place = f"{Path(account['file']).name}:{account['line']}" if account.get("file") else "-"
    ranks = f" of ranks {account['ranks']}" if account["ranks"] else ""
    return f"{account['position']}, {account['activity']}, {place} {account.get('function')}{ranks}"


def key(account: Mapping[str, Any]) -> str:
    """What must be the same in every recording of a job."""
    file = Path(account["file"]).name if account.get("file") else "-"
    return f"{account['position']} {file}:{account['line']}"


def outcome(row: Mapping[str, Any]) -> str:
    """One word for a row that was measured."""
    if "said" in row:
        return "said" if row["said"] else "not said"
    gain = row["truth"].get("gain")
    if gain is None:
        return "broken"
    if gain < SMALL_GAIN:
        return "small"
    if row["first"]:
        return "right"
    other = row.get("other_truth", {}).get("gain")
    if other is not None and other >= gain - 0.01:
        return "right, another"
    return "listed" if row["listed"] or row["promised"] else "missed"


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The scores in a line each, with 95 % intervals."""
    lines = []
    for where, loaded in (("idle", False), ("beside busy neighbours", True)):
        some = [r for r in rows if is_loaded(r) is loaded]
        counted = ("right", "right, another", "listed", "missed")
        faults = [r for r in some if r["fault"] and r["outcome"] in counted]
        true = [r["truth"]["gain"] for r in faults]
        right = [r["outcome"].startswith("right") for r in faults]
        lined = [r["line"] for r in faults if r["line"] is not None and r["outcome"] != counted[1]]
        promises = [r for r in faults if r["promised"] is not None]
        errors = [abs(r["promised"] - r["truth"]["gain"]) for r in promises]
        kept = [is_kept(r["promised"], r["truth"]["gain"]) for r in promises]
        firsts = [(k, r) for k, r in zip(kept, promises, strict=True) if r["first"]]
        sure = [k for k, r in firsts if r["truth"]["spread"] / 2 <= POINTS]
        judged_healthy = ("silent", "true", "false")
        healthy = [r for r in some if not r["fault"] and r["outcome"] in judged_healthy]
        repeated = [r["same"] for r in some if r.get("same") is not None]
        said = [r["said"] for r in some if "said" in r]
        lines += [f"- {where}: largest true account first {of(right)}"]
        lines += [f"- {where}: its line right {of(lined)}"]
        lines += [
            f"- {where}: faults of {share:.0%} of a step and more listed with their line "
            + of([r["listed"] for r, t in zip(faults, true, strict=True)
                  if t >= share and r["listed"] is not None])
            for share in (0.05, 0.10)
        ]  # fmt: skip
        middle = f"{statistics.median(errors):.1%}" if errors else "-"
        lines += [
            f"- {where}: promised gain within 3 points or a fifth {of(kept)}, of those said first "
            f"{of([k for k, _ in firsts])}, of these where pairs agree to 3 points {of(sure)}; "
            f"median error {middle} of a step",
            f"- {where}: healthy jobs with a problem whose removal brings not what was promised "
            f"{of([r['outcome'] == 'false' for r in healthy])}",
            f"- {where}: the same first account in every recording {of(repeated)}",
            f"- {where}: facts beside the steps said {of(said)}",
        ]
    return lines


def is_loaded(row: Mapping[str, Any]) -> bool:
    """Whether other processes used the cores, ours or not: by what was measured beside the job."""
    return row["loaded"] or row.get("strangers_cores", 0.0) >= STRANGERS_CORES


def of(found: Sequence[bool]) -> str:
    """`9 of 10 (95 %: 60 % to 98 %)`: Wilson's interval."""
    count, whole = sum(map(bool, found)), len(found)
    if not whole:
        return "- of 0"
    z, share = 1.96, count / whole
    middle = share + z * z / (2 * whole)
    spread = z * math.sqrt(share * (1 - share) / whole + z * z / (4 * whole * whole))
    low, high = ((middle + sign * spread) / (1 + z * z / whole) for sign in (-1, 1))
    return f"{count} of {whole} (95 %: {max(low, 0):.0%} to {min(high, 1):.0%})"


def tally(rows: Sequence[Mapping[str, Any]]) -> str:
    """`right 12, silent 14, missed 1` so far."""
    return ", ".join(f"{o} {n}" for o, n in Counter(r["outcome"] for r in rows).most_common())


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each job."""
    lines = [
        "| job | kind | what | others | outcome | line | promised | true | first opportunity |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        truth = r.get("truth", {})
        true = f"{truth['gain']:.1%} ±{truth['spread'] / 2:.1%}" if "gain" in truth else "-"
        promise = "-" if r.get("promised") is None else f"{r['promised']:.1%}"
        line = {True: "yes", False: "no", None: ""}[r.get("line")]
        first = r.get("opportunity") or r.get("why", "-")
        lines.append(
            f"| {r['id']} | {r['kind']} | {r['job']} | {r.get('strangers_cores', 0):.1f} | "
            f"{r['outcome']} | {line} | {promise} | {true} | {first} |"
        )
    return lines
