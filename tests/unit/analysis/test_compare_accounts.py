"""Accounts of two ledgers: what changed is certain, nothing else is, and promises come true."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from haiprof import Analyzer
from haiprof.base.ledger import Account
from haiprof.base.units import NS_PER_MS, duration_text
from haiprof.diagnosis.compare.comparison import Comparison, Promise, _pairs, _with_planned_ones
from haiprof.run_format.layout import RunPaths
from haiprof.show.views.compare import compare_data, headline, promise_text, tables
from tests.sampling import first_of
from tests.unit.analysis.recorded import WALL_OFFSET_NS
from tests.unit.analysis.sampled import Stack, write_stacks
from tests.unit.analysis.test_compare import compared, write

SITE = "/opt/venv/lib/python3.11/site-packages"
MAIN = ("/job/train.py", 88, "main")
FETCH = (f"{SITE}/torch/utils/data/_utils/fetch.py", 54, "_MapDatasetFetcher.fetch")
OPEN = (f"{SITE}/PIL/Image.py", 3000, "open")
MODEL = (f"{SITE}/torch/nn/modules/linear.py", 125, "Linear.forward")
BACKWARD = (f"{SITE}/torch/_tensor.py", 625, "Tensor.backward")
EVERY_NS = 20 * NS_PER_MS


def write_sampled(
    log_dir: Path, name: str, *, seed: int, data_ms: float = 8.0, decode: float = 0.5,
    line: int = 12, step_count: int = 400,
) -> Path:  # fmt: skip
    """A run sampled at 50 Hz, of whose loading so much is in `decode`."""
    root = write(log_dir, name, seed=seed, data_ms=data_ms, step_count=step_count, second=seed)
    chance = random.Random(seed)
    loading, augment = ("/job/data.py", line, "decode"), ("/job/data.py", 40, "augment")
    steps = Analyzer(root).phases().filter(rank=0).sort("start_ns")
    spans = steps.select("phase", "start_ns", "duration_ns").rows()
    end_ns = spans[-1][1] + spans[-1][2]
    samples: list[tuple[int, Stack]] = []
    time_ns, at = spans[0][1] + chance.randint(0, EVERY_NS), 0
    while time_ns < end_ns:
        while spans[at][1] + spans[at][2] <= time_ns:
            at += 1
        inner = loading if chance.random() < decode else augment
        below: dict[str, Stack] = {
            "dataloader": (FETCH, inner, OPEN), "forward": (MODEL,), "backward": (BACKWARD,)
        }  # fmt: skip
        phase = spans[at][0] if spans[at][1] <= time_ns else ""
        stack: Stack = (MAIN, *below.get(phase, ()))
        samples.append(((time_ns - WALL_OFFSET_NS) // 1000 * 1000, stack))
        time_ns += chance.randint(EVERY_NS // 2, 3 * EVERY_NS // 2)
    write_stacks(RunPaths(root).rank(0).stacks, samples, per_line=50)
    return root


def pair(log_dir: Path, *, seed: int = 1, **after: float) -> Comparison:
    old = write_sampled(log_dir, "before", seed=seed)
    return compared(old, write_sampled(log_dir, "after", seed=seed + 100, **after))  # type: ignore[arg-type]


def test_line_that_grew_is_named_with_its_time(tmp_path: Path) -> None:
    # 8 ms of loading, half of it in decode; then 12 ms, two thirds of it: 4 ms before, 8 ms after.
    found = pair(tmp_path, data_ms=12.0, decode=2 / 3, line=15)
    grown = found.accounts[0]
    assert [one for one in found.accounts if one.is_certain] == [grown]
    assert (grown.function, grown.position, grown.file) == ("decode", "input", "data.py")
    assert grown.low_ns <= 4 * NS_PER_MS <= grown.high_ns
    assert (grown.before_line, grown.after_line) == (12, 15)
    assert ": data.py:15 decode, input" in headline(found)
    assert tables(found, limit=5)[0].rows[0][0].startswith("data.py:15 decode, input")
    row = compare_data(found)["accounts"][0]
    assert (row["function"], row["is_certain"]) == ("decode", True)
    assert found.promise is None


def test_what_was_promised_for_a_line_that_is_gone_has_come(tmp_path: Path) -> None:
    # 8 ms of loading, half of it in decode, then 4 ms without it.
    found = pair(tmp_path, data_ms=4.0, decode=0.0)
    assert found.state == "faster"
    promise = found.promise
    assert promise is not None
    assert [one.function for one in promise.accounts] == ["decode"]
    assert promise.accounts[0].after_ns == 0
    assert promise.low_ns <= 4 * NS_PER_MS <= promise.high_ns
    assert promise.came_ns == pytest.approx(4 * NS_PER_MS, rel=0.02)
    assert promise.came_true
    text = promise_text(promise)
    assert text.startswith('without "data.py:12 decode, input, ')
    assert '", the step was predicted to become ' in text
    assert "shorter; it became 4.0" in text or "shorter; it became 3.9" in text
    assert text.endswith(" shorter: as predicted")
    data = compare_data(found)
    assert data["promise"]["came_true"] is True
    assert data["promise"]["is_outweighed"] is False
    assert data["promise"]["others_ns"] == promise.others_more_ns - promise.others_less_ns
    assert data["accounts"][data["promise"]["accounts"][0]]["function"] == "decode"


@pytest.fixture(scope="module")
def promise(tmp_path_factory: pytest.TempPathFactory) -> Promise:
    """4.3 ms (3.7 to 4.9) for `decode`, which is gone."""
    found = pair(tmp_path_factory.mktemp("gone"), data_ms=4.0, decode=0.0).promise
    assert found is not None
    return found


def came(promise: Promise, ns: float, low_ns: float, high_ns: float, **others: Any) -> Promise:
    return replace(promise, came_ns=ns, came_low_ns=low_ns, came_high_ns=high_ns, **others)


def test_promise_that_did_not_come_is_not_called_true(promise: Promise) -> None:
    little = came(promise, 2e5, 1e5, 3e5)
    assert little.came_true is False
    assert promise_text(little).endswith(": not as predicted")
    half_ns = promise.promised_ns / 2
    moved = came(promise, half_ns, half_ns - 1e5, half_ns + 1e5, others_more_ns=half_ns)
    assert moved.came_true
    assert re.search(r", while other accounts take 2\.\d+ ms more: as pred", promise_text(moved))
    noisy = came(promise, 2e5, -1e5, 3e5)
    assert noisy.came_true is None
    assert promise_text(noisy).endswith("too noisy to tell")
    slower = came(promise, -2e6, -3e6, -1e6)
    assert "; it became 2.00 ms (1.00 ms to 3.00 ms) longer: not" in promise_text(slower)


@pytest.mark.parametrize(("came_ns", "width_ns", "others"), [
    (-29.2e6, 20e6, {"others_more_ns": 26.1e6}),
    (26.9e6, 20e6, {"others_less_ns": 24.7e6}),
    (2e6, 1e6, {"others_more_ns": 26e6, "others_less_ns": 25e6}),
    (0.1e6, 9e6, {"others_more_ns": 26.1e6}),
    (-29.2e6, 20e6, {}),
    (26.9e6, 10e6, {}),
])  # fmt: skip
def test_promise_is_not_judged_where_other_changes_are_larger(
    promise: Promise, came_ns: float, width_ns: float, others: dict[str, float]
) -> None:
    outweighed = came(promise, came_ns, came_ns - width_ns, came_ns + width_ns, **others)
    assert outweighed.came_true is None
    text = promise_text(outweighed)
    assert ": other changes are larger than what was predicted, so whether it came can" in text
    words = {"others_more_ns": " more", "others_less_ns": " less"}
    said = [f"{duration_text(ns)}{words[name]}" for name, ns in others.items()]
    assert (f", while other accounts take {' and '.join(said)}: " in text) is bool(said)


def test_gain_that_others_alone_may_have_brought_is_too_noisy_to_tell(promise: Promise) -> None:
    """Without any gain the step is 3 ms shorter by others, with all of it 7 ms: both may be."""
    assert came(promise, 5e6, 1e6, 9e6).came_true
    assert came(promise, 5e6, 1e6, 9e6, others_less_ns=3e6).came_true is None
    wide = came(promise, 12e6, 1e6, 23e6)
    assert wide.came_true is None
    assert promise_text(wide).endswith(": too noisy to tell")


@pytest.mark.parametrize(("ends", "expected"), [
    ((4.93e6, -7.89e6, 11.9e6), "4.93 ms shorter (between 7.89 ms longer and 11.9 ms shorter)"),
    ((-1e6, -3e6, 2e6), "1.00 ms longer (between 3.00 ms longer and 2.00 ms shorter)"),
    ((-2e6, -3e6, -1e6), "2.00 ms (1.00 ms to 3.00 ms) longer"),
    ((2e6, 0.0, 4e6), "2.00 ms (0 s to 4.00 ms) shorter"),
])  # fmt: skip
def test_interval_that_crosses_0_is_said_in_words(
    promise: Promise, ends: tuple[float, float, float], expected: str
) -> None:
    assert f"; it became {expected}: " in promise_text(came(promise, *ends))


def test_accounts_of_a_promise_are_told_apart(promise: Promise) -> None:
    titles = [
        "optimizer and others, waiting for the interpreter lock",
        "optimizer and others, waiting for a CPU core",
        "a.py:1 f, input, Python",
    ]
    accounts = tuple(replace(promise.accounts[0], title=title) for title in titles)
    two = replace(promise, accounts=accounts[:2], promised_ns=1.5 * promise.promised_ns)
    assert promise_text(two).startswith(
        f'without 2 accounts ("{titles[0]}"; "{titles[1]}"), of which 75 % is gone, the step was '
    )
    three = promise_text(replace(promise, accounts=accounts))
    assert three.startswith(f'without 3 accounts ("{titles[0]}"; "{titles[1]}"; 1 more), of which ')


def test_promised_lines_need_no_allowance_for_all_others_as_long_as_larger_ones_came(
    promise: Promise,
) -> None:
    least = promise.accounts[0]

    def change(title: str, gain_ms: float, p_value: float, file: str | None = "a.py") -> Any:
        return replace(
            least, title=title, gain_ns=gain_ms * NS_PER_MS, p_value=p_value, file=file,
            low_ns=-5e6, high_ns=-1e6, adjusted_p_value=0.2,
        )  # fmt: skip

    found = _with_planned_ones(
        [
            change("first", 9, 0.008), change("unasked", 0, 0.008), change("third", 5, 0.3),
            change("of others", 9, 0.008, file=None), change("behind it", 3, 0.001),
            change("second", 7, 0.02),
        ],
        NS_PER_MS,
    )  # fmt: skip
    assert [one.title for one in found if one.is_certain] == ["first", "second"]


def test_time_that_moved_from_one_line_to_another_is_found_in_equal_steps(tmp_path: Path) -> None:
    found = pair(tmp_path, decode=0.9)
    assert found.state == "same"
    signs = {one.function: one.difference_ns > 0 for one in found.accounts if one.is_certain}
    assert signs == {"decode": True, "augment": False}


@pytest.mark.parametrize("seed", first_of(range(2, 10), 2))
def test_equal_runs_have_no_certain_account(tmp_path: Path, seed: int) -> None:
    found = pair(tmp_path, seed=seed)
    assert not [one for one in found.accounts if one.is_certain]
    assert found.state in ("same", "undecided")


def account(**named: Any) -> Account:
    values: dict[str, Any] = {
        "ranks": (), "position": "after_step", "activity": "python", "package": "job",
        "file": "/job/train.py", "line": 7, "function": "log", "ns_per_step": 5e6, "low_ns": 4e6,
        "high_ns": 6e6,
    }  # fmt: skip
    return Account(**{**values, **named})


@pytest.mark.parametrize(("changed", "is_known"), [
    ({"line": 9, "file": "/other/train.py"}, True),
    ({"activity": "native", "package": "numpy"}, True),
    ({"position": "input"}, False),
    ({"function": "save"}, False),
    ({"explanation": "double_precision"}, False),
])  # fmt: skip
def test_account_is_known_again_by_its_place(changed: dict[str, object], is_known: bool) -> None:
    pairs = list(_pairs([account()], [account(**changed)]))
    assert (len(pairs) == 1) is is_known


def test_part_of_the_call_tree_that_is_named_by_another_function_is_one_account() -> None:
    outer = account(function="evaluate", callers=("train.py:88 main",))
    inner = account(function="score", callers=("train.py:9 evaluate", "train.py:88 main"))
    assert len(list(_pairs([outer], [inner]))) == 1
    assert len(list(_pairs([inner], [outer]))) == 1
    assert len(list(_pairs([inner], [replace(outer, ns_per_step=2e6)]))) == 2


def test_what_the_machine_does_is_one_account_in_any_position() -> None:
    lost = account(activity="no core", file=None, line=None, function=None, package="torch")
    pairs = list(_pairs([lost], [replace(lost, position="backward", package="job")]))
    assert [(len(old), len(new)) for old, new in pairs] == [(1, 1)]
