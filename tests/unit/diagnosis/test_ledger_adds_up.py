"""The ledger of any run adds up: random spans, ranks, samples, collections and saves."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from haiprof import Analyzer
from haiprof.base.ledger import Account, Ledger
from haiprof.base.units import NS_PER_MS
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.verdict import Verdict
from haiprof.run_analysis.lines import written_in
from haiprof.run_format.layout import RunPaths
from haiprof.show.flame import sampled_lines
from tests.sampling import examples
from tests.unit.analysis.recorded import KINDS, spans_from, write_rank, write_run
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.diagnosis.stories import START_NS, ledger_of
from tests.unit.diagnosis.tables import (
    BARRIER,
    ENGINE,
    FORWARD,
    LINEAR,
    MAIN,
    MODULE,
    SCRIPT,
    SITE,
    STEP,
    job,
)
from tests.unit.diagnosis.trace_stories import window, write_window

LOOPS = (
    "D F B O", "F B O", "D F B D F B O", "D F B O0 F B O1", "D O(F B)", "O(D F B)", "D F(GC) B O",
    "D F B O SAVE", "D F B O GC", "D F B O E E", "D M", "D F F B B S(O) SAVE GC E", "ITER D B END",
)  # fmt: skip
STACKS: tuple[Stack, ...] = (
    (), (SCRIPT, MAIN), (SCRIPT, MAIN, MODULE, FORWARD), (SCRIPT, MAIN, MODULE, FORWARD, LINEAR),
    (SCRIPT, MAIN, ENGINE), (SCRIPT, MAIN, ENGINE, job(3, "hook")), (SCRIPT, MAIN, STEP),
    (SCRIPT, MAIN, job(8, "log"), (f"{SITE}/numpy/lib/npyio.py", 5, "save")),
    (SCRIPT, job(41, "main"), job(9, "log.<locals>.<listcomp>")), (SCRIPT, MAIN, BARRIER),
    (SCRIPT, MAIN, (f"{SITE}/torch/utils/data/dataloader.py", 1300,
                    "_MultiProcessingDataLoaderIter._next_data")),
)  # fmt: skip


def write_any(root: Path, dice: Random) -> None:
    """A run of one to four ranks with a loop of their own, or the same one; some are sampled."""
    run, ranks = write_run(root), dice.choice((1, 1, 2, 4))
    alike = dice.choice(LOOPS) if dice.random() < 0.7 else None
    count = dice.randint(2, 40)
    for rank in range(ranks):
        rows: list[tuple[int, int, int, int]] = []
        opened: list[tuple[int, int, int]] = []
        now = START_NS + dice.randint(0, NS_PER_MS)
        loop = (alike or dice.choice(LOOPS)).replace("(", " ( ").replace(")", " ) ").split()
        for word in loop * (count + dice.randint(-1, 1)):
            if word == "(":
                kind, tag, start, _ = rows.pop()
                opened.append((kind, tag, start))
                now = start + 1
            elif word == ")":
                rows.append((*opened.pop(), now))
            else:
                name = word.rstrip("0123456789")
                length = int(dice.expovariate(1 / 9) * NS_PER_MS) * (
                    30 if dice.random() < 0.02 else 1
                )
                rows.append((KINDS[name], int(word[len(name) :] or 0), now, now + length + 1))
                now += length + 1
            now += dice.randint(1, 2 * NS_PER_MS)
        write_rank(run, spans_from(rows), rank=rank, world_size=ranks)
        if dice.random() < 0.8:
            asked = dice.choice((3, 40, 300))
            times = sorted(
                dice.randint(START_NS - NS_PER_MS, now + NS_PER_MS) for _ in range(asked)
            )
            stacks = [(at // 1000 * 1000, dice.choice(STACKS)) for at in times]
            lock = "".join(dice.choice("0h1-") for _ in times) if dice.random() < 0.8 else ""
            write_stacks(RunPaths(root).rank(rank).stacks, stacks, lock=lock)
    if dice.random() < 0.4:
        small, large = dice.choice((2.0, 9.0)), dice.choice((5.0, 4000.0))
        loops = dice.choice((0, 5, 40, 90))
        write_window(run, *window(loops, small_us=small, large_us=large))


def check_sums(ledger: Ledger) -> None:
    assert sum(a.ns_per_step for a in ledger.accounts) + ledger.residual_ns == pytest.approx(
        ledger.mean_ns, rel=1e-9
    )
    assert sum(ledger.positions.values()) == pytest.approx(ledger.mean_ns, rel=1e-9)
    assert ledger.residual_ns >= -1e-9 * ledger.mean_ns
    for account in ledger.accounts:
        assert account.ns_per_step >= 0
        assert account.low_ns <= account.ns_per_step * (1 + 1e-9)
        assert account.high_ns >= account.ns_per_step * (1 - 1e-9)


def check_gains(ledger: Ledger) -> None:
    assert list(ledger.opportunities) == sorted(
        ledger.opportunities, key=lambda row: -ledger.accounts[row].gain_ns
    )
    for row, account in enumerate(ledger.accounts):
        assert (account.gain_ns > 0) is (row in ledger.opportunities)
        assert 0 <= account.gain_low_ns <= account.gain_ns <= account.gain_high_ns
        assert account.gain_ns <= ledger.mean_ns * (1 + 1e-9), account
        assert not (account.needed and account.gain_ns)


@settings(
    max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck),
    derandomize=True,
)  # fmt: skip
@given(seed=st.integers(0, 1 << 32))
def test_accounts_and_residual_are_the_mean_step(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    root = tmp_path_factory.mktemp("any") / "run"
    write_any(root, Random(seed))

    verdict = diagnose(Analyzer(root))
    assert (verdict.ledger is None) is (verdict.step_ns is None)
    if verdict.ledger is not None:
        check_sums(verdict.ledger)
        check_gains(verdict.ledger)
        assert verdict.ledger.problem_count >= sum(
            each.severity != "info" for each in verdict.findings if each.gain is not None
        )


RUNS = Path(__file__).parents[2] / "data" / "runs"


@cache
def recorded(name: str) -> Analyzer:
    return Analyzer(RUNS / name)


@cache
def verdict_of(name: str) -> Verdict:
    return diagnose(recorded(name))


@pytest.mark.parametrize("name", sorted(path.name for path in RUNS.iterdir() if path.is_dir()))
def test_a_recorded_run_adds_up_from_start_to_end(name: str) -> None:
    verdict = verdict_of(name)
    check_sums(ledger_of(verdict))
    check_gains(ledger_of(verdict))
    manifest = recorded(name).manifest()
    if manifest.end_wall_ns is not None:
        whole = manifest.end_wall_ns - manifest.start_wall_ns
        assert sum(verdict.run_time.values()) == whole


@pytest.mark.parametrize("name", [path.name for path in RUNS.iterdir() if path.is_dir()])
def test_no_account_of_one_rank_may_take_more_than_its_position(name: str) -> None:
    """However few steps pay it: a pause of one in 300 has a wide interval."""
    ledger = verdict_of(name).ledger
    if ledger is None or len(list((RUNS / name / "ranks").iterdir())) > 1 or name == "lightning":
        return  # of another rank, and an optimizer's closure, more may be than in the mean step
    for account in ledger.accounts:
        if not account.elsewhere:  # others hold less than a tenth of it
            whole = 1.12 * ledger.positions[account.position]
            assert account.high_ns <= max(whole, 1.001 * account.ns_per_step), account.when


@pytest.mark.parametrize("name", ["loader_two_workers", "json_after_optimizer", "two_ranks_traced"])
def test_nothing_is_larger_than_what_it_is_a_part_of(name: str) -> None:
    """An account, its line and its gain, against the positions that they are said to be in."""
    verdict = verdict_of(name)
    ledger = ledger_of(verdict)
    for account in ledger.accounts:
        places = (account.position, *account.elsewhere)
        whole = sum(ledger.positions[place] for place in places)
        assert account.ns_per_step <= 1.06 * whole  # others hold less than a twentieth of it
        assert account.low_ns <= account.ns_per_step <= account.high_ns
        assert account.where.endswith(" and others") == bool(account.elsewhere)
    for finding in verdict.findings:
        if finding.account is None or not finding.gain:
            continue
        account = ledger.accounts[finding.account]
        if account.gain_ns > 1.02 * account.ns_per_step and "straggler" not in finding.title:
            # It is not of the mean step above it.
            assert re.search(r"of (the slowest rank's|rank \d's|its) step", finding.title)
        for line in finding.code_lines[: account.file is not None]:
            assert line.share == pytest.approx(finding.lost_ratio)
            assert line.share is not None
            assert line.low is not None
            assert line.high is not None
            assert line.low <= line.share <= line.high


@pytest.mark.parametrize("name", ["json_after_optimizer", "garbage"])
def test_lines_add_up_to_the_accounts_of_their_function(name: str) -> None:
    ledger = ledger_of(verdict_of(name))
    of_lines: dict[tuple[str | None, str], float] = {}
    for row in sampled_lines(recorded(name), None, None)[1].iter_rows(named=True):
        key = row["position"], written_in(row["function"])
        of_lines[key] = of_lines.get(key, 0.0) + (row["ns_per_step"] or 0.0)
    of_accounts: dict[tuple[str | None, str], float] = {}
    for account in ledger.accounts:
        is_code = account.activity != "garbage collection"  # lines say that it is left out
        if account.function and account.position == "after_step" and is_code:
            key = account.position, account.function
            of_accounts[key] = of_accounts.get(key, 0.0) + account.ns_per_step
    assert of_accounts
    for key, ns in of_accounts.items():
        assert of_lines[key] == pytest.approx(ns, rel=0.02), key


def test_collections_are_said_to_begin_where_the_job_allocates() -> None:
    """The recorded job makes cycles in one line; it never calls gc.collect()."""
    (found,) = [
        each for each in verdict_of("garbage").findings if each.rule == "garbage_collection"
    ]
    assert found.title.endswith("mostly in log (train.py:35)")
    assert found.cause is None
    assert "reference cycles there" in found.remedy
    assert found.code_lines[0].line == 35


@pytest.mark.parametrize(
    ("expression", "shown"),
    [("s", ""), ("self.batches", ""), ("time.sleep(0.1)", "time.sleep(0.1)"), ("a + b", "a + b")],
)
def test_an_expression_that_is_a_name_alone_is_not_shown(expression: str, shown: str) -> None:
    account = Account(ranks=(), position="input", activity="python", ns_per_step=1.0, low_ns=0.0,
                      high_ns=2.0, expression=expression)  # fmt: skip
    assert account.code == shown


@pytest.mark.parametrize(
    ("expression", "said"),
    [("torch.randn(4)", "torch operators"), ("loss.backward()", "torch operators"),
     ("total.add_(x)", "torch operators"), ("loss.detach()", "torch operators"),
     ("w * 1.0001", "arithmetic on tensors or arrays"),
     ("(pred == target) & mask[i]", "arithmetic on tensors or arrays"), ("rows", "native code"),
     ("0.1 * v.numpy()", "native code"), ("env.step(action)", "native code"),
     ("sha.update(w.cpu().numpy().tobytes())", "native code"),
     ('open(path, "wb")', "native code"), (None, "native code")],
)  # fmt: skip
def test_only_what_calls_torch_by_name_is_called_its_operators(
    expression: str | None, said: str
) -> None:
    """A line of the job's own that holds no interpreter lock may be in numpy, zlib or open()."""
    account = Account(ranks=(), position="between_steps", activity="operators", package="job",
                      ns_per_step=1.0, low_ns=0.0, high_ns=2.0, expression=expression)  # fmt: skip
    assert account.does == said
    assert replace(account, needed=True).does == "torch operators"
    in_model = said if expression and "tobytes" in expression else "torch operators"
    assert replace(account, position="forward").does == in_model
    assert replace(account, position="evaluation").does == said  # of an environment, a decoder


def test_what_is_paid_at_every_nth_step_is_said_so_though_some_of_it_is_elsewhere() -> None:
    """The recorded job evaluates after every 50th step; what calls it is part of that account."""
    ledger = ledger_of(verdict_of("evaluation_checkpoint"))
    (evaluation,) = [each for each in ledger.accounts if each.function == "evaluate"]
    assert evaluation.when.startswith("every 50th step, ")
