"""What is said of trials of other loaders."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from haiprof.live.loader_trials import LoaderTrial, worker_counts
from haiprof.show.views.prepare import loader_trials_view, trials_headline


def test_workers_are_tried_up_to_a_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    assert worker_counts(1) == [0, 1, 2, 4, 8, 12]
    assert worker_counts(3) == [0, 1, 2, 4]
    assert worker_counts(64) == [0, 1]


def trial(loader: str, rate: float | None, workers: int = 0) -> LoaderTrial:
    if rate is None:
        return LoaderTrial(loader=loader, workers=workers, reason="only 3 steps could be measured")
    return LoaderTrial(
        loader=loader, workers=workers, ranks=1, step_count=200, steps_per_s=rate,
        low=0.98 * rate, high=1.02 * rate,
    )  # fmt: skip


def test_the_view_says_what_is_best_and_what_failed() -> None:
    trials = [trial("as given", 10), trial("kept", 20), trial("0", 10), trial("2", 18, 2),
              trial("4", None)]  # fmt: skip
    assert (
        trials_headline(trials)
        == "if batches cost nothing: 2.00 times as fast; 2 workers: 1.80 times as fast"
    )
    text = shown(trials)
    assert "17.6 to 18.4" in text
    assert "x1.80" in text
    assert "4 workers: only 3 steps could be measured" in text


def shown(trials: Sequence[LoaderTrial]) -> str:
    out = io.StringIO()
    Console(file=out, width=100).print(loader_trials_view(trials))
    return out.getvalue()


def test_own_setting_that_was_measured_twice_tells_the_noise_and_is_no_variant() -> None:
    trials = [trial("as given", 20.4), trial("kept", 52), trial("0", 16.6), trial("1", 16.1, 1)]
    headline, _, *rows, note = shown(trials).splitlines()
    assert headline == "if batches cost nothing: 2.81 times as fast; 1 worker: no gain above 1 %"
    assert [row.split("  ")[0] for row in rows] == [
        "as given (0 workers)", "batches that cost nothing", "1 worker",
    ]  # fmt: skip
    assert "16.3 to 20.8" in rows[0]
    assert "x2.81" in rows[1]
    assert rows[2].rstrip().endswith("within the noise")
    assert note == "as given was measured twice: 20.4 and 16.6 steps/s, which differ by noise"


def test_own_workers_are_a_variant_where_only_the_trial_keeps_these_alive() -> None:
    kept = replace(trial("2", 18, 2), persistent=True)
    text = shown([trial("as given", 10, 2), kept])
    assert "as given (2 workers) " in text
    assert "2 workers, persistent " in text
    assert "persistent_workers=True" in text
    assert "x1.80" in text
    text = shown([replace(trial("as given", 10, 2), persistent=True), kept])
    assert "measured twice" in text
    assert "x1.80" not in text


def test_what_noise_may_explain_is_no_gain() -> None:
    said = trials_headline([trial("as given", 10), trial("kept", 10.2), trial("2", 9.9)])
    assert said == "if batches cost nothing: no gain above 6 %; 2 workers: no gain above 3 %"
    noisy = replace(trial("kept", 41), low=9.66, high=129.0)
    said = trials_headline([trial("as given", 10), noisy])
    assert said.startswith("if batches cost nothing: too noisy to tell, up to 1216 % faster")
