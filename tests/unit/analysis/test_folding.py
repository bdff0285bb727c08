"""A run that was folded while it went on tells the same totals, and says what it does not keep."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from haiprof.base.errors import MissingDataError
from haiprof.base.units import NS_PER_S
from haiprof.diagnosis.compare.compared_run import open_compared_run
from haiprof.diagnosis.compare.comparison import compare_steps
from haiprof.diagnosis.engine import diagnose
from haiprof.diagnosis.run_ledger import RunLedger, plain_ledger
from haiprof.live.follow import steps_so_far
from haiprof.run_analysis.folding import MOST_WORKER_SAMPLES, Retention, fold_node
from haiprof.run_analysis.run_frames import RunFrames
from haiprof.run_format import schema
from haiprof.run_format.layout import RunPaths
from haiprof.run_format.tables import GPU, PROCESS
from haiprof.run_format.writer import append_line
from haiprof.show.rank_summary import one_rank_summary
from tests.unit.analysis.recorded import (
    CLOCK,
    packed,
    row_of,
    spans_from,
    spans_of,
    write_rank,
    write_records,
    write_run,
)
from tests.unit.analysis.sampled import Stack, write_stacks

STEPS = 900
BEGIN_NS = 50 * NS_PER_S
KEPT = Retention(steps_ns=240 * NS_PER_S, samples_ns=120 * NS_PER_S, counters_ns=120 * NS_PER_S)
MODEL = (("/job/train.py", 10, "main"), ("/job/model.py", 20, "forward"))
EARLY = (("/job/train.py", 10, "main"), ("/job/early.py", 30, "only_early"))
Rows = list[tuple[int, int, int, int]]


def steps_of(random: np.random.Generator, *, count: int = STEPS, loader: bool = True) -> Rows:
    """Steps of about half a second, with all that may happen in and between them."""
    rows: Rows = []
    now = BEGIN_NS
    micro = int(random.integers(1, 3))
    closure = bool(random.integers(2))

    def spend(kind: int, ms: float, tag: int = 0) -> None:
        nonlocal now
        length = int(ms * 1e6 * random.uniform(0.9, 1.1))
        rows.append((kind, tag, now, now + length))
        now += length + int(random.integers(10, 10_000_000))

    for step in range(count):
        slow = 8.0 if random.random() < 0.01 else 1.0
        if loader and step % 200 == 0:
            spend(schema.DATA_ITER, 30)
        for _ in range(micro):
            if loader:
                spend(schema.DATA, 20 * slow)
            if closure:
                continue
            spend(schema.FORWARD, 150)
            spend(schema.BACKWARD, 250 * slow)
        if random.random() < 0.1:
            begin = now - 3_000_000
            rows.append((schema.GC, 2, begin, begin + 2_000_000))
        if closure:
            begin = now
            now += 1_000_000
            spend(schema.FORWARD, 150)
            spend(schema.BACKWARD, 250 * slow)
            rows.append((schema.OPTIMIZER, 0, begin, now))
            now += int(random.integers(10, 100_000))
        else:
            spend(schema.OPTIMIZER, 40)
        if step % 150 == 149:
            for _ in range(4):
                if loader:
                    spend(schema.DATA, 5)
                spend(schema.EVAL, 50)
            if loader:
                spend(schema.DATA_END, 1)
        if step % 180 == 179:
            spend(schema.SAVE, 300)
    return sorted(rows, key=lambda row: row[3])


def write_job(root: Path, seed: int, *, ranks: int = 2, loader: bool = True) -> RunPaths:
    """Ranks of one node, with counters each second, stacks, and device times."""
    random = np.random.default_rng(seed)
    run = write_run(root)
    for rank in range(ranks):
        rows = steps_of(random, loader=loader)
        spans = spans_from(rows)
        end_ns = rows[-1][3]
        lines = [
            {"type": "cost", "event_count": len(rows), "event_ns": 900.0, "elapsed_ns": end_ns}
        ]
        for start, end in ((r[2], r[3]) for r in rows if r[0] == schema.SAVE):
            lines.append({"type": "checkpoint", "action": "save", "start_ns": start, "end_ns": end,
                          "file": "/job/model.pt"})  # fmt: skip
        write_rank(run, spans, rank=rank, lines=lines, local_rank=rank, world_size=ranks)
        half = (BEGIN_NS + end_ns) // 2
        times = range(BEGIN_NS, end_ns, NS_PER_S // 2)
        samples = [(t, EARLY if t < half and t // NS_PER_S % 3 == 0 else MODEL) for t in times]
        write_stacks(run.rank(rank).stacks, samples, pid=100 + rank)
        closing = [row[3] for row in rows if row[0] == schema.OPTIMIZER]
        write_records(
            run.rank(rank).device,
            schema.DEVICE,
            [(time_ns, 1.0, 2.0, 3.0, 1.0, 5e8, 0, 1e7, 0.0) for time_ns in closing],
        )
        beats = enumerate(range(BEGIN_NS, end_ns, NS_PER_S))
        write_records(
            run.rank(rank).heartbeat, schema.HEARTBEAT, [(t, 0, n, n, n) for n, t in beats]
        )
    seconds = list(range(BEGIN_NS, end_ns, NS_PER_S))
    process, gpu = [], []
    for number, time_ns in enumerate(seconds):
        for rank in range(ranks):
            reset = number >= len(seconds) // 4
            process.append(row_of(
                PROCESS, time_ns=time_ns, pid=100 + rank, start_ticks=7,
                cpu_ns=number * 10**9 - (len(seconds) // 5 * 10**9 if reset else 0),
                memory_rss_bytes=(number + 1) << 20, run_queue_wait_ns=number * 10**7,
            ))  # fmt: skip
            gpu.append(row_of(GPU, time_ns=time_ns, gpu=rank, utilization_ratio=0.5,
                              throttle_reasons=4 if number == 33 else 0))  # fmt: skip
    write_records(run.node("node0").records("process"), PROCESS, process)
    write_records(run.node("node0").records("gpu"), GPU, gpu)
    return run


def cut_job(run: RunPaths, until_ns: int) -> None:
    """What the job had written by then: in a folded file offsets stay what they are."""
    for _, _, paths in run.rank_folders():
        data = paths.phases.read_bytes()
        begin = data.index(b"\n") + 1
        words = np.frombuffer(data[begin:], dtype="<i8").reshape(-1, 2)
        count = int((words[:, 1] >> schema.TAG_BITS <= until_ns).sum())
        os.truncate(paths.phases, begin + count * 16)


def own_ledger(run: RunPaths) -> RunLedger:
    found = plain_ledger(RunFrames(run.root))
    assert found is not None
    return found


def totals(found: RunLedger) -> dict[int, list[int]]:
    """By rank: ns of all judged steps in each position, collections apart."""
    sums = found.time.totals_ns
    apart = np.stack([sums[:, :2].sum(axis=1), sums[:, 2]], axis=1)
    return {r: own.astype(np.int64).ravel().tolist() for r, own in zip(
        found.time.ranks, apart, strict=True)}  # fmt: skip


def disk_bytes(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_blocks * 512 for path in paths)


@pytest.fixture(scope="module", params=[(2, True), (3, False), (4, True)],
                ids=["loop", "no loader", "closures"])  # fmt: skip
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunPaths, RunPaths]:
    """A run, and the same folded three times while it went on."""
    seed, loader = request.param
    folder = tmp_path_factory.mktemp("folding")
    whole = write_job(folder / "whole", seed, loader=loader)
    other = RunPaths(folder / "folded")
    shutil.copytree(whole.root, other.root)
    full = {n: paths.phases.read_bytes() for n, _, paths in whole.rank_folders()}
    end_ns = max(RunFrames(whole.root).steps()["start_ns"].to_list()) - CLOCK.wall_ns
    for part in (0.6, 0.8, 1.0):
        cut_job(other, BEGIN_NS + int((end_ns - BEGIN_NS) * part))
        if part == 1.0:
            part = 2.0
        assert fold_node(other, "node0", KEPT) == []
        for rank, _, paths in other.rank_folders():  # the job goes on
            size = paths.phases.stat().st_size
            with open(paths.phases, "ab") as file:
                file.write(full[rank][size:])
    return whole, other


def test_totals_of_ledger_are_the_same_to_the_nanosecond(both: tuple[RunPaths, RunPaths]) -> None:
    whole, other = map(own_ledger, both)
    assert len(other.time.step) < len(whole.time.step)
    assert totals(other) == totals(whole)
    assert other.ledger.count == whole.ledger.count
    assert other.ledger.positions == pytest.approx(whole.ledger.positions, rel=1e-12)
    assert other.ledger.mean_ns == pytest.approx(whole.ledger.mean_ns, rel=1e-12)
    assert abs(other.ledger.sum_error_ns) < 1


def test_what_is_said_of_ranks_is_the_same(both: tuple[RunPaths, RunPaths]) -> None:
    names = ["rank", "attempt", "step_count", "eval_ns", "nograd_ns", "unfinished_micro_step_count",
             "cost_ns_per_step", "record_start_ns"]  # fmt: skip
    whole, other = (RunFrames(run.root) for run in both)
    assert other.ranks().select(names).rows() == whole.ranks().select(names).rows()
    assert other.loading().rows() == whole.loading().rows()
    assert other.most_steps() == whole.most_steps()
    saves = pl.col("phase") == "save"
    assert other.pauses().filter(saves).rows() == whole.pauses().filter(saves).rows()


def test_goodput_is_the_same_to_the_nanosecond(both: tuple[RunPaths, RunPaths]) -> None:
    whole, other = (RunFrames(run.root).goodput() for run in both)
    assert other.accounts == whole.accounts
    assert other.wall_ns == whole.wall_ns
    assert [start.kept_steps for start in other.starts] == [s.kept_steps for s in whole.starts]


def test_steps_that_are_whole_have_same_numbers_and_times(both: tuple[RunPaths, RunPaths]) -> None:
    whole, other = (RunFrames(run.root) for run in both)
    kept = other.steps()
    assert 0 < kept.height < whole.steps().height
    same = kept.join(whole.steps(), on=kept.columns, how="semi", nulls_equal=True)
    assert same.height == kept.height
    slow = other.slow_steps().drop(pl.selectors.contains("_device_ns"))
    known = whole.steps().join(slow, on=slow.columns, how="semi", nulls_equal=True)
    assert known.height == slow.height
    long = whole.steps().filter(pl.col("step_ns") > 1.8 * pl.col("step_ns").median().over("rank"))
    found = pl.concat([kept, other.slow_steps()]).select("rank", "step")
    assert long.join(found, on=["rank", "step"], how="anti").is_empty()
    assert other.slow_steps().filter(step=0).height == 2


def test_a_verdict_counts_all_and_says_for_which_part_detail_is_gone(
    both: tuple[RunPaths, RunPaths],
) -> None:
    whole, other = (diagnose(RunFrames(run.root), trace_limit_bytes=0) for run in both)
    assert (other.step_count, other.most_steps) == (whole.step_count, whole.most_steps)
    assert other.events == whole.events
    assert other.run_time == whole.run_time
    assert any("steps 0 to" in note and "sums" in note for note in other.notes)
    assert not any("damaged" in note or "missing" in note for note in other.notes)


def test_code_that_ran_only_in_the_folded_part_is_still_in_the_ledger(
    both: tuple[RunPaths, RunPaths],
) -> None:
    shares = []
    for run in both:
        found = own_ledger(run)
        early = [a.ns_per_step for a in found.ledger.accounts if a.function == "only_early"]
        shares.append(sum(early) / found.ledger.mean_ns)
    assert shares[0] > 0.05
    assert shares[1] == pytest.approx(shares[0], rel=0.3)


def test_compared_with_itself_nothing_has_changed(both: tuple[RunPaths, RunPaths]) -> None:
    whole, other = (open_compared_run(run.root) for run in both)
    assert other.step_count == whole.step_count
    assert len(other.step_ns) == len(whole.step_ns)
    assert other.step_ns.mean() == pytest.approx(whole.step_ns.mean(), rel=1e-6)


def test_counters_grow_as_much_and_gauges_have_same_mean(both: tuple[RunPaths, RunPaths]) -> None:
    sums = []
    for run in both:
        frame = RunFrames(run.root).counters().sort("rank", "metric", "time_ns")
        cores = frame.filter(pl.col("metric") == "cpu_cores", pl.col("rank") == 0)
        begin = BEGIN_NS + CLOCK.wall_ns - CLOCK.mono_ns
        spacing = np.diff(cores["time_ns"].to_numpy(), prepend=begin)
        growth = float(np.nansum(cores["value"].to_numpy() * spacing))
        flags = cores["flag"].drop_nulls().to_list()
        bits = frame.filter(pl.col("metric") == "throttle_reasons")["value"].max()
        sums.append((round(growth / NS_PER_S), flags, bits, frame.height))
    assert sums[0][1:3] == sums[1][1:3] == (["reset"], 4.0)
    assert sums[1][0] == sums[0][0]
    assert sums[1][3] < sums[0][3] / 2


def test_what_is_folded_takes_less_of_the_disk(both: tuple[RunPaths, RunPaths]) -> None:
    """Room is given back in blocks of the file system: these files are of a few dozen."""
    sizes = []
    for run in both:
        rank, node = run.rank(0), run.node("node0")
        files = [rank.phases, rank.device, rank.stacks, rank.heartbeat, node.records("gpu"),
                 node.records("process")]  # fmt: skip
        sizes.append(disk_bytes(files))
    assert sizes[1] < 0.6 * sizes[0]


def test_a_crash_before_room_is_given_back_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_job(tmp_path / "whole", 7)
    other = RunPaths(tmp_path / "folded")
    shutil.copytree(whole.root, other.root)

    def crash(*_: object, **__: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("haiprof.run_format.folded.free_beginning", crash)
        with pytest.raises(KeyboardInterrupt):
            fold_node(other, "node0", KEPT)
    assert other.rank(0).folded.exists()
    assert not other.rank(1).folded.exists()
    assert totals(own_ledger(other)) == totals(own_ledger(whole))
    assert fold_node(other, "node0", KEPT) == []
    assert totals(own_ledger(other)) == totals(own_ledger(whole))


def test_a_crash_while_it_is_written_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_job(tmp_path / "whole", 8)
    before = {path: path.read_bytes() for path in whole.root.rglob("*") if path.is_file()}

    def crash(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            fold_node(whole, "node0", KEPT)
    assert {path: path.read_bytes() for path in whole.root.rglob("*") if path.is_file()} == before


def test_who_reads_while_it_is_folded_sees_one_state(tmp_path: Path) -> None:
    """Spans are read again where they are many: the same ones, though they were folded since."""
    run = write_job(tmp_path / "run", 9)
    frames = RunFrames(run.root)
    frames.steps()
    object.__setattr__(frames._loaded, "kept", None)
    assert fold_node(run, "node0", KEPT) == []
    again = frames.phases()
    last = frames.steps()["step"].max()
    assert again["step"].max() == last


def test_a_file_system_without_holes_keeps_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = write_job(tmp_path / "whole", 10)
    expected = totals(own_ledger(whole))
    monkeypatch.setattr("haiprof.run_format.folded.free_beginning", lambda *_, **__: False)
    assert fold_node(whole, "node0", KEPT) == []
    assert totals(own_ledger(whole)) == expected


def test_a_damaged_file_is_said_and_the_rest_is_read(tmp_path: Path) -> None:
    run = write_job(tmp_path / "run", 11, ranks=1)
    assert fold_node(run, "node0", KEPT) == []
    paths = (run.rank(0).folded, run.node("node0").old_records("gpu"))
    whole = [path.read_bytes() for path in paths]
    for size in (0, 10, 400, -1, -700):
        for path, data in zip(paths, whole, strict=True):
            path.write_bytes(data[:size])
        frames = RunFrames(run.root)
        assert frames.steps().height
        assert frames.counters().height
        assert any("folded.rec: damaged" in note for note in frames.notes()), size
        assert fold_node(run, "node0", KEPT) != []


def test_a_short_run_stays_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    rows = steps_of(np.random.default_rng(1), count=100)
    write_rank(run, spans_from(rows))
    data = run.rank(0).phases.read_bytes()
    assert fold_node(run, "node0") == []
    assert fold_node(run, "node0", Retention(steps_ns=NS_PER_S)) == []
    assert run.rank(0).phases.read_bytes() == data
    assert not run.rank(0).folded.exists()
    assert packed(spans_from(rows)) == data[data.index(b"\n") + 1 :]


def test_a_rank_s_slowest_steps_are_those_of_the_whole_run(both: tuple[RunPaths, RunPaths]) -> None:
    whole, other = (one_rank_summary(RunFrames(run.root), 1) for run in both)
    assert [each.step for each in other.slowest] == [each.step for each in whole.slowest]
    assert other.step_count == whole.step_count


def test_steps_of_which_sums_are_kept_are_not_compared_one_by_one(
    both: tuple[RunPaths, RunPaths],
) -> None:
    with pytest.raises(MissingDataError, match="only sums are kept"):
        compare_steps(RunFrames(both[1].root), 20)
    first = min(RunFrames(both[1].root).steps()["step"].to_list())
    found = compare_steps(RunFrames(both[1].root), first + 150)
    assert found.before.step_count > first


def test_a_running_job_counts_its_folded_steps(both: tuple[RunPaths, RunPaths]) -> None:
    whole, other = (steps_so_far(run) for run in both)
    assert whole == RunFrames(both[0].root).most_steps()
    assert abs(other - whole) <= whole // 100


# -- loader workers ---------------------------------------------------------------------------

LOAD: Stack = (("/env/torch/utils/data/_utils/fetch.py", 54, "fetch"), ("/job/data.py", 9, "load"))
DECODE: Stack = (*LOAD, ("/job/data.py", 30, "decode"))
IDLE: Stack = (("/env/queues.py", 3, "get"),)


def write_workers(run: RunPaths, *, epochs: int = 6, workers: int = 2) -> int:
    """Each epoch has its own workers: they load, decode for a third of it, and wait; its end."""
    write_rank(run, spans_of("D F B O"), rank=0)
    now = NS_PER_S
    for epoch in range(epochs):
        for worker in range(workers):
            stacks = (LOAD, DECODE, LOAD, LOAD, DECODE, IDLE)
            samples = [(now + i * NS_PER_S // 10, stacks[i % 6]) for i in range(1200)]
            pid = 100 + epoch * workers + worker
            write_stacks(run.rank(0).worker_stacks(worker), samples, worker=worker, pid=pid,
                         libraries=["/env"])  # fmt: skip
        now += 121 * NS_PER_S
    return now


def worker_times(run: RunPaths) -> tuple[dict[tuple[str, int], float], int]:
    """Seconds of each innermost frame of all workers, and how many samples there are."""
    found = RunFrames(run.root).code_samples()
    assert not found.notes
    times: dict[tuple[str, int], float] = {}
    for stack, worker, ns in zip(found.stack, found.worker, found.weight_ns, strict=True):
        place = found.tree.frames[found.tree.place[stack]]
        key = place.function, int(worker)
        times[key] = times.get(key, 0.0) + ns / NS_PER_S
    return times, len(found.stack)


def test_stacks_of_workers_keep_their_shares_in_a_part_of_their_room(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_workers(run)
    before, count = worker_times(run)
    raw = disk_bytes(list(run.rank(0).worker_stack_files().values()))
    for kept_s in (400, 200, 60):  # once an hour, of a run that goes on
        assert fold_node(run, "node0", Retention(samples_ns=kept_s * NS_PER_S)) == []
        after, left = worker_times(run)
        assert after.keys() == before.keys()
        for place, seconds in before.items():
            assert after[place] == pytest.approx(seconds, rel=0.15)
        assert sum(after.values()) == pytest.approx(sum(before.values()), rel=0.01)
    assert left < 2 * 600 + MOST_WORKER_SAMPLES + 10 < count
    paths = [*run.rank(0).worker_stack_files().values(), run.rank(0).old_worker_stacks]
    assert disk_bytes(paths) < raw / 3


def test_a_worker_that_goes_on_after_it_was_folded_is_known(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_rank(run, spans_of("D F B O"), rank=0)
    path = run.rank(0).worker_stacks(0)
    samples = [(NS_PER_S + i * NS_PER_S // 10, (LOAD, DECODE)[i % 2]) for i in range(6000)]
    write_stacks(path, samples, worker=0)
    for kept_s in (300, 100):
        fold_node(run, "node0", Retention(samples_ns=kept_s * NS_PER_S))
    line = {"type": "samples", "pid": 7, "time_ns": 900 * NS_PER_S, "offset_us": [0, 100_000],
            "stack": [2, 3]}  # fmt: skip
    append_line(path, line)
    found = RunFrames(run.root).code_samples()
    assert not found.notes
    assert [found.tree.frames[found.tree.place[s]].function for s in found.stack[-2:]] == [
        "load", "decode",
    ]  # fmt: skip


def test_damaged_old_samples_of_workers_are_said_and_stay(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_workers(run)
    fold_node(run, "node0", Retention(samples_ns=60 * NS_PER_S))
    old = run.rank(0).old_worker_stacks
    for text in (b"{}\n", b"\0\0\n", old.read_bytes()[:-9]):
        old.write_bytes(text)
        left = fold_node(run, "node0", Retention(samples_ns=30 * NS_PER_S))
        notes = RunFrames(run.root).code_samples().notes
        assert any("old samples of workers are not known" in note for note in notes)
        assert [why for why in left if "old samples of workers are not known" in why]
        assert old.read_bytes() == text
