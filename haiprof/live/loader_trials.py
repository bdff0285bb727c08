"""Short runs of a job with other DataLoaders: what a free loader and each number of workers bring.

Each trial is the whole job, started anew, and ended after some hundred steps. Its run directory is
in a folder of its own that is removed; the hook changes the loaders only of runs in that folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from haiprof.base.errors import HaiprofError, MissingDataError
from haiprof.base.options import ENV_TRY_LOADER, KEPT_BATCHES
from haiprof.base.safe_files import MadeFolder, create_file, make_named_folder
from haiprof.base.statistics import RUN_RATIO, block_mean
from haiprof.base.subcommand import Subcommand
from haiprof.base.units import NS_PER_S, duration_text
from haiprof.live.find import Progress
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format.manifest import find_runs

AS_GIVEN = "as given"
_START_S = 600.0  # How long a job may take to its first step
_POLL_S = 0.5
_END_S = 30.0
_LEAST_STEPS = 40
_WARM_PART = 4
"""A fourth of the steps is left out: batches that workers had made ahead, caches, compilation."""
_CONFIDENCE = 0.95
_TOLD_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTrial:
    """One trial."""

    loader: str  # `as given`, `kept` (batches cost nothing), or the number of workers
    workers: int | None  # What its loaders had, of the one with most; None where none was made
    persistent: bool = False
    """Whether that one kept its workers from epoch to epoch, as it does with numbers of workers."""
    ranks: int = 0
    step_count: int = 0  # Steps that were measured, of the rank with the longest ones
    steps_per_s: float | None = None
    low: float | None = None
    high: float | None = None  # Where that lies with 95 % certainty, by the steps of this trial
    reason: str | None = None  # Why nothing was measured


def try_loaders(
    words: Sequence[str], *, counts: Sequence[int] | None, steps: int, time_s: float,
    start: Subcommand, progress: Progress, kept: Path | None = None,
) -> list[LoaderTrial]:  # fmt: skip
    """Tries the loader as given, a free one, then numbers of workers.

    A trial ends after so many steps, or so long from its first step. None of `counts` takes 0, 1,
    2, 4, ... up to a rank's share of the cores; the run directories go into `kept`, or nowhere.
    """
    found: list[LoaderTrial] = []

    def attempt(loader: str) -> LoaderTrial:
        named = {AS_GIVEN: loader, KEPT_BATCHES: "with kept batches", "1": "with 1 worker"}
        words_of = named.get(loader, f"with {loader} workers")
        progress(f"trying the loader {words_of}: {steps} steps, or {time_s:g} s")
        found.append(_try(loader, words, steps=steps, time_s=time_s, start=start, kept=kept))
        return found[-1]

    began = time.monotonic()
    given = attempt(AS_GIVEN)
    if given.reason is not None:
        raise MissingDataError(
            f"nothing to try: {given.reason}",
            hint="give the command of a job that reads through torch.utils.data.DataLoader",
        )
    numbers = worker_counts(given.ranks) if counts is None else counts
    took_ns, count = (time.monotonic() - began) * NS_PER_S, 1 + len(numbers)
    to_go = f"{count} trials to go, up to about {duration_text(count * took_ns)} in all"
    progress(f"it took {duration_text(took_ns)}; {to_go}")
    for loader in (KEPT_BATCHES, *map(str, numbers)):
        attempt(loader)
    return found


def worker_counts(ranks: int) -> list[int]:
    """0, 1, 2, 4, ... and the last one a rank's share of the cores."""
    most = max(len(os.sched_getaffinity(0)) // max(ranks, 1), 1)
    return [0, *(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def _try(
    loader: str, words: Sequence[str], *, steps: int, time_s: float, start: Subcommand,
    kept: Path | None,
) -> LoaderTrial:  # fmt: skip
    if kept is not None:
        make_named_folder(kept)
    made = MadeFolder.temporary("haiprof-try-loader-", kept)  # of one trial alone
    with made if kept is None else contextlib.nullcontext(made.path) as path:
        folder = path.resolve()
        output = folder / "output.txt"
        with os.fdopen(create_file(output, below=folder), "wb") as file:
            process = subprocess.Popen(
                start("run", "--quiet", "--react", "off", "--log-dir", str(folder), "--", *words),
                env={**os.environ, ENV_TRY_LOADER: f"{folder}:{loader}"},
                stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            )  # fmt: skip
            try:
                _wait(process, folder, steps=steps, time_s=time_s)
            finally:
                ended = process.poll()
                for number in (signal.SIGTERM, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(_END_S)
        found = _measure(loader, folder)
        if found.reason is None or not ended:
            return found
        said = " ".join(output.read_text(errors="replace").split())[-_TOLD_CHARS:]
        own = said.partition("haiprof: error: ")[2].partition(" haiprof: hint: ")[0]
        why = own or f"the job ended with status {ended}: {said}"
        return LoaderTrial(loader=loader, workers=found.workers, reason=why)


def _wait(process: subprocess.Popen[bytes], folder: Path, *, steps: int, time_s: float) -> None:
    """Until enough steps are in the files, or the time is over, or the job."""
    limit, begun = time.monotonic() + _START_S, False
    while process.poll() is None and time.monotonic() < limit:
        time.sleep(_POLL_S)
        count = max((len(starts) for starts in _starts(folder).values()), default=0)
        if count >= steps:
            return
        if count and not begun:
            begun, limit = True, time.monotonic() + time_s


def _starts(folder: Path) -> dict[int, pl.Series]:
    """When the steps of each rank's last attempt began."""
    try:
        steps = RunFrames(find_runs(folder)[-1]).steps()
    except (HaiprofError, IndexError):  # not there yet
        return {}
    last = steps.filter(pl.col("attempt") == pl.col("attempt").max().over("rank"))
    return {int(str(rank)): part["start_ns"] for (rank,), part in last.group_by("rank")}


def _measure(loader: str, folder: Path) -> LoaderTrial:
    starts, none = _starts(folder), LoaderTrial(loader=loader, workers=None)
    try:
        files = RunFrames(find_runs(folder)[-1]).files
    except (HaiprofError, IndexError):
        return replace(none, reason="the job was not recorded")
    lines = [line for rank in files.ranks for line in rank.of_type("dataloader")]
    known = [(line.get("workers"), bool(line.get("persistent"))) for line in lines]
    workers, persistent = max(((n, p) for n, p in known if isinstance(n, int)),
                              default=(None, False))  # fmt: skip
    none = replace(none, workers=workers)
    if not starts:
        return replace(none, reason="no training step was seen")
    if not lines:
        return replace(none, reason="no torch DataLoader ran in it")
    if loader.isdecimal() and workers != int(loader):
        why = f"the job's loaders have {workers} workers, whatever they are made with"
        return replace(none, reason=why)
    periods = {
        rank: part.sort().diff().slice(1 + len(part) // _WARM_PART).cast(pl.Float64).to_numpy()
        for rank, part in starts.items()
    }
    shortest = min(map(len, periods.values()))
    if shortest < _LEAST_STEPS:
        why = f"only {shortest} steps could be measured"
        return replace(none, ranks=len(starts), reason=why)
    slowest = max(periods.values(), key=lambda own: float(own.mean()))
    mean = block_mean(slowest, run_ratio=RUN_RATIO)
    half = min(mean.error.half_width(_CONFIDENCE), 0.99 * mean.value)
    return replace(
        none, persistent=persistent, ranks=len(starts), step_count=len(slowest),
        steps_per_s=NS_PER_S / mean.value, low=NS_PER_S / (mean.value + half),
        high=NS_PER_S / (mean.value - half),
    )  # fmt: skip
