"""Backward's time by the forward's lines, and loops of many small operators."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from haiprof import Analyzer
from haiprof.base.errors import MissingDataError
from haiprof.base.ledger import Ledger
from haiprof.diagnosis.engine import diagnose
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.stack_lines import INDEPENDENT, LAYERS, NO_GRAD, RECURRENCE
from haiprof.show.page.content import page_content
from haiprof.trace_analysis.python_code import operator_lines
from tests.unit.analysis.recorded import KINDS, spans_from, write_rank, write_run
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.analysis.trace.shared import trace_of
from tests.unit.diagnosis.stories import START_NS, ledger_of
from tests.unit.diagnosis.tables import ENGINE, LINEAR, MAIN, MODULE, SCRIPT, SITE, STEP, job
from tests.unit.diagnosis.test_ledger_adds_up import check_gains, check_sums
from tests.unit.diagnosis.trace_stories import BLOCK, ENGINE_NODE, LOOP, window, write_window

Frame = tuple[Any, ...]
HOOK = job(70, "hook", "net.py")
MS = 1_000_000


def write_job(
    root: Path,
    *,
    hook_samples: int = 0,
    loop: Frame = LOOP,
    held: str = "h0",
    period: int = 40,
    inside: Stack = (),
    backward: int = 20,
) -> RunPaths:
    """100 steps of 40 ms (`period`): forward 10, of which 2 the loop's, `backward`, optimizer 5.

    In the loop's two samples of a step the interpreter lock is `held` or not; `inside` them is
    what it calls.
    """
    run = write_run(root)
    rows: list[tuple[int, int, int, int]] = []
    samples: list[tuple[int, Stack]] = []
    now = START_NS

    def sampled(count: int, stack: Stack, start: int, every: int = MS) -> None:
        samples.extend((start + place * every + every // 2, stack) for place in range(count))

    ends = 13 + backward
    for _ in range(100):
        spans = ("F", 2, 12), ("B", 13, ends), ("O", 34, 39)
        rows += [(KINDS[kind], 0, now + begin * MS, now + end * MS) for kind, begin, end in spans]
        sampled(8, (SCRIPT, MAIN, MODULE, BLOCK, MODULE, LINEAR), now + 2 * MS)
        sampled(2, (SCRIPT, MAIN, MODULE, loop, *inside), now + 10 * MS)
        sampled(backward - hook_samples, (SCRIPT, MAIN, ENGINE), now + 13 * MS)
        sampled(hook_samples, (SCRIPT, MAIN, ENGINE, HOOK), now + (33 - hook_samples) * MS)
        now += period * MS
    write_rank(run, spans_from(rows))
    samples.sort()
    letters = itertools.cycle(held)
    lock = "".join(next(letters) if loop in stack else "0" for _, stack in samples)
    write_stacks(run.rank(0).stacks, samples, lock=lock)
    return run


def judged(root: Path) -> Ledger:
    ledger = ledger_of(diagnose(Analyzer(root)))
    check_sums(ledger)
    check_gains(ledger)
    return ledger


def test_each_node_belongs_to_the_line_that_called_its_forward(tmp_path: Path) -> None:
    events, metadata = window()
    found = operator_lines(trace_of(tmp_path, events, **metadata))

    rows = {row["line"]: row for row in found.to_dicts()}
    assert list(rows) == [5, 9, None]
    assert rows[5]["operator_count"] == rows[5]["node_count"] == 2
    assert rows[9]["operator_count"] == rows[9]["node_count"] == 200
    assert rows[9]["operator_ns"] == 3000
    assert rows[5]["backward_ns"] == pytest.approx(2 * 8004e3)
    assert rows[9]["backward_ns"] == pytest.approx(200 * 10e3)
    assert rows[None]["backward_ns"] == pytest.approx(2 * 4e3)


def test_a_hook_around_a_node_is_not_its_operators(tmp_path: Path) -> None:
    events, metadata = window()
    slow = next(e for e in events if e["name"].startswith(ENGINE_NODE + "Mul"))
    after = slow["ts"] + slow["dur"]
    for each in events:
        each["ts"] += 50_000 if each["ts"] >= after else 0
        if each["name"].startswith("ProfilerStep#0") or each is slow:
            each["dur"] += 50_000
    found = operator_lines(trace_of(tmp_path, events, **metadata))

    assert found.filter(pl.col("line") == 9)["backward_ns"].item() == pytest.approx(200 * 10e3)


@pytest.mark.parametrize(
    "lines",
    [None, 3, {"places": [["a", "b", "c"]], "at": []}, {"places": [], "at": [[1, 4]]}, {"at": [1]}],
)
def test_a_trace_without_whole_lines_says_so(tmp_path: Path, lines: object) -> None:
    events, _ = window()
    with pytest.raises(MissingDataError, match="lines of operators"):
        operator_lines(trace_of(tmp_path, events, haiprof={"lines": lines}))


def test_backward_has_the_lines_of_its_forward(tmp_path: Path) -> None:
    run = write_job(tmp_path / "run", hook_samples=4)
    plain = judged(run.root)
    own = {a.function: a.needed for a in plain.accounts if a.position == "backward"}
    assert own == {"main": True, "hook": False}
    write_window(run, *window(loops=20))
    ledger = judged(run.root)

    backward = {a.function: a for a in ledger.accounts if a.position == "backward" and a.needed}
    assert backward["Net.forward"].ns_per_step == pytest.approx(16 * MS, rel=0.01)
    assert backward["Net.forward"].line == 5
    hooks = [a for a in ledger.accounts if a.function == "hook"]
    assert sum(a.ns_per_step for a in hooks) == pytest.approx(4 * MS, rel=0.01)
    assert ledger.positions == plain.positions
    assert ledger.mean_ns == plain.mean_ns


def test_the_page_draws_a_line_that_was_traced_and_never_sampled(tmp_path: Path) -> None:
    run = write_job(tmp_path / "run", hook_samples=4)
    events, metadata = window(loops=20)
    places = metadata["haiprof"]["lines"]["places"]
    places[0] = [*BLOCK[:1], BLOCK[1] + 1, *BLOCK[2:3]]
    write_window(run, events, metadata)
    graph = page_content(Analyzer(run.root)).flames.graph

    mean = graph.series[0]
    place = f"net.py:{BLOCK[1] + 1}"
    drawn = [n for n in mean.self_ns if graph.frames[graph.places[n]].place.endswith(place)]
    assert sum(mean.self_ns[n] for n in drawn) == pytest.approx(16 * MS, rel=0.03)


def test_a_loop_of_small_operators_is_one_opportunity_of_forward_and_backward(
    tmp_path: Path,
) -> None:
    run = write_job(tmp_path / "run")
    write_window(run, *window(loops=800))
    verdict = diagnose(Analyzer(run.root))
    ledger = judged(run.root)

    account = ledger.largest()[0]
    assert account.explanation == "many_small_operators"
    assert (account.function, account.line, account.position) == ("Net.forward", 9, "backward")
    assert account.ns_per_step == pytest.approx(2 * MS + 10 * MS, rel=0.05)
    assert account.gain_low_ns <= account.gain_ns <= account.gain_high_ns
    assert account.callers[0].startswith("train.py:40")
    finding = verdict.findings[0]
    assert finding.rule == "many_small_operators"
    assert "800 in a step" in finding.title
    assert "each round needs the one before" in finding.remedy
    assert finding.severity == "critical"


def test_without_a_window_its_part_of_backward_is_estimated(tmp_path: Path) -> None:
    """As if it took twice as long in forward and loss, 4 of 13 ms."""
    run = write_job(tmp_path / "run", loop=(*LOOP[:-1], INDEPENDENT))
    ledger = judged(run.root)
    account = ledger.largest()[0]
    assert account.explanation == "many_small_operators"
    assert (account.function, account.line) == ("Net.forward", 9)
    assert account.gain_ns == pytest.approx((2 + 20 * 4 / 13) * MS, rel=0.05)
    finding = diagnose(Analyzer(run.root)).findings[0]
    assert "estimate" in finding.title
    assert "for all elements at once" in finding.remedy


def test_a_backward_that_is_too_short_for_a_loop_has_none_of_it(tmp_path: Path) -> None:
    """As of boxes that are matched: forward's other 8 ms have a backward of 6 ms themselves."""
    run = write_job(tmp_path / "run", loop=(*LOOP[:-1], INDEPENDENT), backward=6)
    (account,) = (a for a in judged(run.root).accounts if a.explanation == "many_small_operators")
    assert account.gain_ns == pytest.approx(2 * MS, rel=0.05)


