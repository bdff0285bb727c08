"""A trial of `haiprof try-loader` changes the loaders, and those of no other run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from haiprof.base.options import ENV_TRY_LOADER
from haiprof.in_job.loader_trial import change_loaders

SAMPLES = TensorDataset(torch.arange(64.0))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory; what a trial changes is put back."""
    monkeypatch.setattr(DataLoader, "__init__", DataLoader.__init__)
    monkeypatch.setattr(_BaseDataLoaderIter, "__next__", _BaseDataLoaderIter.__next__)
    monkeypatch.setattr(torch, "save", torch.save)
    return tmp_path / "run"


def ask(monkeypatch: pytest.MonkeyPatch, run: Path, mode: str) -> None:
    monkeypatch.setenv(ENV_TRY_LOADER, f"{run.parent}:{mode}")
    change_loaders(run)


def test_workers_are_those_of_the_trial_however_they_are_given(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, run, "2")
    assert DataLoader(SAMPLES, 4).num_workers == 2
    assert DataLoader(SAMPLES, 4, False, None, None, 1).num_workers == 2
    assert DataLoader(SAMPLES, num_workers=8).persistent_workers
    assert not DataLoader(SAMPLES, num_workers=8, persistent_workers=False).persistent_workers


def test_without_workers_what_is_theirs_is_left_out(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, run, "0")
    loader = DataLoader(
        SAMPLES, 4, num_workers=2, prefetch_factor=4, persistent_workers=True, timeout=9.0,
        multiprocessing_context="fork",
    )  # fmt: skip
    assert loader.num_workers == 0
    assert len(list(loader)) == 16


def test_kept_batches_are_handed_out_again_and_an_epoch_stays_as_long(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, run, "kept")
    loader = DataLoader(SAMPLES, 4)
    first, second = ([int(batch[0][0]) for batch in loader] for _ in range(2))
    assert first == [*range(0, 32, 4), *range(0, 32, 4)]
    assert second == first


def test_a_trial_writes_no_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, run, "as given")
    torch.save({"a": torch.ones(3)}, run.parent / "model.pt")
    assert not (run.parent / "model.pt").exists()


@pytest.mark.parametrize("given", ["", "2", "/elsewhere:2"])
def test_another_run_is_left_as_it_is(
    run: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    before = (DataLoader.__init__, _BaseDataLoaderIter.__next__, torch.save)
    monkeypatch.setenv(ENV_TRY_LOADER, given)
    change_loaders(run)
    assert (DataLoader.__init__, _BaseDataLoaderIter.__next__, torch.save) == before
