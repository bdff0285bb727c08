"""The order of findings: causes before what they explain."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from haiprof.diagnosis.causes import agreeing, in_order
from haiprof.diagnosis.consistency import is_in_order
from haiprof.diagnosis.finding import SEVERITIES, Finding, Severity


def finding(
    rule: str, severity: Severity = "warning", explains: tuple[str, ...] = (),
    confidence: float = 0.5, cause: str | None = None,
) -> Finding:  # fmt: skip
    return Finding(
        rule=rule, severity=severity, title=rule, evidence=(), remedy="", confidence=confidence,
        explains=explains, cause=cause,
    )  # fmt: skip


def test_cause_stands_before_a_heavier_consequence_and_is_as_severe() -> None:
    found = in_order([finding("loader", "critical"), finding("cores", explains=("loader",))])
    assert [(f.rule, f.severity, f.explained_by) for f in found] == [
        ("cores", "critical", None),
        ("loader", "critical", "cores"),
    ]


def test_consequence_stands_right_behind_its_cause() -> None:
    found = in_order(
        [finding("b", confidence=0.9), finding("a", explains=("c",), confidence=0.95),
         finding("c", confidence=0.1)]
    )  # fmt: skip
    assert [f.rule for f in found] == ["a", "c", "b"]


def test_a_milder_consequence_stands_above_nothing_graver_but_right_behind_its_cause() -> None:
    cores = finding("cores", "critical", explains=("turns", "late", "jitter"), confidence=0.9)
    others = [finding("turns", confidence=0.6), finding("late", "info"), finding("saves")]
    assert [f.rule for f in in_order([cores, *others])] == ["cores", "turns", "saves", "late"]
    assert [f.rule for f in in_order([cores, *others[1:]])] == ["cores", "late", "saves"]
    grave = [*others, finding("jitter", "critical")]
    assert [f.rule for f in in_order([cores, *grave])][:3] == ["cores", "jitter", "turns"]


def test_only_the_named_cause_of_a_rule_is_explained() -> None:
    cores = finding("cores", explains=("loader/few_workers",))
    (first, second) = in_order([cores, finding("loader", "critical", cause="storage")])
    assert (first.rule, first.explained_by, second.explained_by) == ("loader", None, None)
    (first, second) = in_order([cores, finding("loader", "critical", cause="few_workers")])
    assert (first.rule, second.explained_by) == ("cores", "cores")


def test_what_takes_long_on_all_ranks_is_why_one_and_another_are_late() -> None:
    """A hook on gradients takes two thirds of the step, and never equally long on both ranks."""
    turns = replace(finding("late_rank", cause="now_and_then"), lost_ratio=0.25, confidence=0.85)
    steady = replace(turns, cause=None, rank=1)
    hook = replace(finding("backward_bound"), lost_ratio=0.69, confidence=0.6)
    assert [f.rule for f in in_order([turns, hook])] == ["backward_bound", "late_rank"]
    assert all(f.explained_by is None for f in in_order([steady, hook]))
    small = replace(hook, lost_ratio=0.05)
    assert all(f.explained_by is None for f in in_order([turns, small]))


def test_uneven_data_stays_beside_ranks_that_are_late_by_turns() -> None:
    """And is contradicted by one that is always late, where that costs more."""
    turns = replace(
        finding("late_rank", cause="now_and_then"), lost_ratio=0.23, confidence=0.85, rank=0
    )
    explains = ("late_rank", "late_rank/now_and_then")
    uneven = replace(finding("data_imbalance", explains=explains), lost_ratio=0.19, confidence=0.7)
    assert [f.rule for f in in_order(agreeing([turns, uneven]))] == ["data_imbalance", "late_rank"]
    steady = replace(turns, cause=None)
    assert [f.rule for f in in_order(agreeing([steady, uneven]))] == ["late_rank"]


def test_of_two_that_explain_each_other_the_weightier_is_the_cause() -> None:
    pair = [finding("a", explains=("b",)), finding("b", "critical", explains=("a",))]
    assert [(f.rule, f.explained_by) for f in in_order(pair)] == [("b", None), ("a", "b")]


RULES = ("a", "b", "c", "d", "e")
findings = st.lists(
    st.builds(
        finding,
        st.sampled_from(RULES),
        st.sampled_from(SEVERITIES),
        st.lists(st.sampled_from(RULES), unique=True).map(tuple),
        st.sampled_from([0.1, 0.5, 0.9]),
    ),
    unique_by=lambda f: f.rule,
)


@given(findings, st.randoms())
def test_order_loses_nothing_and_does_not_depend_on_the_order_of_asking(
    found: list[Finding], random: object
) -> None:
    ordered = in_order(found)
    assert sorted(f.rule for f in ordered) == sorted(f.rule for f in found)
    assert is_in_order(ordered)
    shuffled = list(found)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert in_order(shuffled) == ordered
    place = {f.rule: i for i, f in enumerate(ordered)}
    for f in ordered:
        assert f.explained_by is None or place[f.explained_by] < place[f.rule]
