"""CI, which has no time for all proofs, runs others of them after each landing."""

from __future__ import annotations

from tests.proofs import order_proofs

ITEMS = ["a1", "a2", "b1", "b2", "b3", "c1", "d1", "d2"]
FILES = [item[0] for item in ITEMS]
RANKS = [0, 0, 0, 1, 1, 0, 2, 2]


def ordered(commit: str) -> list[str]:
    return order_proofs(ITEMS, RANKS, FILES, commit=commit)


def test_ranks_come_in_order_and_files_stay_whole() -> None:
    assert ordered("") == ["a1", "a2", "b1", "c1", "b2", "b3", "d1", "d2"]
    assert ordered("1") == ["b1", "c1", "a1", "a2", "b2", "b3", "d1", "d2"]
    assert ordered("2") == ["c1", "a1", "a2", "b1", "b2", "b3", "d1", "d2"]
    assert order_proofs([], [], [], commit="1") == []


def test_every_file_of_a_rank_begins_it_for_some_commit() -> None:
    commits = [f"{number:x}4f9c{number}" for number in range(1, 40)]
    assert {ordered(commit)[0] for commit in commits} == {"a1", "b1", "c1"}
    assert all(sorted(ordered(commit)) == sorted(ITEMS) for commit in commits)