@pytest.mark.parametrize(
    "loop",
    [
        (*LOOP[:-1], INDEPENDENT | NO_GRAD),
        (*LOOP[:-1], RECURRENCE | NO_GRAD),
        (*LOOP[:3], "torch.stack([torch.from_numpy(x[i]) for i in ix])", *LOOP[4:-1], INDEPENDENT),
        (*LOOP[:3], "torch.tensor([float(r) for r in rewards], dtype=…", *LOOP[4:-1], INDEPENDENT),
    ],
)
def test_what_records_no_gradients_has_no_part_of_backward(tmp_path: Path, loop: Frame) -> None:
    """Numbers may take its tensors' place, also where each round needs the one before."""
    run = write_job(tmp_path / "run", loop=loop)
    (account,) = (a for a in judged(run.root).accounts if a.explanation == "many_small_operators")
    assert account.gain_ns == pytest.approx(2 * MS, rel=0.05)


@pytest.mark.parametrize("code", [
    "torch.zeros(n, d).index_add(0, i, h)", "torch.ones(3) - h[i]",
    "torch.stack([torch.zeros(3) for x in xs]) * h",
])  # fmt: skip
def test_new_numbers_with_a_tensor_in_them_have_a_part_of_backward(
    tmp_path: Path, code: str
) -> None:
    run = write_job(tmp_path / "run", loop=(*LOOP[:3], code, *LOOP[4:-1], INDEPENDENT))
    (account,) = (a for a in judged(run.root).accounts if a.explanation == "many_small_operators")
    assert account.gain_ns > 4 * MS


def test_tensors_of_many_numbers_keep_their_place(tmp_path: Path) -> None:
    """Each operator of the loop takes twice as long as calling it: its tensors are no numbers."""
    loop = (*LOOP[:-1], RECURRENCE | NO_GRAD)
    run = write_job(tmp_path / "run", loop=loop, period=38, held="h" + 9 * "0")
    verdict = diagnose(Analyzer(run.root))
    assert "many_small_operators" not in {a.explanation for a in judged(run.root).accounts}
    assert "5.3 % of the step is small operators of a loop" in verdict.headline
    assert "LSTM" not in verdict.headline, "of no sequence with gradients"


@pytest.mark.parametrize(
    ("held", "share"),
    [("h0", "21 %"), ("h" + 29 * "0", None)],  # these compute for most of the time
)
def test_rounds_that_need_one_another_promise_nothing_without_a_window(
    tmp_path: Path, held: str, share: str | None
) -> None:
    run = write_job(tmp_path / "run", period=38, held=held)
    verdict = diagnose(Analyzer(run.root))
    assert "many_small_operators" not in {a.explanation for a in judged(run.root).accounts}
    if share is None:
        assert "small operators" not in verdict.headline
        return
    # 2 ms, and 4 of 13 parts of backward's 20
    said = f"about {share} of the step is small operators of a loop whose rounds need one another"
    assert said in verdict.headline
    assert "(net.py:9 Net.forward, with its part of backward)" in verdict.headline


def test_layers_that_do_not_need_one_another_are_told_and_their_operators_by_a_window(
    tmp_path: Path,
) -> None:
    run = write_job(tmp_path / "run", period=38, loop=(*LOOP[:-1], LAYERS))
    headline = diagnose(Analyzer(run.root)).headline
    assert "one layer after the other, none of which needs the one before (net.py:9" in headline
    assert "haiprof --explain says how much" in headline
    write_window(run, *window(loops=800, small_us=12.0))
    headline = diagnose(Analyzer(run.root)).headline
    assert "(its forward has 800 operators of 12.0 µs each, as traced)" in headline
    assert "--explain" not in headline
    traced = write_job(tmp_path / "traced", period=38, loop=(*LOOP[:-1], LAYERS))
    write_window(traced, *window(loops=12, small_us=990.0))
    assert "one layer after the other" not in diagnose(Analyzer(traced.root)).headline
    large = write_job(tmp_path / "large", period=38, loop=(*LOOP[:-1], LAYERS), held="h" + 9 * "0")
    assert "one layer after the other" not in diagnose(Analyzer(large.root)).headline


@pytest.mark.parametrize(
    "inside",
    [
        ((f"{SITE}/torch/nn/modules/module.py", 2900, "Module.zero_grad"),),
        ((f"{SITE}/torch/optim/optimizer.py", 1000, "Optimizer.zero_grad"),),
        ((f"{SITE}/torch/optim/optimizer.py", 530, "Optimizer.profile_hook_step.wrapper"), STEP),
    ],
)
def test_what_an_optimizer_does_in_a_loop_is_no_small_operator(
    tmp_path: Path, inside: Stack
) -> None:
    run = write_job(tmp_path / "run", inside=inside, period=38)
    assert "small operators" not in diagnose(Analyzer(run.root)).headline


@pytest.mark.parametrize("held", ["0", "h" + 99 * "0"])
def test_a_loop_whose_operators_compute_is_the_models_own(tmp_path: Path, held: str) -> None:
    run = write_job(tmp_path / "run", loop=(*LOOP[:-1], INDEPENDENT), held=held)
    assert "many_small_operators" not in {a.explanation for a in judged(run.root).accounts}


def test_of_operators_that_compute_only_the_calls_can_be_gained(tmp_path: Path) -> None:
    run = write_job(tmp_path / "run")
    write_window(run, *window(loops=800, small_us=10.0))
    account = judged(run.root).largest()[0]
    assert account.explanation == "many_small_operators"
    assert account.ns_per_step == pytest.approx(6 * MS, rel=0.05)


@pytest.mark.parametrize(("loops", "us"), [(20, 3.0), (800, 12.0)])
def test_few_operators_and_those_that_compute_are_no_loop(
    tmp_path: Path, loops: int, us: float
) -> None:
    run = write_job(tmp_path / "run")
    write_window(run, *window(loops=loops, small_us=us))
    assert "many_small_operators" not in {a.explanation for a in judged(run.root).accounts}


def test_a_line_that_no_sample_met_has_its_backward_too(tmp_path: Path) -> None:
    run = write_job(tmp_path / "run")
    events, metadata = window(20)
    metadata["haiprof"]["lines"]["places"][0][1] = 6
    write_window(run, events, metadata)
    ledger = judged(run.root)

    backward = [a for a in ledger.accounts if a.position == "backward" and a.needed]
    assert [a.line for a in backward if a.function == "Net.forward"] == [6]
    assert np.isclose(sum(a.ns_per_step for a in backward), 20 * MS, rtol=0.01)
